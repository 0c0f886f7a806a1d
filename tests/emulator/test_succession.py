"""Launches that start beside the one before them: what that one wrote is not there until somebody has waited for it."""

import re

import numpy as np
import pytest
import torch

from cute_flash.emulator.errors import EmulatorError, IllegalInstruction
from cute_flash.emulator.host import RUNTIME
from cute_flash.emulator.machine import HOST, Launch, Options
from cute_flash.emulator.program import Program
from cute_flash.emulator.ptx import parse
from cute_flash.emulator.succession import Succession
from tests import packed
from tests.cached import taken_out

from .. import oracle
from . import test_hopper_cache as caches
from . import test_hopper_varlen as varlen
from .bare import kernel
from .gradients import EVERY_DAY, cell, gradients

START, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
WRITE = "mov.u32 %r1, 7; st.global.u32 [%d0], %r1;"
LOOK, LOOK_TOO = (f"ld.global.u32 %r2, [%d0]; st.global.u32 [%d{n}], %r2;" for n in (1, 2))


def launched(*bodies: str, mode: str = "late") -> list[int]:
    """Three words in memory, which start as 0, after these kernels were launched beside one another."""
    words = [np.zeros(1, np.uint32) for _ in range(3)]
    succession = Succession([(x.ctypes.data, x.ctypes.data + 4) for x in words], HOST)
    params = np.array([x.ctypes.data for x in words], np.uint64).view(np.uint8)
    for body in bodies:
        program = Program(parse(kernel(body, 3, 32))["test"])
        ahead = succession.begin(True, START in body)
        launch = Launch(program, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, params, Options(mode=mode), ahead=ahead)
        launch.run()
        succession.end(launch, "test")
    return [int(x[0]) for x in words]


@pytest.mark.parametrize("mode", ["eager", "late", "random"])
def test_who_waits_sees_what_was_written_and_who_looks_before_does_not(mode):
    assert launched(START + WRITE, WAIT + LOOK, mode=mode) == [7, 7, 0]
    assert launched(START + WRITE, LOOK + WAIT + LOOK_TOO, mode=mode) == [7, 0, 7]


def test_a_kernel_that_lets_nobody_start_is_complete():
    assert launched(WRITE, LOOK) == [7, 7, 0]


def test_what_is_written_late_stays():
    """Where both write to one place, the one before may be the last."""
    assert launched(START + WRITE, "mov.u32 %r1, 9; st.global.u32 [%d0], %r1;" + WAIT) == [7, 0, 0]


def test_who_lets_others_start_before_it_has_waited_speaks_for_itself_alone():
    assert launched(START + WRITE, WAIT + START, LOOK + WAIT) == [7, 7, 0]
    assert launched(START + WRITE, START + WAIT, LOOK + WAIT + LOOK_TOO) == [7, 0, 7]


def test_who_never_waits_is_told():
    with pytest.raises(IllegalInstruction, match="never waits for it"):
        launched(START + WRITE, LOOK)


# ---------------------------------------------------------------------------------------------------- our own kernels


def appended(**knobs) -> float:
    case, new = caches.APPENDS[0]
    whole, part = caches.make_inputs(case), caches.make_inputs(case)
    (k_new, v_new), before = taken_out(part, new)
    tables = {**part.tables, "cache_seqlens": before, "k_new": k_new, "v_new": v_new}
    with caches.emulated(EVERY_DAY[0]):
        RUNTIME.edit = knobs.get("edit")
        result = caches.attention_kvcache(*part.qkv, **case.options, **tables, num_splits=2, backend="sm90")
    return oracle.relative_error(result, caches.exact(case, whole).out)


CASE = packed.same(5, 70, 0, 130, causal=True, head_dim=128, head_dim_v=128, dtype="bfloat16")


def packed_forward(**knobs) -> float:
    inputs = packed.make_inputs(CASE)
    with varlen.emulated(EVERY_DAY[0]):
        RUNTIME.edit = knobs.get("edit")
        out = varlen.cute_flash.attention_varlen(
            inputs.q, inputs.k, inputs.v, **inputs.lengths, **varlen.LONG, causal=True, backend="sm90"
        )
    return oracle.relative_error(out, packed.exact(CASE, inputs)[0].out)


def backward(each, **knobs) -> float:
    found, inputs, _ = gradients(each, EVERY_DAY[0], **knobs)
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=each.case.causal)
    return max(oracle.relative_error(a, b) for a, b in zip(found, exact, strict=True))


CHAINS = {
    "append, attend, merge": appended,
    "prepare, attend": packed_forward,
    "delta, gradients": lambda **knobs: backward(cell(64, (130, 130)), **knobs),
    "delta, dK and dV, dQ": lambda **knobs: backward(cell(256, (65, 65), causal=True), **knobs),
}


def zeros_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of units that is read too soon may else name as many as a word holds, and all of them are walked."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        made = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, made=made, **options: made(*args, **options).zero_())


@pytest.mark.parametrize("chain", CHAINS)
def test_a_kernel_that_does_not_wait_is_noticed(chain, poisoned_empty, monkeypatch):
    assert CHAINS[chain]() < 6e-3
    zeros_before(monkeypatch)
    with pytest.raises(IllegalInstruction, match="never waits for it"):
        CHAINS[chain](edit=lambda ptx: ptx.replace(WAIT, ""))


def sooner(ptx: str) -> str:
    """Who waits and lets others start does the second first."""
    entries = re.split(r"(?=\.visible \.entry)", ptx)
    both = [START in entry and WAIT in entry for entry in entries]
    assert any(both)
    changed = [entry.replace(START, "").replace(WAIT, START + WAIT) for entry in entries]
    return "".join(new if swap else old for old, new, swap in zip(entries, changed, both, strict=True))


def test_dq_that_starts_before_delta_was_waited_for_is_noticed(poisoned_empty):
    """Its own wait is at its end: until then it reads what the kernel for dK and dV has waited for."""
    try:
        error = CHAINS["delta, dK and dV, dQ"](edit=sooner)
    except EmulatorError:
        return
    assert not error < 0.02


def test_launches_of_a_call_know_its_tensors(monkeypatch):
    """Through the front door too: what is touched outside them is an error, and what is written is followed."""
    known = []
    monkeypatch.setattr(RUNTIME, "_run", lambda *_: known.append(RUNTIME.ranges) or 0)
    q, k, v = (torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    with varlen.emulated(EVERY_DAY[0]):
        varlen.cute_flash.attention(q, k, v, backend="sm90")
    assert known and all(ranges and any(low == q.data_ptr() for low, _ in ranges) for ranges in known)
