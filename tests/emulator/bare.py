"""Runs a few lines of PTX on one warp or more, without CuTe-DSL: for tests of single instructions."""

from __future__ import annotations

import numpy as np

from cute_flash.emulator.machine import Launch, Options
from cute_flash.emulator.program import Program
from cute_flash.emulator.ptx import parse

_REGISTERS = """
    .reg .pred %p<64>; .reg .b16 %h<64>; .reg .b32 %r<256>; .reg .b64 %d<128>; .reg .b128 %q<8>;
"""


def kernel(body: str, pointers: int, block: int) -> str:
    """A kernel whose parameters are `pointers` addresses, loaded into %d0 and on; %r0 is the thread index."""
    params = ", ".join(f".param .u64 p{n}" for n in range(pointers))
    loads = "\n".join(f"    ld.param.u64 %d{n}, [p{n}];" for n in range(pointers))
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic_smem[];
.visible .entry test({params})
.reqntid {block}, 1, 1
{{{_REGISTERS}{loads}
    mov.u32 %r0, %tid.x;
{body}
    ret;
}}
"""


def run(
    body: str,
    *arrays: np.ndarray,
    block: int = 32,
    grid: int | tuple = 1,
    cluster: int = 1,
    shared: int = 4096,
    **knobs,
):
    """Launch with the addresses of the arrays as arguments; they are changed in place. `grid`: (x, y, z), or x alone.
    -> the launch."""
    grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
    program = Program(parse(kernel(body, len(arrays), block))["test"])
    params = np.array([a.ctypes.data for a in arrays], np.uint64).view(np.uint8)
    launch = Launch(program, grid, (block, 1, 1), (cluster, 1, 1), shared, params, Options(**knobs))
    launch.run()
    return launch


def per_lane(body: str, *inputs: np.ndarray, dtype=np.uint32) -> np.ndarray:
    """One value per lane: inputs in %r1, %r2 ... (32 bits) or %d11, %d12 ... (64 bits), the result in %r9 or %d19."""
    out = np.zeros(32, dtype)
    loads = []
    for n, values in enumerate(inputs, 1):
        size = values.itemsize * 8
        bank = "%r" if size == 32 else "%d1"
        loads.append(
            f"mul.wide.u32 %d9, %r0, {values.itemsize}; add.s64 %d9, %d9, %d{n}; ld.global.b{size} {bank}{n}, [%d9];"
        )
    size = np.dtype(dtype).itemsize
    result = "%r9" if size == 4 else "%d19"
    tail = f"mul.wide.u32 %d9, %r0, {size}; add.s64 %d9, %d9, %d0; st.global.b{size * 8} [%d9], {result};"
    run("\n".join([*loads, body, tail]), out, *inputs)
    return out
