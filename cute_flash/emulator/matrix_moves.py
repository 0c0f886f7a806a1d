"""ldmatrix, stmatrix and movmatrix: 8x8 tiles between shared memory and fragments."""

from __future__ import annotations

import numpy as np

from . import access
from .effects import effect
from .errors import UnknownInstruction
from .memory import check_alignment
from .memory_ops import read, write
from .ptx import Instr, Kernel, Vec


def _items(arg) -> tuple:
    return arg.items if isinstance(arg, Vec) else (arg,)


@effect("ldmatrix")
def ldmatrix(i: Instr, kernel: Kernel):
    if not ("m8n8" in i.parts and i.parts[-1] == "b16"):
        return _ldmatrix_8bit(i)
    count, transposed = int(next(p for p in i.parts if p in ("x1", "x2", "x4"))[1:]), "trans" in i.parts
    puts = [access.setter(t, "b32") for t in _items(i.args[0])]
    address, after = access.address(i.args[1]), i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        rows = address(w)[: 8 * count]
        check_alignment(rows, 16)
        tiles = read(w, "shared", rows, 2, 8).astype("<u2").reshape(count, 8, 8)
        for tile, put in zip(tiles, puts, strict=False):
            fragment = np.ascontiguousarray(tile.T if transposed else tile)
            put(w, fragment.view(np.uint32).ravel(), mask)
        return after

    return step


def _ldmatrix_8bit(i: Instr):
    """m16n16.trans.b8: a 16x16 byte tile, transposed, two registers per matrix."""
    if "m16n16" not in i.parts or i.parts[-1] != "b8":
        raise UnknownInstruction(i.op)
    count = int(next(p for p in i.parts if p in ("x1", "x2"))[1:])
    puts = [access.setter(t, "b32") for t in _items(i.args[0])]
    address, after = access.address(i.args[1]), i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        rows = address(w)[: 16 * count]
        check_alignment(rows, 16)
        tiles = read(w, "shared", rows, 1, 16).reshape(count, 16, 16)
        for n, tile in enumerate(tiles):
            turned = np.ascontiguousarray(tile.T)
            for half in range(2):
                part = np.ascontiguousarray(turned[8 * half : 8 * half + 8])
                words = part.view(np.uint32).reshape(8, 4)
                puts[2 * n + half](w, words.ravel(), mask)
        return after

    return step


@effect("stmatrix")
def stmatrix(i: Instr, kernel: Kernel):
    count, transposed = int(next(p for p in i.parts if p in ("x1", "x2", "x4"))[1:]), "trans" in i.parts
    if i.parts[-1] != "b16":
        raise UnknownInstruction(i.op)
    gets = [access.row(s, "b32") for s in _items(i.args[1])]
    address, after = access.address(i.args[0]), i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        where = address(w)[: 8 * count]
        check_alignment(where, 16)
        tiles = [np.ascontiguousarray(get(w)).view(np.uint16).reshape(8, 8) for get in gets]
        values = np.concatenate([t.T if transposed else t for t in tiles])
        write(w, "shared", where, 2, np.ascontiguousarray(values))
        return after

    return step


@effect("movmatrix", visible=False)
def movmatrix(i: Instr, kernel: Kernel):
    put, get, after = access.setter(i.args[0], "b32"), access.row(i.args[1], "b32"), i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        tile = np.ascontiguousarray(get(w)).view(np.uint16).reshape(8, 8)
        put(w, np.ascontiguousarray(tile.T).view(np.uint32).ravel(), mask)
        return after

    return step
