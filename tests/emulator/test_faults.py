"""Each planted fault is caught; the same kernels without it run right."""

import functools
import re

import pytest
import torch

from cute_flash.emulator import BadAccess, Deadlock, IllegalInstruction, Race, emulate

from .foreign import fa4_forward
from .test_foreign_attention import check_forward


@functools.lru_cache(None)
def tile(arch: str, options: str = ""):
    with emulate(arch):
        from .tiles import compile_tile

        return compile_tile(arch, options)


def run_tile(arch: str, edit=None, rows=(256, 384), options="", **knobs):
    """S and its float64 reference; the output has room for whole tiles and starts as NaN."""
    q, k = (torch.randn(n, 64).bfloat16() for n in rows)
    s = torch.full(tuple(-(-n // 128) * 128 for n in rows), float("nan"))
    compiled = tile(arch, options)
    with emulate(arch, edit=edit, **knobs):
        compiled(q, k, s)
    return s, q.double() @ k.double().T


def cut(pattern: str, replacement: str = "", count: int = 1):
    """An edit that must change the text it is given."""

    def edit(ptx: str) -> str:
        changed, times = re.subn(pattern, replacement, ptx, count=count)
        assert times == (count or times) and changed != ptx, f"{pattern} not found"
        return changed

    return edit


def waits(ptx: str) -> list[str]:
    return re.findall(r"mbarrier\.try_wait[^;]*;", ptx)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("mode", ["eager", "late", "random"])
def test_no_fault(arch, mode):
    s, expected = run_tile(arch, mode=mode, seed=3)
    assert (s - expected).abs().max() < 1e-4


def without_wait(index: int):
    """The index-th mbarrier wait always succeeds."""

    def edit(ptx: str) -> str:
        text = waits(ptx)[index]
        predicate = text.split()[1].rstrip(",")
        at = -1
        for _ in range(index + 1):
            at = ptx.index("mbarrier.try_wait", at + 1)
        return ptx[:at] + f"mov.pred {predicate}, 1;" + ptx[at + len(text) :]

    return edit


def test_removed_full_barrier_wait():
    with pytest.raises(Race, match=r"shared memory.*\n.*asynchronous write") as caught:
        run_tile("sm_90a", without_wait(3))  # the consumer's wait for K
    assert "wgmma" in str(caught.value) and "cp.async.bulk.tensor" in str(caught.value)


def test_removed_empty_barrier_arrive():
    with pytest.raises(Deadlock, match="waits for parity") as caught:
        run_tile("sm_90a", cut(r"mbarrier\.arrive\.shared\.b64 [^;]*;"))
    assert "PTX line" in str(caught.value) and "phase 0, 8 of 8 arrivals" in str(caught.value)


def test_missing_proxy_fence():
    with emulate("sm_90a"):
        compiled = fa4_forward("sm_90a", 128, True)
    with emulate("sm_90a", edit=cut(r"fence\.proxy\.async[^;]*;")), pytest.raises(Race, match="missing proxy fence"):
        check_forward(compiled, 1, 128, 1, 128, True)


@pytest.mark.parametrize("nbytes, said", [(8192, "8192 more bytes arrived than expected"), (16400, "16 bytes missing")])
def test_wrong_expect_tx(nbytes, said):
    with pytest.raises(Deadlock, match=said):
        run_tile("sm_90a", cut(r"(mov\.b32 \s*%r\d+, )16384", rf"\g<1>{nbytes}"))


def test_wgmma_result_read_before_its_wait():
    with pytest.raises(Race, match="belongs to a wgmma"):
        run_tile("sm_90a", cut(r"wgmma\.wait_group\.sync\.aligned[^;]*;"))


def test_tmem_read_before_the_commit():
    """The drain warps skip the wait for their accumulator."""

    def edit(ptx: str) -> str:
        load = ptx.index("tcgen05.ld")
        return without_wait(len(waits(ptx[:load])) - 1)(ptx)

    with pytest.raises(Race, match="TMEM"):
        run_tile("sm_100a", edit)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_swizzle_mismatch(arch):
    """Descriptors say 64-byte swizzle where TMA wrote 128-byte swizzle: only the result can tell."""

    def hopper(ptx: str) -> str:
        swap = lambda m: str(int(m[0]) & ~(3 << 62) | 2 << 62)  # noqa: E731
        return re.sub(r"\b4611686\d{12}\b", lambda m: str(_signed(int(swap(m)))), ptx)

    def blackwell(ptx: str) -> str:
        return re.sub(r"\b4611[67]\d{14}\b", lambda m: str(_signed(int(m[0]) & ~(7 << 61) | 4 << 61)), ptx)

    changed = []

    def edit(ptx: str) -> str:
        text = (hopper if arch == "sm_90a" else blackwell)(ptx)
        changed.append(text != ptx)
        return text

    s, expected = run_tile(arch, edit)
    assert changed[-1]
    assert not (s - expected).abs().max() < 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_out_of_range_coordinates_fill_with_zero(arch):
    """Not a fault: rows past the end of Q and K read as zero and still count as bytes."""
    s, expected = run_tile(arch, rows=(200, 300))
    assert (s[:200, :300] - expected).abs().max() < 1e-4
    assert (s[200:] == 0).all() and (s[:, 300:] == 0).all()


def test_named_barrier_with_the_wrong_count():
    with pytest.raises((Deadlock, IllegalInstruction), match="barrier 1"):
        run_tile("sm_100a", cut(r"(bar(?:rier)?\.(?:cta\.)?sync\s+1, )160", r"\g<1>192"))


def test_more_registers_than_the_cta_has():
    """384 threads start with 168 each; 24 + 2 * 248 is more than three times that. A GPU waits for ever."""
    with pytest.raises(Deadlock, match=r"waits for 2560 registers, \d+ are free \(the CTA started with 168 a thread\)"):
        run_tile("sm_90a", lambda ptx: re.sub(r"(setmaxnreg\.inc\S*\s+)240;", r"\g<1>248;", ptx))


def test_use_of_tmem_after_dealloc():
    def edit(ptx: str) -> str:
        load = re.search(r"tcgen05\.ld[^;]*;", ptx)[0]
        return re.sub(r"(tcgen05\.dealloc[^;]*;)", lambda m: m[0] + load, ptx)

    with pytest.raises(IllegalInstruction, match="not allocated"):
        run_tile("sm_100a", edit)


def test_dealloc_without_its_barrier():
    """One drain warp frees the columns while others may still read them."""

    def edit(ptx: str) -> str:
        return cut(r"(?:bar|barrier)\.(?:cta\.)?sync\s+2, 128;")(ptx)

    with pytest.raises((Race, IllegalInstruction)):
        run_tile("sm_100a", edit)


def test_python_line_is_named():
    with pytest.raises(Race) as caught:
        run_tile("sm_90a", cut(r"wgmma\.wait_group\.sync\.aligned[^;]*;"), options="--generate-line-info")
    assert "tiles.py:" in str(caught.value)


def test_unknown_instruction():
    from cute_flash.emulator import UnknownInstruction

    with pytest.raises(UnknownInstruction, match="PTX line"):
        run_tile("sm_90a", cut(r"setmaxnreg\.dec\.sync\.aligned\.u32", "frobnicate.u32"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_write_past_the_end_of_a_tensor(arch):
    """The tiles store whole 128 x 128 blocks; an output one row short is overrun."""
    q, k = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    s = torch.zeros(127, 128)
    compiled = tile(arch)
    with emulate(arch), pytest.raises(BadAccess, match=r"write to global .* outside every tensor"):
        compiled(q, k, s)
