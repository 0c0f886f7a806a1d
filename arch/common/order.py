"""In which order CTAs take tiles: linear CTA index -> (query tile, head, batch)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

L2_SECTION_BYTES = 32 * 1024 * 1024  # K and V of the heads worked on together should stay in L2 (50-60 MB on Hopper)


class Sizes(NamedTuple):
    """Of a call: what no kernel is compiled for."""

    batch: Int32
    heads_q: Int32
    heads_kv: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32 | None = None  # of a window
    right: Int32 | None = None


class WorkTile(NamedTuple):
    m_block: Int32
    head: Int32  # of q
    batch: Int32


def tile_count(seqlen_q: Int32, tile_m: int, heads_q: Int32, batch: Int32) -> Int32:
    return cute.ceil_div(seqlen_q, tile_m) * heads_q * batch


class Rounds(NamedTuple):
    """Which units a persistent CTA takes, in turn: there and back over the CTAs (0..n-1, n-1..0, ...), so that where
    units get smaller the first CTA does not get the largest of every round."""

    block: Int32
    ctas: Int32
    count: Int32

    def unit(self, step: Int32) -> Int32:
        return step * self.ctas + _place(step, self.block, self.ctas)


@cute.jit
def _place(step: Int32, block: Int32, ctas: Int32) -> Int32:
    return block if step % 2 == 0 else ctas - 1 - block


def rounds_of(units: Int32, together: int = 1) -> Rounds:
    """For the CTA that asks. together: neighbouring CTAs that take the same units."""
    block, ctas = cute.arch.block_idx()[0] // together, cute.arch.grid_dim()[0] // together
    whole = units // ctas
    in_last = Int32(_place(whole, block, ctas) < units - whole * ctas)
    return Rounds(block, ctas, whole + in_last)


def head_by_head(index: Int32, m_blocks: Int32, heads_q: Int32) -> WorkTile:
    """Full mask: every tile costs the same; the tiles of one head run together and share its K and V."""
    row = index // m_blocks
    return WorkTile(index % m_blocks, row % heads_q, row // heads_q)


def _sections(units: Int32, kv_bytes: Int32) -> Int32:
    most = cutlass.max(1, L2_SECTION_BYTES // cutlass.max(1, kv_bytes))
    return (units + most - 1) // most


def section_width(units: Int32, kv_bytes: Int32) -> Int32:
    """Of the widest section of longest_first, in units."""
    sections = _sections(units, kv_bytes)
    return (units + sections - 1) // sections


def last_section(units: Int32, kv_bytes: Int32) -> Int32:
    """The first unit of the last section of longest_first, which is none of the wider ones."""
    return units - units // _sections(units, kv_bytes)


@cute.jit
def longest_first(
    index: Int32, m_blocks: Int32, heads_q: Int32, batch: Int32, kv_bytes: Int32, group: Int32
) -> WorkTile:
    """Causal: the last query tiles see the most keys and start first, within a section of heads that fits in L2.

    kv_bytes: K and V of one head. `group` query heads read the same K and V, so they count once.
    """
    units = heads_q * batch // group
    sections = _sections(units, kv_bytes)
    # Widths differ by one unit at most: a narrow last section would leave most SMs waiting for its longest tile.
    width, wide_sections = units // sections, units % sections
    wide_tiles = wide_sections * (width + 1) * group * m_blocks
    first_row, within = Int32(0), index
    if index < wide_tiles:
        width += 1
    else:
        first_row = wide_sections * (width + 1) * group
        within = index - wide_tiles
    width *= group
    section = within // (width * m_blocks)
    within -= section * width * m_blocks
    row = first_row + section * width + within % width
    return WorkTile(m_blocks - 1 - within // width, row % heads_q, row // heads_q)
