"""CTAs that add to the same sums in turn, so that the result does not depend on who comes first: a counter in global
memory says how many have."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait_for(turns: cute.Tensor, part: Int32, turn: Int32):
    """By one warp, until `part` was added to `turn` times. Who comes first must have taken its unit before: it waits
    for nobody who has not started. More often is no reason to wait for ever: packed sequences of lengths out of order
    share sums."""
    seen = Int32(-1)
    while seen < turn:
        seen = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[(turns.iterator + part).toint()],
        )
    cute.arch.inline_ptx("fence.proxy.async.global;")


@cute.jit
def pass_on(turns: cute.Tensor, part: Int32):
    """By the warp that issued the bulk additions: they are complete, not only read from shared memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.inline_ptx("fence.proxy.async.global;")
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[(turns.iterator + part).toint()]
        )
