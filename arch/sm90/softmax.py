"""Online softmax on wgmma fragments, and the rescaling of O that it asks for."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common.numeric import bits, exp2, finite_or_zero, from_bits, mul_rn, pack_fragment, pack_pair
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
    chains = [[state.seen[r], *rows[r][: CHAINS - 1]] for r in range(2)]
    for c in range(CHAINS - 1, len(rows[0])):
        for r in range(2):
            chains[r][c % CHAINS] = cute.arch.fmax(chains[r][c % CHAINS], rows[r][c])
    return [quad_max(_tree(chains[r], cute.arch.fmax)) for r in range(2)]


def _tree(values: list, combine) -> Float32:
    while len(values) > 1:
        values = [combine(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def _three_way(rows: list, state: RowState) -> list:
    """Positive floats are in the order of their bits, and VIMNMX3 takes two of them at a time: the larger of 0 and the
    new maxima of both rows, as bits."""
    found = []
    for r in range(2):
        chains = [bits(cute.arch.fmax(state.seen[r], Float32(0.0))), bits(rows[r][0])]
        for c in range(1, len(rows[0]) - 1, 2):
            i = c // 2 % 2
            chains[i] = cutlass.max(cutlass.max(chains[i], bits(rows[r][c])), bits(rows[r][c + 1]))
        x = cutlass.max(cutlass.max(*chains), bits(rows[r][-1]))
        x = cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=1))
        found.append(cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=2)))
    return found


@cute.jit
def _fast_maxima(view: cute.Tensor, state: RowState, maxima: cute.Tensor):
    rows = [[view[r, c] for c in range(cute.size(view, mode=[1]))] for r in range(2)]
    found = _three_way(rows, state)
    below = [(found[r] == 0) & (state.seen[r] < 0.0) for r in range(2)]
    for r in cutlass.range_constexpr(2):
        maxima[r] = from_bits(found[r])
    if cute.arch.vote_any_sync(below[0] | below[1]):
        again = _row_maxima([[view[r, c] for c in range(cute.size(view, mode=[1]))] for r in range(2)], state)
        maxima[0], maxima[1] = again[0], again[1]


@cute.jit
def softmax_step(
    scores: cute.Tensor,
    state: RowState,
    scale_log2: Float32,
    masked: cutlass.Constexpr[bool],
    ahead: cutlass.Constexpr[int] = 1,
    max3: cutlass.Constexpr[bool] = False,
):
    """Scores become exp2(scale * (score - maximum)); the state takes the new maximum, sum and rescale factor.

    After an unmasked tile every row has seen a key, so only masked tiles pay for the -inf guard.
    -> sums of probabilities that are there when the first `ahead` of both rows are: never below 0, NaN perhaps.
    """
    witnesses = []
    view = rows_view(scores)  # (2, tile_n / 4)
    rows = [[view[r, c] for c in range(cute.size(view, mode=[1]))] for r in range(2)]  # read once: compile time
    if cutlass.const_expr(max3):
        maxima = cute.make_rmem_tensor((2,), Float32)
        _fast_maxima(view, state, maxima)
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
            if cutlass.const_expr(c + 1 == ahead):
                witnesses.append(partial[c % 2])
        state.maximum[r] = maxima[r]
        state.seen[r] = maxima[r]
        state.rescale[r] = rescale
        state.total[r] = state.total[r] * rescale + (partial[0] + partial[1])
    return witnesses


def _weights(view: cute.Tensor, packed: cute.Tensor, r: int, factors: tuple, dtype: type) -> tuple[list, list]:
    """Probabilities of a row, packed. -> (their sums, the maxima of the scores), in chains."""
    scale_log2, subtrahend = factors
    partial, chains = [], []
    for c in range(0, cute.size(view, mode=[1]), 2):
        scores = [view[r, c + i] for i in range(2)]
        pair = [exp2(score * scale_log2 - subtrahend) for score in scores]
        packed[r + c] = pack_pair(*pair, dtype)
        partial = [p + q for p, q in zip(partial, pair, strict=True)] if c > 0 else pair
        if c < CHAINS:
            chains += scores
        else:
            for i in range(2):
                chain = (c + i) % CHAINS
                chains[chain] = cute.arch.fmax(chains[chain], scores[i])
    return partial, chains


LAG = 8.0  # of the maximum, in powers of two, at most: a probability is at most 2^8, in float16 too


@cute.jit
def lagging_step(
    scores: cute.Tensor, packed: cute.Tensor, state: RowState, scale_log2: Float32, dtype: cutlass.Constexpr
):
    """Probabilities against the maximum of the tiles before, so that none waits for this tile's; packed, and the scores
    stay. Where that maximum is too far below, the tile is done again as softmax_step does it."""
    view = rows_view(scores)  # (2, tile_n / 4)
    columns = cute.size(view, mode=[1])
    found, totals, rescales, far = [], [], [], []
    for r in cutlass.range_constexpr(2):
        subtrahend = mul_rn(state.seen[r], scale_log2)
        rescales.append(exp2(mul_rn(state.maximum[r], scale_log2) - subtrahend))
        partial, chains = _weights(view, packed, r, (scale_log2, subtrahend), dtype)
        found.append(_tree(chains, cute.arch.fmax))
        totals.append(state.total[r] * rescales[r] + (partial[0] + partial[1]))
        far.append(found[r] * scale_log2 - subtrahend <= LAG)
    if cute.arch.vote_all_sync(far[0] & far[1]):
        for r in cutlass.range_constexpr(2):
            state.maximum[r] = state.seen[r]
            state.seen[r] = cute.arch.fmax(state.seen[r], quad_max(found[r]))
            state.total[r], state.rescale[r] = totals[r], rescales[r]
    else:
        softmax_step(scores, state, scale_log2, False)
        pack_fragment(scores, packed, dtype)


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
