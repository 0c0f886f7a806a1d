"""WHICH: the units of a launch, a tile of keys of a head each, and where in memory what belongs to one lies."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.spec.plan import Plan
from cute_flash.spec.scratch import SHARED_TILES

from ...common.blocks import row_tiles
from ...common.delta import Scratch
from ...common.keyunits import Unit, in_sections, index_from, row_bytes, ticket_of, unit_count, unit_from, unit_of
from ...common.order import Sizes, head_by_head, longest_first
from ...common.ragged import Place, Rows, only_rows
from ..sequences import entry_at, place_at, tile_total
from ..tiles import heads_together
from .zeros import Zeroing


class KeyUnits:
    """Of one Plan. `origin`: what the kernel is given beside its operands."""

    def __init__(self, plan: Plan, in_turn: bool):
        self.tile, self.mask, self.in_turn = plan.tile, plan.mask, in_turn
        self.widths = plan.head_dim, plan.head_dim_v
        self.zeroes = not in_turn  # do CTAs store the zeros that sums of dQ start as? See zeros.py

    def count(self, origin: Zeroing, sizes: Sizes) -> Int32:
        return unit_count(sizes, self.tile)

    def at(self, index: Int32, origin: Zeroing, sizes: Sizes) -> Unit:
        """By a warp."""
        return unit_of(index, sizes, self.tile, self.widths, self.mask, self.in_turn, heads_together(self.in_turn))

    def ticket(self, index: Int32, unit: Unit) -> tuple:
        """What other warps are told."""
        return ticket_of(index, unit)

    def told(self, ticket: tuple, group: Int32, bounds: tuple) -> Unit:
        """`bounds`: (left, right) of a window."""
        return unit_from(ticket, group)

    def seqlens(self, unit: Unit, seqlens: tuple) -> tuple:
        """Of q and k; `seqlens`: the tensors'."""
        return seqlens

    def scratch(self, scratch: Scratch, unit: Unit) -> Scratch:
        return scratch

    def places(self, unit: Unit) -> tuple:
        """(of Q and dO, of K and V): see tile_copy."""
        return unit.batch, unit.batch

    def key_rows(self, tensor: cute.Tensor, unit: Unit) -> cute.Tensor:
        """(keys, head_dim) of dK or dV."""
        return tensor[unit.batch, None, unit.head_kv, None]


class SharedKeyUnits(KeyUnits):
    """Several units a key tile, one after the other. Each has half of the query tiles that see it, of its own head of
    the group or, where key tiles are many, of all: the first those far from the diagonal, and the fewer. The last waits
    for the others, see backward_shared.py."""

    def __init__(self, plan: Plan, in_turn: bool):
        super().__init__(plan, in_turn)
        self.zeroes = False

    def alone(self, sizes: Sizes):
        """Has every head of a group two shares of its own? As ScratchRule.elements has it."""
        key_tiles = (sizes.seqlen_k + self.tile.tile_n - 1) // self.tile.tile_n
        return Int64(key_tiles) * sizes.heads_q * sizes.batch <= SHARED_TILES

    def shares(self, sizes: Sizes) -> Int32:
        heads = Int32(cutlass.select_(self.alone(sizes), sizes.heads_q // sizes.heads_kv, 1))
        return 2 * heads

    def count(self, origin: Zeroing, sizes: Sizes) -> Int32:
        return self.shares(sizes) * super().count(origin, sizes)

    @cute.jit
    def at(self, index: Int32, origin: Zeroing, sizes: Sizes) -> Unit:
        shares = self.shares(sizes)
        unit = KeyUnits.at(self, index // shares, origin, sizes)
        tiles, share = unit.tiles, index % shares
        middle, far = tiles.last - tiles.count // 2, share % 2 == 0
        first = Int32(cutlass.select_(far, middle, tiles.first))
        last = Int32(cutlass.select_(far, tiles.last, middle))
        way = Int32(cutlass.select_(self.alone(sizes), -1, 1))  # the walk has one way: it tells the two kinds apart
        return self._share(unit._replace(tiles=tiles._replace(first=first, last=last), way=way), index)

    @cute.jit
    def told(self, ticket: tuple, group: Int32, bounds: tuple) -> Unit:
        return self._share(unit_from(ticket, group), index_from(ticket))

    @cute.jit
    def _share(self, unit: Unit, index: Int32) -> Unit:
        alone = unit.way < 0
        shares = 2 * Int32(cutlass.select_(alone, unit.group, 1))
        share, group = index % shares, Int32(cutlass.select_(alone, 1, unit.group))
        head = unit.head_first + Int32(cutlass.select_(alone, share // 2, 0))
        return unit._replace(head_first=head, group=group, share=share, shares=shares)


class PackedKeyUnits(KeyUnits):
    """Of packed sequences: key tiles as prepare_kernel of sequences.py counts them, most query rows first. `origin`
    has its table."""

    def __init__(self, plan: Plan, in_turn: bool):
        super().__init__(plan, in_turn)
        self.zeroes = False

    def count(self, origin: Zeroing, sizes: Sizes) -> Int32:
        return tile_total(origin.table, sizes.heads_kv)

    @cute.jit
    def at(self, index: Int32, origin: Zeroing, sizes: Sizes) -> Unit:
        tile, table = self.tile, origin.table
        entry = entry_at(table, index // sizes.heads_kv)
        keys, queries = place_at(table, entry)
        within, blocks = index - table.starts[entry] * sizes.heads_kv, (keys.count + tile.tile_n - 1) // tile.tile_n
        blocks = cutlass.max(blocks, 1)
        if cutlass.const_expr(in_sections(self.mask, self.in_turn)):
            head_bytes = row_bytes(queries.count, self.widths)
            work = longest_first(within, blocks, sizes.heads_kv, Int32(1), head_bytes, Int32(1))
            key_block = blocks - 1 - work.m_block
        else:
            work = head_by_head(within, blocks, sizes.heads_kv)
            key_block = work.m_block
        slot = queries.first // tile.tile_m + table.order[entry]
        place, bounds = Place(queries, keys), (sizes.left, sizes.right)
        return self._unit((key_block, work.head, place, slot), sizes.heads_q // sizes.heads_kv, bounds)

    def ticket(self, index: Int32, unit: Unit) -> tuple:
        q, k = unit.place
        return (Int32(1), unit.key_block, unit.head_kv, q.first, q.count, k.first, k.count, unit.slot)

    def told(self, ticket: tuple, group: Int32, bounds: tuple) -> Unit:
        key_block, head_kv, slot = ticket[1], ticket[2], ticket[7]
        place = Place(Rows(*ticket[3:5]), Rows(*ticket[5:7]))
        return self._unit((key_block, head_kv, place, slot), group, bounds)

    def _unit(self, found: tuple, group: Int32, bounds: tuple) -> Unit:
        """`found`: (key tile, head of K and V, Place, slot). In turn: as unit_of has it for the first keys first."""
        key_block, head_kv, place, slot = found
        seqlens = place.q.count, place.k.count
        tiles = row_tiles(key_block * self.tile.tile_n, self.tile, seqlens, bounds, self.mask)
        way = Int32(-1 if self.in_turn else 1)
        return Unit(key_block, head_kv, Int32(0), head_kv * group, group, tiles, way, place, slot)

    def seqlens(self, unit: Unit, seqlens: tuple) -> tuple:
        return unit.place.q.count, unit.place.k.count

    def scratch(self, scratch: Scratch, unit: Unit) -> Scratch:
        """With the sequence's slots first."""

        def moved(tensor: cute.Tensor) -> cute.Tensor:
            return cute.domain_offset((0, unit.slot, 0, 0), tensor)

        turns = None if scratch.turns is None else moved(scratch.turns)
        return scratch._replace(dq=moved(scratch.dq), rows=moved(scratch.rows), turns=turns)

    def places(self, unit: Unit) -> tuple:
        return tuple(unit.place)

    def key_rows(self, tensor: cute.Tensor, unit: Unit) -> cute.Tensor:
        return only_rows(tensor, 1, unit.place.k)[0, None, unit.head_kv, None]
