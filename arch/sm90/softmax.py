"""Online softmax on wgmma fragments, and the rescaling of O that it asks for."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common.numeric import bits, exp2, finite_or_zero, from_bits, mul_rn
from ..common.rowstate import RowState, inverse_total
from .mma import rows_view

CHAINS = 4  # partial maxima of a row


def quad_max(x: Float32) -> Float32:
    """Over the four lanes that share a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


def _row_maxima(rows: list[list[Float32]], state: RowState) -> list[Float32]:
    """New maxima of both rows. Several chains a row: a maximum waits for the one before it, and while it waits ptxas
    would move the softmax below the wait for P V, where nothing runs beside it."""
    chains = [[state.maximum[r], *rows[r][: CHAINS - 1]] for r in range(2)]
    for c in range(CHAINS - 1, len(rows[0])):
        for r in range(2):
            chains[r][c % CHAINS] = cute.arch.fmax(chains[r][c % CHAINS], rows[r][c])
    return [quad_max(_tree(chains[r], cute.arch.fmax)) for r in range(2)]


def _tree(values: list, combine) -> Float32:
    while len(values) > 1:
        values = [combine(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def _positive_maxima(rows: list[list[Float32]], state: RowState) -> list[Float32]:
    """The larger of 0 and the new maxima of both rows. Floats that are not negative are in the order of their bits, and
    the larger of three integers is one instruction (VIMNMX3)."""
    found = []
    for r in range(2):
        chains = [bits(cute.arch.fmax(state.maximum[r], Float32(0.0))), bits(rows[r][0])]
        for c in range(1, len(rows[0]) - 1, 2):
            larger = cutlass.max(chains[c // 2 % 2], bits(rows[r][c]))
            chains[c // 2 % 2] = cutlass.max(larger, bits(rows[r][c + 1]))
        largest = cutlass.max(cutlass.max(*chains), bits(rows[r][-1]))
        for offset in (1, 2):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
        found.append(from_bits(largest))
    return found


@cute.jit
def _maxima_by_bits(scores: cute.Tensor, state: RowState, maxima: cute.Tensor):
    """`maxima` (2,) takes what _row_maxima gives: where a warp has a row with nothing above 0, by asking it."""
    view = rows_view(scores)  # (2, tile_n / 4)
    rows = [[view[r, c] for c in range(cute.size(view, mode=[1]))] for r in range(2)]
    maxima[0], maxima[1] = _positive_maxima(rows, state)
    doubtful = [(maxima[r] == 0.0) & (state.maximum[r] < 0.0) for r in range(2)]
    if cute.arch.vote_any_sync(doubtful[0] | doubtful[1]):
        maxima[0], maxima[1] = _row_maxima(rows, state)


@cute.jit
def softmax_step(
    scores: cute.Tensor,
    state: RowState,
    scale_log2: Float32,
    masked: cutlass.Constexpr[bool],
    tile: cutlass.Constexpr,
):
    """Scores become exp2(scale * (score - maximum)); the state takes the new maximum, sum and rescale factor.

    After an unmasked tile every row has seen a key, so only masked tiles pay for the -inf guard.
    -> sums of probabilities that are there when the first `tile.ahead` of both rows are: never below 0, NaN perhaps.
    """
    witnesses = []
    view = rows_view(scores)  # (2, tile_n / 4)
    rows = [[view[r, c] for c in range(cute.size(view, mode=[1]))] for r in range(2)]  # read once: compile time
    if cutlass.const_expr(tile.triples):
        maxima = cute.make_rmem_tensor((2,), Float32)
        _maxima_by_bits(scores, state, maxima)
    else:
        maxima = _row_maxima(rows, state)
    for r in cutlass.range_constexpr(2):
        subtrahend = mul_rn(maxima[r], scale_log2)
        if cutlass.const_expr(masked):
            subtrahend = finite_or_zero(subtrahend)
        rescale = exp2(mul_rn(state.maximum[r], scale_log2) - subtrahend)
        partial = [None, None]  # two chains: an add waits for the one before it
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            probability = exp2(rows[r][c] * scale_log2 - subtrahend)
            view[r, c] = probability
            partial[c % 2] = probability if c < 2 else partial[c % 2] + probability
            if cutlass.const_expr(c + 1 == max(1, tile.ahead)):
                witnesses.append(partial[c % 2])
        state.maximum[r] = maxima[r]
        state.rescale[r] = rescale
        state.total[r] = state.total[r] * rescale + (partial[0] + partial[1])
    return witnesses


def scale_rows(o: cute.Tensor, factors: tuple[Float32, Float32]):
    """Whole vectors, not elements: a third of what the compiler has to chew at head_dim 256 is this."""
    view = rows_view(o)  # (2, width_v / 4)
    for r in range(2):
        view[r, None].store(view[r, None].load() * factors[r])


@cute.jit
def cap_scores(scores: cute.Tensor, factor: Float32):
    """Raw scores s become tanh(x) = 1 - 2 / (1 + exp(2 x)) = 1 - 1 / (1/2 + exp2(factor s - 1)); the scale that goes to
    softmax_step is then softcap * log2(e).

    Not tanh.approx.f32, one MUFU where this takes two: relative error 2^-11 (PTX ISA), so at softcap 50 a score may be
    0.024 off and its probability 2.4%, six times what rounding it to bfloat16 does. This is 1.9e-7 off at most: 1e-5.
    """
    flat = cute.make_tensor(scores.iterator, cute.make_layout(cute.size(scores)))
    for i in cutlass.range_constexpr(cute.size(flat)):
        flat[i] = 1.0 - cute.arch.rcp_approx(0.5 + exp2(flat[i] * factor - 1.0))


@cute.jit
def rescale_output(o: cute.Tensor, state: RowState):
    scale_rows(o, (state.rescale[0], state.rescale[1]))


@cute.jit
def rescale_if_any(o: cute.Tensor, state: RowState):
    """The same, skipped by a warp none of whose rows has a new maximum. Bits do not change."""
    if cute.arch.vote_any_sync((state.rescale[0] != 1.0) | (state.rescale[1] != 1.0)):
        scale_rows(o, (state.rescale[0], state.rescale[1]))


@cute.jit
def finish(o: cute.Tensor, state: RowState):
    """Sum over the quad, then the one division of the row."""
    for r in cutlass.range_constexpr(2):
        state.total[r] = quad_sum(state.total[r])
    scale_rows(o, (inverse_total(state.total[0]), inverse_total(state.total[1])))
