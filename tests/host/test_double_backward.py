"""Gradients may be taken once. Differentiating them again raises, whatever else leads to the same inputs."""

import pytest
import torch

import cute_flash


def first_order(return_lse: bool = False):
    q, k, v = (torch.randn(2, 5, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    result = cute_flash.attention(q, k, v, causal=True, return_lse=return_lse)
    loss = sum(each.pow(2).sum() for each in result) if return_lse else result.pow(2).sum()
    return (q, k, v), torch.autograd.grad(loss, (q, k, v), create_graph=True)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_second_gradient_raises(which, return_lse):
    inputs, grads = first_order(return_lse)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        torch.autograd.grad(grads[which].pow(2).sum(), inputs[0])


def test_second_gradient_raises_where_another_path_leads_to_the_input():
    (q, _, _), grads = first_order()
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        torch.autograd.grad(grads[0].pow(2).sum() + (q**2).sum(), q)


def test_second_backward_raises():
    _, grads = first_order()
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        sum(grad.sum() for grad in grads).backward()


def test_first_gradients_are_right_with_a_graph():
    inputs, grads = first_order()
    plain = torch.autograd.grad(cute_flash.attention(*inputs, causal=True).pow(2).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_functorch_transforms_are_refused(transform):
    q = torch.randn(3, 1, 5, 2, 8)
    with pytest.raises(cute_flash.UnsupportedError, match=r"torch\.func"):
        if transform == "vmap":
            torch.func.vmap(lambda x: cute_flash.attention(x, x, x))(q)
        else:
            torch.func.grad(lambda x: cute_flash.attention(x, x, x).sum())(q[0])


def test_neutral_arguments_of_other_libraries_are_taken():
    q = torch.randn(1, 5, 2, 8)
    expected = cute_flash.attention(q, q, q)
    assert torch.equal(cute_flash.attention(q, q, q, dropout_p=0.0, attn_mask=None), expected)
    with pytest.raises(cute_flash.UnsupportedError, match="dropout_p"):
        cute_flash.attention(q, q, q, dropout_p=0.1)


def test_lazy_signs_are_made_real():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    expected = cute_flash.attention(-q, k, -v)
    for _ in range(2):  # cold, then warm
        assert torch.equal(cute_flash.attention(torch._neg_view(q), k, torch._neg_view(v)), expected)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, dout = cute_flash.attention(*leaves), torch.randn(1, 5, 2, 8)
    lazy = torch.autograd.grad(out, leaves, torch._neg_view(dout), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(lazy, torch.autograd.grad(out, leaves, -dout), strict=True))


def test_scale_limits_are_named():
    q = torch.randn(1, 5, 2, 8)
    with pytest.raises(ValueError, match=r"2\*\*16"):
        cute_flash.attention(q, q, q, scale=2.0**40)
