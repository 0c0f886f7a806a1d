"""Small inputs that broke attention kernels elsewhere, each with its right answer; the numbers name the case.

Every function takes a Runner and asserts. Features that do not exist yet must be refused by name: when one is built,
its function here becomes a test of the right value.
"""

import math
from collections.abc import Callable

import pytest
import torch

import cute_flash
from tests import oracle
from tests.packed_cases import check_packed, offsets, packed, served
from tests.runner import Runner

Case = Callable[[Runner], None]
CASES: dict[int, Case] = {}


def case(number: int) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[number] = function
        return function

    return register


def refused(run: Runner, name: str, value, error=NotImplementedError) -> None:
    """An option that is not built is refused by a sentence that names it, empty inputs included."""
    for seqlen_k in (4, 0):
        q, k, v = run.randn(1, 4, 2, 16), run.randn(1, seqlen_k, 2, 16), run.randn(1, seqlen_k, 2, 16)
        with pytest.raises(error, match=name):
            run(q, k, v, **{name: value})


# ------------------------------------------------------------------------------- softmax numerics and masked rows


@case(1)
def fully_masked_first_tile_and_very_negative_scores(run: Runner) -> None:
    q, k, v = run.full((1, 160, 1, 64), 5.0), run.full((1, 256, 1, 64), -5.0), run.randn(1, 256, 1, 64)
    out, lse = run(q, k, v, causal=True, return_lse=True)
    counts = torch.arange(97, 257, dtype=torch.float64, device=run.device)
    run.lse_close(lse[0, 0], -200 + counts.log())
    assert lse[0, 0, 0].item() == pytest.approx(-195.4253, abs=2e-3)
    means = v.double().cumsum(1)[0, 96:, 0] / counts[:, None]
    assert oracle.relative_error(out[0, :, 0], means) <= run.allowed(HALF_ULP_OF_MEANS)


HALF_ULP_OF_MEANS = 2.0**-8  # P is exactly 1 here, so only the last rounding is left; allowed() takes 1.05 of it


@case(4)
def rows_without_keys_have_no_nan(run: Runner) -> None:
    if served(run):
        check_packed(run, (76, 34, 146), (1, 1, 1), head_dim=32, causal=True)
    for seqlen_q in (76, 34, 146):  # the sequences of the packed case, one by one: one key each
        q, k, v = (3 * run.randn(1, n, 1, 32, seed=s) for s, n in enumerate((seqlen_q, 1, 1)))
        dout = run.randn(1, seqlen_q, 1, 32, seed=9)
        (out, lse), (dq, dk, dv) = run.gradients(q, k, v, dout, causal=True)
        assert torch.all(out[:, :-1] == 0)
        assert torch.all(lse[..., :-1] == -math.inf)
        assert torch.equal(out[:, -1], v[:, 0])
        run.close(dv[:, 0], dout[:, -1].double())
        # dP - delta cancels to float32 rounding: sqrt(32) products of about 9 give 1e-5, times k (3) and scale (0.18).
        assert torch.all(dq[:, :-1] == 0)
        assert dq.abs().max() <= 1e-4
        assert dk.abs().max() <= 1e-4


@case(5)
def window_leaves_some_rows_empty(run: Runner) -> None:
    q, k, v = run.randn(1, 129, 2, 64), run.randn(1, 64, 2, 64, seed=1), run.randn(1, 64, 2, 64, seed=2)
    dout = run.randn(1, 129, 2, 64, seed=3)
    (out, lse), grads = run.gradients(q, k, v, dout, window=(32, 64))
    assert torch.all(out[:, 0] == 0)
    assert torch.all(grads[0][:, 0] == 0)
    assert torch.equal(lse == -math.inf, torch.arange(129, device=run.device).expand_as(lse) == 0)
    run.check_gradients(q, k, v, dout, window=(32, 64))


@case(6)
def negative_window_bounds(run: Runner) -> None:
    for window in ((-1, 0), (-1, -1), (-1, 5)):
        refused(run, "window", window, ValueError)
    q = run.randn(1, 40, 1, 16)
    with pytest.raises(ValueError, match="None"):
        run(q, q, q, window=(-1, 0), causal=True)
    assert torch.equal(run(q, q, q, window=(None, 0)), run(q, q, q, causal=True))
    assert torch.equal(run(q, q, q, window=(None, None)), run(q, q, q))
    run.check(q, q, q, window=(None, 5))


@case(7)
def window_bounds_are_inclusive(run: Runner) -> None:
    q, v = run.full((1, 6, 1, 8), 0.0), run.one_hot_values(6)
    for options in ({"window": (2, 0), "causal": True}, {"window": (2, 0)}, {"window": (2, 4), "causal": True}):
        out = run(q, q, v, **options)[0, :, 0, :6]
        run.close(out[5], [0.0, 0.0, 0.0, 1 / 3, 1 / 3, 1 / 3])
        run.close(out[1], [0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    run.close(run(q, q, v, window=(1, 2))[0, 2, 0, :6], [0.0, 0.25, 0.25, 0.25, 0.25, 0.0])
    q, k, v = (run.randn(1, 70, 2, 64, seed=s) for s in range(3))
    wide, causal = run(q, k, v, causal=True, window=(69, 0)), run(q, k, v, causal=True)
    assert oracle.relative_error(wide, causal.double()) <= run.allowed(0.0)


@case(8)
def causal_is_bottom_right(run: Runner) -> None:
    q, k, v = run.full((1, 2, 1, 8), 0.0), run.full((1, 5, 1, 8), 0.0), run.one_hot_values(5)
    out = run(q, k, v, causal=True)[0, :, 0, :5]
    run.close(out, [[0.25, 0.25, 0.25, 0.25, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]])


@case(9)
def nan_beyond_the_used_keys(run: Runner) -> None:
    """K and V are slices of caches whose tails, and the next batch element's rows, are NaN."""
    if served(run):
        q, k, v = run.randn(2, 8, 64), run.randn(80, 8, 64), run.randn(80, 8, 64, seed=1)
        clean = cute_flash.attention_varlen(
            q[:1],
            k[:40],
            v[:40],
            cu_seqlens_q=offsets(run, (1,)),
            cu_seqlens_k=offsets(run, (40,)),
            backend=run.backend,
        )
        for poisoned in (k, v):
            poisoned[40:] = math.nan
            (out, _), _ = packed(run, q, k, v, (1, 1), (40, 40))
            assert torch.equal(out[:1], clean)
            assert torch.all(out[1].isnan())
    caches = [run.randn(3, 200, 8, 64, seed=s) for s in (1, 2)]
    for cache in caches:
        cache[:, 40:] = math.nan
        cache[2] = math.nan
    k, v = (cache[:2, :40] for cache in caches)
    for options in ({}, {"causal": True}, {"window": (5, 2)}, {"softcap": 10.0}):
        run.check_gradients(run.randn(2, 33, 8, 64), k, v, **options)


@case(10)
def zero_and_negative_scale(run: Runner) -> None:
    q, k, v = (run.randn(1, 4, 1, 64, seed=s) for s in range(3))
    out, lse = run(q, k, v, causal=True, scale=0.0, return_lse=True)
    counts = torch.arange(1, 5, dtype=torch.float64, device=run.device)
    run.close(out[0, :, 0], v.double().cumsum(1)[0, :, 0] / counts[:, None])
    run.lse_close(lse[0, 0], [0.0, 0.6931472, 1.0986123, 1.3862944])
    out, lse = run(q, k, v, causal=True, scale=-0.125, return_lse=True)
    turned, turned_lse = run(q, -k, v, causal=True, scale=0.125, return_lse=True)
    assert torch.equal(out, turned)
    assert torch.equal(lse, turned_lse)
    run.check_gradients(q, k, v, causal=True, scale=-0.125)
    _, (dq, dk, _) = run.gradients(q, k, v, out, scale=0.0)
    assert torch.all(dq == 0)
    assert torch.all(dk == 0)


@case(11)
def softcap_value_and_gradient(run: Runner) -> None:
    q = run.full((1, 1, 1, 64), 4.0)
    k = run.full((1, 2, 1, 64), 4.0)
    k[:, 1] = -4.0
    out, lse = run(q, k, run.one_hot_values(2), softcap=15.0, return_lse=True)  # scores +-128
    run.lse_close(lse, 14.9999988)
    assert out[0, 0, 0, 0] == 1
    assert out[0, 0, 0, 1].item() == pytest.approx(
        9.36e-14, rel=2 * HALF_ULP_OF_MEANS, abs=2.0**-25
    )  # float16 has less
    q, k, v = run.randn(1, 70, 4, 64) * 15, run.randn(1, 90, 2, 64, seed=1), run.randn(1, 90, 2, 64, seed=2)
    for options in ({}, {"causal": True}, {"window": (20, 7)}):
        run.check_gradients(q, k, v, softcap=15.0, **options)


@case(12)
def constants_do_not_leak_between_calls(run: Runner) -> None:
    q, k, v = (run.randn(1, 40, 2, 64, seed=s) * 3 for s in range(3))
    capped = {cap: run(q, k, v, softcap=cap) for cap in (15, 30, 0)}
    for cap in (15, 30, 0, 2.5):
        run.check(q, k, v, softcap=cap)
    assert all(torch.equal(run(q, k, v, softcap=cap), out) for cap, out in capped.items())
    assert not torch.equal(capped[15], capped[30])
    windows = {left: run(q, k, v, window=(left, 3)) for left in (2, 9, None)}
    for left in (2, 9, None, 5):
        run.check(q, k, v, window=(left, 3))
    assert all(torch.equal(run(q, k, v, window=(left, 3)), out) for left, out in windows.items())
    first = run(q, k, v, scale=0.1)
    for scale in (0.1, 0.2, None, 0.1):
        run.check(q, k, v, scale=scale)
    assert torch.equal(run(q, k, v, scale=0.1), first)
    assert torch.equal(run(q, k, v, softcap=0, scale=0.1), first)


@case(13)
def lse_is_the_natural_log(run: Runner) -> None:
    q, k = run.full((2, 3, 2, 32), 0.0), run.randn(2, 8, 2, 32)
    out, lse = run(q, k, k, return_lse=True)
    run.lse_close(lse, math.log(8))
    run.close(out, k.double().mean(1, keepdim=True).expand(2, 3, 2, 32))


# ------------------------------------------------------------------------------------------------------- shapes


def _gradients_at(run: Runner, head_dims, lengths=((1, 130), (2, 65)), heads=(4, 2)) -> None:
    for head_dim in head_dims:
        for batch, seqlen in lengths:
            q = run.randn(batch, seqlen, heads[0], head_dim, seed=1)
            k, v = (run.randn(batch, seqlen, heads[1], head_dim, seed=s) for s in (2, 3))
            run.check_gradients(q, k, v)


@case(15)
def dq_where_head_dim_pads_to_16_and_32(run: Runner) -> None:
    _gradients_at(run, (8, 16, 40, 48, 72, 80, 104, 112))


@case(16)
def gradients_of_head_dims_above_128(run: Runner) -> None:
    _gradients_at(run, (136, 144, 152, 160, 168, 176))


@case(19)
def strided_views_equal_contiguous(run: Runner) -> None:
    for head_dim in (64, 128, 256):
        wide = [run.randn(70, 2, h, head_dim, seed=s) for s, h in enumerate((16, 2, 2))]
        tall = [run.randn(2, h, 70, head_dim, seed=s) for s, h in enumerate((16, 2, 2))]
        for views in ([x.transpose(0, 1) for x in wide], [x.transpose(1, 2) for x in tall]):
            dout = run.randn(2, 70, 16, head_dim, seed=5)
            strided, grads = run.gradients(*views, dout, causal=True)
            packed, packed_grads = run.gradients(*(x.contiguous() for x in views), dout, causal=True)
            assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))
            # Gradients may be summed by atomic adds, in any order: equal up to the last rounding.
            run.check(*views, result=strided, causal=True)
            for a, b in zip(grads, packed_grads, strict=True):
                assert oracle.relative_error(a, b.double()) <= run.allowed(0.0)


@case(20)
def head_dims_that_are_not_multiples_of_8(run: Runner) -> None:
    for head_dim in (20, 33, 148):
        q, k, v = (run.randn(2, 50, 2, head_dim, seed=s) for s in range(3))
        run.check_gradients(q, k, v, causal=True)
    for head_dim in (4, 257):
        q = run.randn(1, 4, 1, head_dim)
        with pytest.raises(NotImplementedError, match=rf"head_dim={head_dim}.*8 to 256"):
            run(q, q, q)


@case(22)
def zero_length_sequences_in_a_pack(run: Runner) -> None:
    if served(run):
        check_packed(run, (0, 120, 84, 0), (253, 174, 84, 307), heads=(4, 1), causal=True)
        check_packed(run, (0, 0, 102), (0, 1, 204), heads=(4, 1), causal=True)
        check_packed(run, (5, 7), (0, 9), heads=(4, 1))
    for seqlen_q, seqlen_k in ((0, 9), (5, 0), (1, 1)):  # the sequences of the packed case, one by one
        q, k, v = run.randn(1, seqlen_q, 4, 64), run.randn(1, seqlen_k, 1, 64), run.randn(1, seqlen_k, 1, 64)
        (out, lse), grads = run.gradients(q, k, v, torch.ones_like(q), causal=True)
        assert out.shape == q.shape
        assert lse.shape == (1, 4, seqlen_q)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        if 0 in (seqlen_q, seqlen_k):
            assert all(torch.all(g == 0) for g in (out, *grads))


@case(23)
def empty_keys(run: Runner) -> None:
    q, k, v = run.randn(2, 64, 4, 64), run.randn(2, 0, 4, 64), run.randn(2, 0, 4, 64)
    for causal in (False, True):
        (out, lse), (dq, dk, dv) = run.gradients(q, k, v, torch.ones_like(q), causal=causal)
        assert torch.all(out == 0)
        assert torch.all(lse == -math.inf)
        assert torch.all(dq == 0)
        assert dk.shape == dv.shape == (2, 0, 4, 64)
    for shape in ((0, 3, 4, 64), (2, 0, 4, 64), (2, 3, 0, 64)):
        empty = run.randn(*shape)
        out, lse = run(empty, empty, empty, return_lse=True)
        assert out.shape == shape
        assert lse.shape == (shape[0], shape[2], shape[1])


@case(26)
def any_group(run: Runner) -> None:
    for heads_q, heads_kv in ((9, 3), (28, 4), (7, 1), (96, 8), (5, 5)):
        for seqlen in (5, 333):
            q = run.randn(1, seqlen, heads_q, 32)
            k, v = (run.randn(1, seqlen, heads_kv, 32, seed=s) for s in (1, 2))
            wide = [x.repeat_interleave(heads_q // heads_kv, dim=2) for x in (k, v)]
            out = run(q, k, v, causal=True)
            assert oracle.relative_error(out, run(q, *wide, causal=True).double()) <= run.allowed(0.0)
            if heads_q < 28 or seqlen == 5:  # the dense answer for many heads takes seconds on a CPU
                run.check_gradients(q, k, v, causal=True)
                run.check_gradients(q, k, v, window=(3, 0))
                run.check_gradients(q, k, v, causal=True, window=(100, None))


@case(27)
def head_counts_that_do_not_divide(run: Runner) -> None:
    for heads_q, heads_kv in ((3, 2), (33, 2), (2, 0)):
        q, k = run.randn(1, 4, heads_q, 16), run.randn(1, 4, heads_kv, 16)
        with pytest.raises(ValueError, match=rf"\b{heads_q}\b.*\b{heads_kv}\b"):
            run(q, k, k)


@case(29)
def very_many_short_sequences(run: Runner) -> None:
    q, k, v = (run.randn(3000, 16, 1, 64, seed=s) for s in range(3))  # dense: the batch, not a scan over offsets
    run.check(q, k, v)
    if served(run):
        out, lse = cute_flash.attention_varlen(
            *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=offsets(run, [16] * 3000),
            cu_seqlens_k=offsets(run, [16] * 3000), return_lse=True, backend=run.backend,
        )  # fmt: skip
        run.check(q, k, v, result=(out.view(q.shape), lse.view(1, 3000, 16).transpose(0, 1)))


# --------------------------------------------------------------------------------------- layout, alignment, size


@case(32)
def misaligned_pointers_and_row_strides(run: Runner) -> None:
    plain = [run.randn(2, 70, 4, 64, seed=s) for s in range(3)]
    expected = run(*plain, causal=True)

    def misaligned(x):
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)

    packed = torch.stack(plain, dim=2).unbind(2)
    padded = [torch.nn.functional.pad(x, (0, 1))[..., :64] for x in plain]
    for views in ([misaligned(x) for x in plain], padded, packed, [plain[0], padded[1], misaligned(plain[2])]):
        assert torch.equal(run(*views, causal=True), expected)
        run.check_gradients(*views, causal=True)


@case(33)
def each_tensor_has_its_own_strides(run: Runner) -> None:
    q, k, v = (run.randn(2, 65, 2, 64, seed=s) for s in range(3))
    expected = run(q, k, v)

    def every_second(x):
        wide = torch.full((2, 130, 2, 64), math.nan, dtype=x.dtype, device=x.device)
        wide[:, ::2] = x
        return wide[:, ::2]

    def column_major(x):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    for change in (every_second, column_major):
        for views in ((q, change(k), v), (q, k, change(v)), (change(q), k, v)):
            assert torch.equal(run(*views), expected)
            run.check_gradients(*views)


@case(34)
def grad_out_of_any_strides(run: Runner) -> None:
    q, k, v = (run.randn(2, 65, 2, 64, seed=s) for s in range(3))
    g, extra = run.randn(2, 2, 65, 64, seed=4), run.randn(2, 65, 7, seed=5)
    losses = (
        lambda out: out.sum(),
        lambda out: (out.transpose(1, 2) * g).sum(),
        lambda out: torch.cat([out.flatten(2), extra], -1).square().sum(),
        lambda out: out[:, ::2].sum(),
    )
    for loss in losses:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(loss(run(*leaves)), leaves)
        out = run(q, k, v).detach().requires_grad_()
        (dout,) = torch.autograd.grad(loss(out), out)
        _, expected = run.gradients(q, k, v, dout.contiguous())
        for a, b in zip(grads, expected, strict=True):
            assert oracle.relative_error(a, b.double()) <= run.allowed(0.0)
        run.check_gradients(q, k, v, dout)


# --------------------------------------------------------------------------------------------- autograd and API


@case(40)
def every_option_reaches_the_backward(run: Runner) -> None:
    q, k, v = run.randn(2, 50, 4, 64), run.randn(2, 70, 4, 64, seed=1), run.randn(2, 70, 4, 32, seed=2)
    for options in (
        {}, {"causal": True}, {"scale": 0.3}, {"causal": True, "scale": 0.3}, {"window": (3, 3)}, {"window": (None, 9)},
        {"softcap": 0.5}, {"window": (20, 0), "softcap": 2.0, "scale": 0.3},
    ):  # fmt: skip
        run.check_gradients(q, k, v, **options)
        run.check_gradients(q, k[:, :, :2], v[:, :, :2], **options)
        dlse = run.randn(2, 4, 50, seed=3).to(torch.promote_types(run.dtype, torch.float32))
        dout = run.randn(2, 50, 4, 32, seed=4)
        result, grads = run.gradients(q, k, v, dout, dlse, **options)
        run.check(q, k, v, result=result, **options)
        exact = oracle.backward(q, k, v, dout, dlse, **options)
        for a, b in zip(grads, exact, strict=True):
            # The yardstick has no LSE gradient: P, dS and the output's three roundings to 16 bits bound it.
            assert oracle.relative_error(a, b) <= run.allowed(3 * HALF_ULP_OF_MEANS)
    refused(run, "mask_mod", lambda b, h, i, j: i >= j)


@case(41)
def block_lists(run: Runner) -> None:
    refused(run, "block_mask", object())


@case(43)
def double_backward_raises(run: Runner) -> None:
    q, k, v = (run.randn(1, 9, 2, 16, seed=s).requires_grad_() for s in range(3))
    (dq,) = torch.autograd.grad(run(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        dq.sum().backward()


@case(44)
def return_arity(run: Runner) -> None:
    q = run.randn(1, 9, 2, 16)
    for leaf in (q, q.detach().requires_grad_()):
        assert isinstance(run(leaf, q, q), torch.Tensor)
        result = run(leaf, q, q, return_lse=True)
        assert isinstance(result, tuple)
        assert [tuple(x.shape) for x in result] == [(1, 9, 2, 16), (1, 2, 9)]


@case(51)
def deterministic_gradients(run: Runner) -> None:
    q = run.randn(1, 200, 16, 64)
    k, v = (run.randn(1, 200, 2, 64, seed=s) for s in (1, 2))
    dout = run.randn(1, 200, 16, 64, seed=3)
    for causal in (False, True):
        _, first = run.gradients(q, k, v, dout, causal=causal, deterministic=True)
        for _ in range(3):
            _, again = run.gradients(q, k, v, dout, causal=causal, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        run.check_gradients(q, k, v, dout, causal=causal)


@case(52)
def short_last_sequences_of_a_pack(run: Runner) -> None:
    if served(run):
        for sequences in (1, 5):
            check_packed(run, (128, 128, 44, 1) * sequences, (128, 128, 44, 1) * sequences, causal=True)
    for seqlen in (128, 44, 1):
        q, k, v = (run.randn(3, seqlen, 1, 64, seed=s) for s in range(3))
        if seqlen > 1:
            run.check_gradients(q, k, v, causal=True)


@case(56)
def no_new_plan_for_another_length_or_batch(run: Runner) -> None:
    if served(run):
        q, cu = run.randn(8, 1, 16), offsets(run, (3, 5))
        with pytest.raises(TypeError, match="max_seqlen_q"):  # a tensor would be read by the host, and be a key
            cute_flash.attention_varlen(
                q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=torch.tensor(5), backend=run.backend
            )
    plans = set()
    for batch, seqlen in ((1, 1000), (1, 1001), (1, 1002), (2, 1000), (3, 1000), (4, 1000)):
        q = run.randn(1, 1, 4, 64).expand(batch, seqlen, 4, 64)
        plans.add(cute_flash.explain(q, q, q, causal=True, backend=run.backend).plan)
    assert len(plans) == 1


@case(60)
def full_mask_head_dims_and_lengths_in_the_backward(run: Runner) -> None:
    for head_dims in ((40, 40), (80, 80), (96, 96), (192, 192), (256, 256), (192, 128), (64, 128)):
        for seqlen in (77, 1025) if head_dims == (80, 80) else (77,):
            q, k = (run.randn(1, seqlen, 2, head_dims[0], seed=s) for s in range(2))
            run.check_gradients(q, k, run.randn(1, seqlen, 2, head_dims[1], seed=2))
        q, k, v = (run.randn(2, 1, 2, d, seed=s) for s, d in enumerate((head_dims[0], *head_dims)))
        run.check(q, k, v)
