"""Calls the front door on one device with one backend, and holds the answers against the oracle."""

import math
import warnings
from dataclasses import dataclass

import torch

import cute_flash
from tests import oracle

# A rounding to the output's dtype costs up to half an ulp relative to each element: nothing can be asked to be better.
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
TWICE_ROUNDED = 4e-3  # of bfloat16, where no yardstick is at hand: P (or dS) and the result, 2^-9 each at most
# Hundreds of ulps: summing up to a few hundred products in another order costs tens, and dP - delta cancels.
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
# A row with one key has P = 1 and dP = delta, so dq = dk = 0 but for float32 rounding of dP - delta: sqrt(256) products
# of size 1 give 1e-6, times k and scale. Nothing larger may be left.
ONE_KEY_ATOL = 1e-4
ALLOWED_RATIO = 1.05  # of the yardstick's error: two equally good kernels differ by under 1% at 2^15 elements


@dataclass(frozen=True)
class Runner:
    device: torch.device
    dtype: torch.dtype
    backend: str | None = None

    # ------------------------------------------------------------------------------------------------ calls

    def __call__(self, q, k, v, **options):
        """attention()."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cute_flash.FallbackWarning)
            return cute_flash.attention(q, k, v, backend=self.backend, **options)

    def gradients(self, q, k, v, dout, dlse=None, **options):
        """(out, lse), (dq, dk, dv) for leaves with the strides of q, k and v."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = self(*leaves, return_lse=True, **options)
        targets, weights = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
        return (out, lse), torch.autograd.grad(targets, leaves, weights)

    # ---------------------------------------------------------------------------------------------- tensors

    def randn(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + sum(shape))
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

    def full(self, shape: tuple[int, ...], value: float) -> torch.Tensor:
        return torch.full(shape, value, dtype=self.dtype, device=self.device)

    def one_hot_values(self, seqlen: int, dim: int = 8) -> torch.Tensor:
        """v[j] = one-hot(j), (1, seqlen, 1, dim): the output of a row is its weights."""
        return torch.eye(seqlen, dim, dtype=self.dtype, device=self.device)[None, :, None]

    # ----------------------------------------------------------------------------------------------- checks

    def allowed(self, plain_error: float, roundings: int = 1) -> float:
        """Relative error that passes, given plain attention's in the same dtype.

        These cases are small: their rounding errors do not average out, and how they compare with plain attention's is
        luck below half an ulp for each 16-bit rounding on the way.
        """
        exact = EXACT.get(self.dtype)
        return max(ALLOWED_RATIO * plain_error, roundings * HALF_ULP[self.dtype]) if exact is None else exact

    def limits(self, exact, plain, roundings: int = 1) -> list[float]:
        """allowed() for each tensor of `exact`; plain() computes the yardstick, where one is needed."""
        if self.dtype in EXACT:
            return [EXACT[self.dtype]] * len(exact)
        return [self.allowed(oracle.relative_error(p, e), roundings) for p, e in zip(plain(), exact, strict=True)]

    def check(self, q, k, v, *, result=None, **options) -> None:
        """Output and LSE of a call against float64; in 16 bits, beside plain 16-bit attention's error."""
        out, lse = self(q, k, v, return_lse=True, **options) if result is None else result
        exact = oracle.forward(q, k, v, **options)
        (limit,) = self.limits([exact.out], lambda: [oracle.plain_16bit(q, k, v, **options).out])
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        assert oracle.relative_error(out, exact.out) <= limit
        assert oracle.lse_excess(lse, exact.lse) <= 1

    def check_gradients(self, q, k, v, dout=None, **options) -> None:
        """Output, LSE, dQ, dK and dV of a call against float64."""
        dout = self.randn(*q.shape[:3], v.shape[-1], seed=99) if dout is None else dout
        result, grads = self.gradients(q, k, v, dout, **options)
        self.check(q, k, v, result=result, **options)
        exact = oracle.backward(q, k, v, dout, **options)
        # roundings: O or P, dS, and the gradient itself
        limits = self.limits(exact, lambda: oracle.plain_16bit_backward(q, k, v, dout, **options), roundings=3)
        for name, value, reference, limit in zip(("dq", "dk", "dv"), grads, exact, limits, strict=True):
            assert value.dtype == q.dtype, name
            if not reference.any():  # rows of one key: P = 1 and dP = delta but for rounding
                assert value.abs().max() <= ONE_KEY_ATOL, name
                continue
            error = oracle.relative_error(value, reference)
            assert error <= limit, f"{name}: {error:.3e}, allowed {limit:.3e}"

    def close(self, value: torch.Tensor, expected) -> None:
        """Elementwise, for closed forms: half an ulp of the expected value, or float32's own error."""
        expected = torch.as_tensor(expected, dtype=torch.float64, device=self.device)
        rtol = 2 * HALF_ULP.get(self.dtype, EXACT.get(self.dtype, math.inf))  # P is rounded once, O is rounded once
        torch.testing.assert_close(value.double(), expected.expand_as(value), rtol=rtol, atol=rtol)

    def lse_close(self, value: torch.Tensor, expected) -> None:
        expected = torch.as_tensor(expected, dtype=torch.float64, device=self.device)
        assert oracle.lse_excess(value, expected.expand_as(value)) <= 1
