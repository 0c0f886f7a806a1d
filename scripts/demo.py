"""Runs attention on what this machine has and says how exact it was: `scripts/demo`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import cute_flash
from cute_flash.emulator import Unavailable
from perf import check

LSE_LIMIT = 1e-3  # absolute, plus 1e-6 of the value


@dataclass(frozen=True)
class Scene:
    """One call: shape, dtype and options."""

    title: str
    shape: tuple[int, int, int, int, int, int]  # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim
    dtype: torch.dtype
    causal: bool
    gradients: bool = True
    emulated: str = ""  # architecture whose kernels run on CPU tensors

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = self.shape
        generator = torch.Generator().manual_seed(0)

        def normal(seqlen: int, heads: int) -> torch.Tensor:
            values = torch.randn(batch, seqlen, heads, head_dim, generator=generator)
            return values.to(device, self.dtype).requires_grad_(self.gradients)

        return normal(seqlen_q, heads_q), normal(seqlen_k, heads_kv), normal(seqlen_k, heads_kv)


def scenes(on_gpu: bool) -> Iterator[Scene]:
    """Large shapes on a GPU; small ones on a CPU, where the emulator runs the GPU's own instructions."""
    if on_gpu:
        yield Scene("training, GQA, causal", (2, 2048, 2048, 16, 4, 128), torch.bfloat16, True)
        yield Scene("odd sizes, unequal lengths", (1, 1000, 1500, 6, 6, 80), torch.float16, True)
        yield Scene("float32", (1, 512, 512, 4, 4, 64), torch.float32, False)
        return
    yield Scene("bfloat16, GQA, causal", (2, 200, 200, 4, 2, 64), torch.bfloat16, True)
    yield Scene("float64, unequal lengths, causal", (1, 65, 100, 2, 2, 40), torch.float64, True)
    if sys.platform.startswith("linux"):  # where CuTe-DSL and the emulator run
        yield Scene("Hopper kernel, emulated", (1, 130, 130, 1, 1, 64), torch.bfloat16, True, False, "sm_90a")
        yield Scene("Blackwell kernel, emulated", (1, 130, 130, 1, 1, 64), torch.bfloat16, True, False, "sm_100a")


def run(scene: Scene, device: torch.device) -> bool:
    """Print the decision and the errors of one call; False where an error is above its limit."""
    q, k, v = scene.inputs(device)
    package: Any = cute_flash
    emulation = package.emulate(scene.emulated) if scene.emulated else contextlib.nullcontext()
    print(f"\n{scene.title}")
    with emulation, warnings.catch_warnings():
        warnings.simplefilter("ignore", cute_flash.FallbackWarning)  # the walk below says the same
        for line in str(cute_flash.explain(q, k, v, causal=scene.causal, return_lse=True)).splitlines():
            print(f"    {line}")
        out, lse = cute_flash.attention(q, k, v, causal=scene.causal, return_lse=True)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        grads = torch.autograd.grad(out, (q, k, v), dout) if scene.gradients else ()
    wide_q, wide_k, wide_v = (x.detach().to(torch.float64) for x in (q, k, v))
    exact = check.reference(
        wide_q, wide_k, wide_v, check.Band(scene.causal), scene.shape[-1] ** -0.5, dout.to(torch.float64)
    )
    limits = check.FORWARD_LIMIT[scene.dtype], check.BACKWARD_LIMIT[scene.dtype]
    error = check.relative_error(out.detach(), exact.out)
    lse_error = (lse.detach().to(torch.float64) - exact.lse).abs()
    right = error <= limits[0] and bool((lse_error <= LSE_LIMIT + 1e-6 * exact.lse.abs()).all())
    print(f"  out: relative error {error:.1e} against float64; LSE: largest error {lse_error.max().item():.1e}")
    for name, grad, want in zip(("dq", "dk", "dv"), grads, exact.grads, strict=bool(grads)):
        error = check.relative_error(grad, want)
        right = right and error <= limits[1]
        print(f"  {name}: relative error {error:.1e}")
    print("  right" if right else f"  WRONG: the limits are {limits[0]:.0e} and {limits[1]:.0e}, LSE {LSE_LIMIT:.0e}")
    return right


def main() -> int:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "no CUDA GPU here: plain PyTorch on the CPU"
    print(f"cute_flash {cute_flash.__version__}, torch {torch.__version__}, {name}")
    verdicts = []
    for scene in scenes(on_gpu):
        try:
            verdicts.append(run(scene, device))
        except Unavailable as error:
            print(f"  not run here: {error}")
    print(f"\n{sum(verdicts)} of {len(verdicts)} calls right")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
