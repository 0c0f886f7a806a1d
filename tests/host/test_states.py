"""merge_attention_states against float64 attention over all keys at once."""

import math

import pytest
import torch

import cute_flash
from tests import oracle

HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 1e-6, torch.float64: 1e-13}


def parts(dtype: torch.dtype, seqlen_q: int = 5, cut: int = 7, seqlen_k: int = 23):
    """q, k, v, and the exact states of keys [0, cut) and [cut, seqlen_k) in the dtypes that attention returns."""
    torch.manual_seed(0)
    q = torch.randn(2, seqlen_q, 4, 16, dtype=torch.float64) * 3
    k, v = torch.randn(2, seqlen_k, 2, 16, dtype=torch.float64), torch.randn(2, seqlen_k, 2, 24, dtype=torch.float64)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    states = [oracle.forward(q, k[:, keys], v[:, keys]) for keys in (slice(0, cut), slice(cut, None))]
    return (q, k, v), [(state.out.to(dtype), state.lse.to(lse_dtype)) for state in states]


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("cut", [0, 1, 7, 22, 23])
def test_two_parts_are_the_whole(dtype, cut):
    (q, k, v), (first, second) = parts(dtype, cut=cut)
    o, lse = cute_flash.merge_attention_states(*first, *second)
    exact = oracle.forward(q, k, v)
    assert o.dtype == dtype
    assert oracle.relative_error(o, exact.out) <= 2 * HALF_ULP[dtype]  # the parts were rounded, and the result is
    assert oracle.lse_excess(lse, exact.lse) <= 1


def test_packed_states_merge_as_batched_ones_do():
    _, (first, second) = parts(torch.float32)
    o, lse = cute_flash.merge_attention_states(*first, *second)
    packed = [(out.flatten(0, 1), rows.transpose(0, 1).flatten(1)) for out, rows in (first, second)]
    packed_o, packed_lse = cute_flash.merge_attention_states(*packed[0], *packed[1])
    assert torch.equal(packed_o, o.flatten(0, 1))
    assert torch.equal(packed_lse, lse.transpose(0, 1).flatten(1))


def states_with_dead_rows(dtype=torch.float64):
    """Row 0 is seen by both parts, row 1 by the second alone, row 2 by the first alone, row 3 by neither."""
    torch.manual_seed(1)
    o1, o2 = (torch.randn(4, 1, 8, dtype=dtype) for _ in range(2))
    lse1 = torch.tensor([[1.0, -math.inf, 700.0, -math.inf]], dtype=dtype)
    lse2 = torch.tensor([[-2.0, -800.0, -math.inf, -math.inf]], dtype=dtype)
    return o1, lse1, o2, lse2


def test_rows_without_keys():
    o1, lse1, o2, lse2 = states_with_dead_rows()
    o1[1], o1[3], o2[2], o2[3] = math.nan, math.nan, math.inf, math.nan  # what a keyless part holds means nothing
    o, lse = cute_flash.merge_attention_states(o1, lse1, o2, lse2)
    assert torch.equal(o[1], o2[1])
    assert torch.equal(o[2], o1[2])
    assert not o[3].any()
    assert lse[0, 1:].tolist() == [-800.0, 700.0, -math.inf]


def test_gradients():
    """Against finite differences where both parts have keys; zero, not NaN, where a part has none."""
    alive = [(x[:1] if x.dim() == 3 else x[:, :1]).clone().requires_grad_() for x in states_with_dead_rows()]
    assert torch.autograd.gradcheck(cute_flash.merge_attention_states, alive)
    leaves = [x.clone().requires_grad_() for x in states_with_dead_rows()]
    o, lse = cute_flash.merge_attention_states(*leaves)
    targets = [o, lse.masked_fill(lse == -math.inf, 0.0)]
    do1, dlse1, do2, dlse2 = torch.autograd.grad(targets, leaves, [torch.ones_like(t) for t in targets])
    assert not do1[1].any() and not do1[3].any() and not do2[2].any() and not do2[3].any()
    assert dlse1[0, [1, 3]].tolist() == [0, 0] and dlse2[0, [2, 3]].tolist() == [0, 0]
    assert bool((do2[1] == 1).all()) and dlse2[0, 1] == 1


def test_gradients_through_both_parts_are_those_of_the_whole():
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float64).requires_grad_() for n in (6, 40, 40))
    halves = [cute_flash.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(9), slice(9, None))]
    o, lse = cute_flash.merge_attention_states(*halves[0], *halves[1])
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    grads = torch.autograd.grad([o, lse], [q, k, v], [dout, dlse])
    for grad, exact in zip(grads, oracle.backward(q, k, v, dout, dlse), strict=True):
        assert oracle.relative_error(grad, exact) <= 1e-12


OUT, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
BAD = [
    ((None, LSE, OUT, LSE), TypeError, "o1 must be a torch.Tensor, got NoneType"),
    ((torch.nested.nested_tensor([OUT[0], OUT[1]]), LSE, OUT, LSE), TypeError, "o1 must be .* got a nested tensor"),
    ((OUT, LSE, OUT, LSE.to_sparse()), TypeError, "lse2 must be a plain strided tensor, got torch.sparse_coo"),
    ((OUT[0, 0], LSE, OUT, LSE), ValueError, r"o1 must be .*, got \(4, 8\)"),
    ((OUT, LSE, OUT[:1], LSE), ValueError, "o1 and o2 must have one shape"),
    ((OUT, LSE, OUT.double(), LSE), TypeError, "o1 and o2 must have one dtype"),
    ((OUT.int(), LSE, OUT.int(), LSE), TypeError, "one dtype of bfloat16"),
    ((OUT, LSE.transpose(1, 2), OUT, LSE), ValueError, r"lse1 must be \(2, 4, 3\) .*, got \(2, 3, 4\)"),
    ((OUT, LSE, OUT, LSE.double()), TypeError, "lse2 must be torch.float32"),
    ((OUT, LSE, OUT, LSE.to("meta")), ValueError, "one device, got cpu, meta"),
]


@pytest.mark.parametrize(("arguments", "error", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_states_are_refused(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        cute_flash.merge_attention_states(*arguments)
