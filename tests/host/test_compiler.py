"""Plan -> callable through memory and disk: one compile a key, whatever happens to processes, files and folders."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_flash import BackendBuildError, attention
from cute_flash.runtime import compiler, diskcache, toolchain
from cute_flash.spec import settings
from cute_flash.spec.mask import CAUSAL
from cute_flash.spec.plan import Plan, Tile

from ..fakes import Exported, FakeBackend, HostDslBackend

pytestmark = pytest.mark.usefixtures("office")

PLAN = Plan("sm90", "forward", "sm_90a", "bfloat16", 64, 64)
FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def object_file(tmp_path_factory):
    """tests/host_dsl.py, really compiled and exported once."""
    from ..host_dsl import compile_copy

    path = tmp_path_factory.mktemp("object") / "kernel.o"
    compile_copy("bfloat16", False).export_to_c(str(path), "entry")
    return path


@pytest.fixture
def backend(object_file):
    return FakeBackend("sm90", exports=True, row_alignment=16, kernel=Exported(object_file))


def operands(dim=16):
    q, k, v, out = (torch.randn(1, 3, 2, dim, dtype=torch.bfloat16) for _ in range(4))
    return q, k, v, out, None, 1.0


def works(kernel) -> bool:
    q, k, v, out, lse, scale = operands()
    kernel(q, k, v, out, lse, scale)
    return torch.equal(q, out)


def cache_files(suffix=".so"):
    return sorted(settings.current.cache_dir.glob(f"*{suffix}"))


# ---------------------------------------------------------------------------------------------------- memory, disk


def test_memory_serves_the_second_request(backend):
    first = compiler.kernel_for(backend, PLAN)
    second = compiler.kernel_for(backend, replace(PLAN))
    assert second.kernel is first.kernel and len(backend.built) == 1
    assert (compiler.stats.compiles, compiler.stats.disk, compiler.stats.memory) == (1, 0, 1)


def test_disk_serves_a_process_that_forgot(backend):
    assert works(compiler.kernel_for(backend, PLAN).kernel)
    compiler.forget()
    again = compiler.kernel_for(backend, PLAN)
    assert works(again.kernel) and again.origin.startswith("from disk in ")
    assert (compiler.stats.compiles, compiler.stats.disk) == (0, 1)
    assert len(backend.built) == 1 and len(cache_files()) == 1


def test_without_a_cache_folder_nothing_is_written(backend, tmp_path):
    with settings.override(cache_dir=None):
        assert compiler.kernel_for(backend, PLAN).kernel is backend.kernel
    assert not (tmp_path / "cache").exists()


def test_a_backend_that_exports_nothing_stays_in_memory(tmp_path):
    compiler.kernel_for(FakeBackend("triton"), PLAN)
    assert not (tmp_path / "cache").exists()


def test_every_field_of_the_plan_is_a_key():
    changes = {
        "backend": "sm100", "direction": "backward", "arch": "sm_100a", "dtype": "float16", "head_dim": 128,
        "head_dim_v": 128, "mask": CAUSAL, "lse": True, "lse_grad": True, "deterministic": True, "ieee_float32": False,
        "tile": Tile(64, 64), "variant": "another", "ctas": 132, "softcap": True,
        "draws": True, "form": "packed", "page_size": 64, "chosen": True, "appends": True,
    }  # fmt: skip
    assert set(changes) == set(Plan.__dataclass_fields__)
    keys = {diskcache.key_of(replace(PLAN, **{name: value}).key(), ()) for name, value in changes.items()}
    assert len(keys | {diskcache.key_of(PLAN.key(), ())}) == len(changes) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(toolchain, "source_hash", lambda name: "other sources"),
        lambda m: m.setattr(toolchain, "version", lambda name: "9.9" if name == "nvidia-cutlass-dsl" else "1"),
        lambda m: m.setattr(toolchain, "version", lambda name: "9.9" if name == "apache-tvm-ffi" else "1"),
        lambda m: m.setattr(toolchain, "runtime_library", lambda: Path("/x/cu99/lib/libcute_dsl_runtime.so")),
        lambda m: m.setattr(toolchain, "cpu_features", lambda: "avx1024"),
        lambda m: m.setenv("CUTE_DSL_LINEINFO", "1"),
        lambda m: m.setattr(diskcache, "FORMAT", "0"),
    ],
    ids=["sources", "DSL version", "tvm-ffi version", "CUDA major", "CPU features", "compiler variable", "format"],
)
def test_what_changes_a_kernel_changes_its_key(monkeypatch, change):
    before = diskcache.key_of(PLAN.key(), toolchain.fingerprint("sm90"))
    change(monkeypatch)
    assert diskcache.key_of(PLAN.key(), toolchain.fingerprint("sm90")) != before


def test_the_source_hash_reads_kernels_common_and_spec(monkeypatch):
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
    toolchain.source_hash.__wrapped__("sm90")
    folders = {path.parent.name for path in read}
    assert folders == {"sm90", "grad", "cached", "common", "spec"} and len(read) > 20


# ------------------------------------------------------------------------------------------------- through the door


def test_attention_compiles_exports_loads_and_launches(backends):
    """End to end with the real compiler, on the CPU: the kernel copies q into out."""
    (backend,) = backends(HostDslBackend())
    q, k, v = (torch.randn(2, 5, 3, 16, dtype=torch.bfloat16) for _ in range(3))
    assert torch.equal(attention(q, k, v), q)
    for batch, seqlen in ((1, 1), (3, 7), (2, 64)):
        q, k, v = (torch.randn(batch, seqlen, 3, 16, dtype=torch.bfloat16) for _ in range(3))
        out, lse = attention(q, k, v, return_lse=True, scale=0.5)
        assert torch.equal(out, q) and (lse == 0.5).all() and lse.shape == (batch, 3, seqlen)
    assert len(backend.built) == len(cache_files()) == 2


def test_misaligned_inputs_are_copied_for_a_kernel_that_checks(backends, capfd):
    backends(HostDslBackend())
    dense = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    shifted = torch.cat([dense.flatten()[:1], dense.flatten()])[1:].view_as(dense)
    row_17 = torch.randn(2, 5, 3, 17, dtype=torch.bfloat16)[..., :16].copy_(dense)
    last_strided = dense.transpose(2, 3).contiguous().transpose(2, 3)
    expected = attention(dense, dense, dense)
    with settings.override(log=frozenset({"dispatch"})):
        for odd in (shifted, row_17, last_strided):
            assert torch.equal(attention(odd, dense, dense), expected)
            assert torch.equal(attention(dense, odd, odd), expected)
    said = capfd.readouterr().err
    assert "q: copied, it starts 2 bytes past a multiple of 16" in said
    assert "v: copied, its heads stride of 34 bytes is not a multiple of 16" in said
    assert "k: copied, its last dimension has stride 3, not 1" in said
    assert said.count("q: copied, it starts") == 1


def test_expanded_inputs_go_in_as_they_are(backends, monkeypatch):
    backends(HostDslBackend())
    q = torch.randn(1, 5, 1, 16, dtype=torch.bfloat16).expand(4, 5, 3, 16)
    monkeypatch.setattr(torch.Tensor, "clone", None)  # a copy would fail
    assert torch.equal(attention(q, q, q), q)


@pytest.mark.parametrize("head_dim", [9, 12, 33])
def test_an_odd_head_dim_is_padded_and_the_output_is_not(backends, head_dim):
    backends(HostDslBackend())
    q, k, v = (torch.randn(2, 5, 3, head_dim, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attention(q, k, v, return_lse=True)
    assert torch.equal(out, q) and out.is_contiguous()
    assert torch.allclose(lse, torch.tensor(head_dim**-0.5))


def test_an_error_of_the_kernel_that_no_copy_explains_is_raised(backends):
    def complains(*operands):
        raise ValueError("Mismatched something")

    backends(FakeBackend("sm90", row_alignment=16, kernel=complains))
    q = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Mismatched something"):
        attention(q, q, q)


_FRESH = """
import sys, time, torch, tvm_ffi
from pathlib import Path
from cute_flash.runtime import compiler, diskcache
from cute_flash.spec import settings
from tests.host.test_compiler import PLAN, FakeBackend, works
start = time.perf_counter()
with settings.override(cache_dir=Path(sys.argv[1])):
    compiled = compiler.kernel_for(FakeBackend("sm90", exports=True), PLAN)
print(time.perf_counter() - start)
assert works(compiled.kernel) and compiler.stats.disk == 1
assert "cutlass" not in sys.modules and "triton" not in sys.modules
"""


def test_a_new_process_loads_in_milliseconds_without_the_compiler(backend):
    compiler.kernel_for(backend, PLAN)
    command = [sys.executable, "-c", _FRESH, str(settings.current.cache_dir)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1  # 0.010 s on an idle machine; the bound leaves room for a busy one


# ---------------------------------------------------------------------------------------------------- many at once


def _slow_build(backend, seconds):
    build = backend.build

    def slow(plan):
        time.sleep(seconds)
        return build(plan)

    backend.build = slow


def _race(backend, barrier, results):
    barrier.wait()
    compiled = compiler.kernel_for(backend, PLAN)
    results.put((works(compiled.kernel), compiler.stats.compiles))


def test_eight_racing_processes_compile_once(backend):
    _slow_build(backend, 0.3)
    barrier, results = FORK.Barrier(8), FORK.Queue()
    processes = [FORK.Process(target=_race, args=(backend, barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert all(fine for fine, _ in answers)
    assert sum(compiles for _, compiles in answers) == 1
    assert len(cache_files()) == 1 and not cache_files(".building")


def test_threads_that_want_one_kernel_compile_it_once_and_never_two_at_a_time(backend):
    inside, most = [], []
    build = backend.build

    def watched(plan):
        inside.append(plan)
        most.append(len(inside))
        time.sleep(0.05)
        inside.remove(plan)
        return build(plan)

    backend.build = watched
    plans = [replace(PLAN, variant=str(number)) for number in range(3)] * 4
    threads = [threading.Thread(target=compiler.kernel_for, args=(backend, plan)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(backend.built) == 3 and max(most) == 1


def _killed_while_compiling(backend, started):
    def forever(plan):
        (settings.current.cache_dir / f"{_key()}.building").mkdir(exist_ok=True)
        started.set()
        time.sleep(600)

    backend.build = forever
    compiler.kernel_for(backend, PLAN)


def _key():
    return diskcache.key_of(PLAN.key(), toolchain.fingerprint("sm90"))


def test_a_builder_killed_in_the_middle_leaves_no_lock_and_no_litter(backend):
    started = FORK.Event()
    victim = FORK.Process(target=_killed_while_compiling, args=(backend, started))
    victim.start()
    assert started.wait(60)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(60)
    assert cache_files(".building")
    assert works(compiler.kernel_for(backend, PLAN).kernel)
    assert len(cache_files()) == 1 and not cache_files(".building")


# ----------------------------------------------------------------------------------------------------- bad entries


def _stored(backend) -> Path:
    """An entry that another process made: this one has not opened it."""
    process = FORK.Process(target=compiler.kernel_for, args=(backend, PLAN))
    process.start()
    process.join(60)
    (path,) = cache_files()
    return path


def _flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[: len(data) // 3],
        lambda data: data[: len(data) * 2 // 3],
        lambda data: data[:-1],
        lambda data: b"\0" * len(data),
        lambda data: _flip(data, len(data) // 2),
        lambda data: _flip(data, len(data) - 20),
    ],
    ids=["empty", "header", "third", "two thirds", "one byte short", "zeros", "flipped bit", "flipped bit in the seal"],
)
def test_a_damaged_entry_is_rebuilt(backend, damage):
    path = _stored(backend)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    compiled = compiler.kernel_for(backend, PLAN)
    assert works(compiled.kernel) and compiled.origin.startswith("compiled in ")
    assert len(backend.built) == 1
    compiler.forget()
    assert compiler.kernel_for(backend, PLAN).origin.startswith("from disk")


def test_an_intact_entry_that_does_not_load_is_rebuilt(backend):
    path = _stored(backend)
    path.write_bytes(diskcache._seal(b"\x7fELF but not really", {"plan": "x"}))
    assert works(compiler.kernel_for(backend, PLAN).kernel) and len(backend.built) == 1


# ----------------------------------------------------------------------------------------------- awkward machines


@pytest.mark.parametrize("place", ["under a file", "kernel filesystem"])
def test_a_folder_that_cannot_be_made_is_said_once_and_memory_serves(backend, tmp_path, capfd, place):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache" if place == "under a file" else Path("/proc/cute_flash")
    with settings.override(cache_dir=folder):
        for variant in "ab":
            compiled = compiler.kernel_for(backend, replace(PLAN, variant=variant))
            assert compiled.kernel is backend.kernel
    said = capfd.readouterr().err
    assert said.count(f"the cache folder {folder} cannot be used") == 1


@pytest.mark.parametrize("suffix", ["so", "lock", "building"])
def test_a_folder_where_a_file_should_be_is_said_and_memory_serves(backend, capfd, suffix):
    path = _stored(backend).with_suffix(f".{suffix}")
    settings.current.cache_dir.joinpath(path.with_suffix(".so")).unlink()
    path.unlink(missing_ok=True)
    if suffix == "building":
        path.write_text("in the way")
    else:
        path.mkdir()
    assert compiler.kernel_for(backend, PLAN).kernel is backend.kernel
    assert "cannot be used" in capfd.readouterr().err
    diskcache.entries(settings.current.cache_dir)
    assert diskcache.clear(settings.current.cache_dir) == 0 and path.exists()


def test_listing_passes_over_what_is_gone(backend):
    path = _stored(backend)
    path.with_name("zz.so").symlink_to(path.with_name("nowhere"))
    assert [entry.path for entry in diskcache.entries(settings.current.cache_dir)] == [path]


def _as_nobody(backend, results, plan):
    os.setuid(65534)
    compiled = compiler.kernel_for(backend, plan)
    in_memory = compiled.kernel is backend.kernel
    results.put((in_memory or works(compiled.kernel), in_memory, compiler.stats.disk))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become a user who may not write")
@pytest.mark.parametrize("stored", [True, False], ids=["entry there", "entry missing"])
def test_a_read_only_folder_is_read_and_never_fatal(backend, tmp_path, stored, capfd):
    _stored(backend)
    (tmp_path / "cache").chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    results = FORK.Queue()
    plan = PLAN if stored else replace(PLAN, variant="never stored")
    process = FORK.Process(target=_as_nobody, args=(backend, results, plan))
    process.start()
    fine, in_memory, from_disk = results.get(timeout=60)
    process.join(60)
    assert fine and in_memory is not stored and from_disk == int(stored)
    assert ("cannot be used (Permission denied)" in capfd.readouterr().err) is not stored


def test_a_full_disk_is_said_and_memory_serves(backend, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diskcache.os, "replace", full)
    assert compiler.kernel_for(backend, PLAN).kernel is backend.kernel
    assert "No space left on device" in capfd.readouterr().err
    assert not cache_files(".building")


def test_without_a_linker_the_object_is_kept_and_loads_the_slower_way(backend, monkeypatch, capfd):
    monkeypatch.setattr(toolchain, "LINKERS", ("no-such-linker",))
    compiler.kernel_for(backend, PLAN)
    assert "no linker on this host (none of no-such-linker is installed)" in capfd.readouterr().err
    assert len(cache_files(".o")) == 1 and not cache_files(".so")
    compiler.forget()
    compiled = compiler.kernel_for(backend, PLAN)
    assert compiled.origin.startswith("from disk") and works(compiled.kernel)


def test_a_linker_that_fails_is_quoted_and_the_next_is_tried(backend, monkeypatch, tmp_path, capfd):
    failing = tmp_path / "failing-linker"
    failing.write_text("#!/bin/sh\necho unhappy >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(toolchain, "LINKERS", (str(failing), "ld"))
    compiler.kernel_for(backend, PLAN)
    assert len(cache_files()) == 1 and capfd.readouterr().err == ""
    monkeypatch.setattr(toolchain, "LINKERS", (str(failing),))
    compiler.kernel_for(backend, replace(PLAN, variant="again"))
    assert "unhappy" in capfd.readouterr().err


def test_a_bare_linker_is_enough(backend, monkeypatch):
    monkeypatch.setattr(toolchain, "LINKERS", ("ld",))
    assert works(compiler.kernel_for(backend, PLAN).kernel) and len(cache_files()) == 1


def test_compiling_inside_a_graph_capture_says_what_to_do(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call attention once with these options before capturing"):
        compiler.kernel_for(backend, PLAN)
    assert backend.built == []
    monkeypatch.undo()
    compiler.kernel_for(backend, PLAN)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compiler.kernel_for(backend, PLAN)  # in memory: fine inside a capture


def test_a_failed_build_is_tried_again_and_leaves_nothing(backend):
    backend.error = ValueError("bad tile")
    with pytest.raises(BackendBuildError, match="bad tile"):
        compiler.kernel_for(backend, PLAN)
    assert not cache_files()
    backend.error = None
    assert works(compiler.kernel_for(backend, PLAN).kernel)


def test_the_log_prints_each_compile_with_its_seconds(backend, capfd):
    with settings.override(log=frozenset({"compile"})):
        compiler.kernel_for(backend, PLAN)
        said = capfd.readouterr().err
        assert f"cute_flash compile: {PLAN}: compiled in 0." in said and "stored as " in said
        compiler.kernel_for(backend, PLAN)
        assert capfd.readouterr().err == ""


def test_the_folder_is_private(backend):
    _stored(backend)
    assert settings.current.cache_dir.stat().st_mode & 0o077 == 0


def test_listing_and_clearing(backend):
    path = _stored(backend)
    (settings.current.cache_dir / "zz.so").write_bytes(b"damaged")
    listed = {entry.path.name: entry.facts for entry in diskcache.entries(settings.current.cache_dir)}
    assert listed[path.name]["plan"] == str(PLAN) and listed["zz.so"] == {}
    assert diskcache.clear(settings.current.cache_dir) == 2
    assert diskcache.entries(settings.current.cache_dir) == []
