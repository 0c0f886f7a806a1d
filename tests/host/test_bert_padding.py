"""Padded batches to packed sequences and back: every token once, at its place, with its gradient."""

import pytest
import torch

from cute_flash import attention_varlen
from cute_flash.integrations.bert_padding import index_first_axis, pad_input, unpad_input

from .. import oracle

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]])  # padding, nothing, holes, everything


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_every_token_once(dtype):
    x = torch.arange(4 * 4 * 3, dtype=torch.float64).view(4, 4, 3)
    packed, indices, starts, longest, used = unpad_input(x, MASK.to(dtype))
    assert indices.tolist() == [0, 1, 2, 9, 11, 12, 13, 14, 15] and indices.dtype == torch.int64
    assert starts.tolist() == [0, 3, 3, 5, 9] and starts.dtype == torch.int32
    assert longest == 4 and type(longest) is int and used.tolist() == [3, 0, 2, 4] and used.dtype == torch.int32
    assert torch.equal(packed, x[MASK.bool()]) and torch.equal(index_first_axis(x.flatten(0, 1), indices), packed)
    assert torch.equal(pad_input(packed, indices, 4, 4), x * MASK[..., None])


def test_tokens_kept_without_being_used():
    unused = torch.tensor([[0, 0, 0, 1]] + [[0, 0, 0, 0]] * 3)
    _, indices, starts, longest, used = unpad_input(torch.zeros(4, 4), MASK, unused)
    assert indices.tolist()[:4] == [0, 1, 2, 3] and starts.tolist() == [0, 4, 4, 6, 10]
    assert longest == 4 and used.tolist() == [3, 0, 2, 4]


@pytest.mark.parametrize("batch", [0, 2])
def test_a_batch_of_nothing(batch):
    packed, indices, starts, longest, used = unpad_input(torch.ones(batch, 5, 2), torch.zeros(batch, 5))
    assert packed.shape == (0, 2) and indices.numel() == 0 and longest == 0
    assert starts.tolist() == [0] * (batch + 1) and used.tolist() == [0] * batch
    assert torch.equal(pad_input(packed, indices, batch, 5), torch.zeros(batch, 5, 2))


@pytest.mark.usefixtures("office")
def test_a_padded_batch_trains_as_its_rows_do():
    """What stands at padding is NaN: it must reach neither an output nor a gradient."""
    torch.manual_seed(0)
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [0] * 5 + [1] * 2]).bool()
    q, k = (torch.randn(3, 7, heads, 16, dtype=torch.float64) for heads in (4, 2))
    q[~mask], k[~mask] = torch.nan, torch.nan
    q.requires_grad_(), k.requires_grad_()
    packed_q, indices, starts, longest, _ = unpad_input(q, mask)
    packed_k = index_first_axis(k.flatten(0, 1), indices)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    out = pad_input(attention_varlen(packed_q, packed_k, packed_k, causal=True, **lengths), indices, 3, 7)
    assert not out[~mask].any()
    grads = torch.autograd.grad(out.sum(), (q, k))
    assert all(not grad[~mask].any() for grad in grads)
    for row in range(3):
        one_q, one_k = (x[row : row + 1, mask[row]].detach() for x in (q, k))
        right = oracle.forward(one_q, one_k, one_k, causal=True)
        assert oracle.relative_error(out[row : row + 1, mask[row]], right.out) < 1e-14
        d_out = torch.ones_like(right.out)
        dq, dk, dv = oracle.backward(one_q, one_k, one_k, d_out, causal=True)
        assert oracle.relative_error(grads[0][row : row + 1, mask[row]], dq) < 1e-12
        assert oracle.relative_error(grads[1][row : row + 1, mask[row]], dk + dv) < 1e-12


@pytest.mark.parametrize("mask", [MASK[:3], MASK[None], MASK[:, :3]], ids=["batch", "dims", "seqlen"])
def test_a_mask_of_another_shape_is_refused(mask):
    for given in ((mask,), (MASK, mask)):
        with pytest.raises(ValueError, match=r"_mask must be \(batch, seqlen\) of hidden_states, \(4, 4\), got \("):
            unpad_input(torch.zeros(4, 4, 2), *given)
