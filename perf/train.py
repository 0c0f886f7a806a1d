"""Train a small GPT with each contestant's attention on one stream of synthetic text: `python -m perf.train`.

The models start from the same weights, see the same batches and take every step one after the other, in an order
shuffled each step, so that clock and temperature are shared. Per step and contestant a CSV row has the loss and the
milliseconds of the step (forward, backward, optimizer; eager, so what a call costs the host counts where it shows).
Two contestants that compute exact attention drift apart by rounding alone: `fa2` against `cudnn` is the measure.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from . import baselines, machine
from .points import Point

COLUMNS = ("gpu", "uuid", "date", "commit", "torch", "contestant", "version", "step", "loss", "ms")
HEAD_DIM = 128
SUCCESSORS = 4  # of a token
WARM_STEPS = 10  # without a place in the medians: kernels compile, the allocator settles
TAIL = 20  # last steps that the final loss is a mean of


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.train", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contestants", default="ours,fa2,cudnn", help="of perf/baselines.py, comma-separated")
    add("--steps", type=int, default=200)
    add("--layers", type=int, default=2)
    add("--width", type=int, default=2048, help=f"of the model, in heads of {HEAD_DIM}")
    add("--seqlen", type=int, default=4096)
    add("--batch", type=int, default=2)
    add("--vocabulary", type=int, default=1024)
    add("--rate", type=float, default=3e-4, help="of learning")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("perf/results/train.csv"), help="CSV that is written")
    add("--commit", default="", help="commit of the code where there is no git")
    add("--dry", action="store_true", help="a tiny model on the CPU: tries the script, measures nothing")
    args = parser.parse_args(argv)
    if args.dry:
        args.layers, args.width, args.seqlen, args.batch = 1, HEAD_DIM, 32, 8
        args.vocabulary, args.rate = 16, 3e-3
    if args.width % HEAD_DIM:
        parser.error(f"--width={args.width} is no multiple of {HEAD_DIM}")
    return args


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, contestant: baselines.Contestant, attend: baselines.Attend) -> None:
        super().__init__()
        self.contestant, self.attend = contestant, attend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seqlen, width)."""
        batch, seqlen, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, seqlen, 3, width // HEAD_DIM, HEAD_DIM)
        out = self.attend(*(self.contestant.arrange(part) for part in heads.unbind(2)))
        x = x + self.project(self.contestant.arrange(out).reshape(batch, seqlen, width))
        return x + self.perceptron(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, args: argparse.Namespace, contestant: baselines.Contestant, attend: baselines.Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.seqlen, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, contestant, attend) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seqlen) -> logits (batch, seqlen, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Text:
    """Synthetic: every token has a few successors, and a phrase of them comes again and again. A model learns the
    successors quickly (cross entropy log(SUCCESSORS)); which of them follows, only attention to the phrase before
    tells."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.batch, self.seqlen, self.device = args.batch, args.seqlen, device
        self.period = max(4, args.seqlen // 16)
        self.generator = torch.Generator().manual_seed(args.seed)
        self.vocabulary = args.vocabulary
        self.successors = torch.randint(args.vocabulary, (args.vocabulary, SUCCESSORS), generator=self.generator)

    def draw(self) -> Tensor:
        """(batch, seqlen + 1) tokens."""
        phrase = [torch.randint(self.vocabulary, (self.batch,), generator=self.generator)]
        choices = torch.randint(SUCCESSORS, (self.period, self.batch), generator=self.generator)
        for choice in choices[1:]:
            phrase.append(self.successors[phrase[-1], choice])
        whole = torch.stack(phrase, 1).repeat(1, self.seqlen // self.period + 2)
        return whole[:, : self.seqlen + 1].to(self.device)


class Trainee:
    """A contestant's model and its optimizer."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        self.contestant, self.device = baselines.CONTESTANTS[name], device
        heads, seqlen = args.width // HEAD_DIM, args.seqlen
        point = Point(HEAD_DIM, HEAD_DIM, "causal", args.batch, heads, heads, seqlen, seqlen, direction="bwd")
        torch.manual_seed(args.seed)
        self.model = Gpt(args, self.contestant, self.contestant.build(point, device)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.rate, fused=device.type == "cuda")

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """-> (loss, milliseconds)."""
        self._settle()
        start = time.perf_counter()
        with self.contestant.context(), torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        with self.contestant.context():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._settle()
        milliseconds = (time.perf_counter() - start) * 1e3
        return loss.item(), milliseconds

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def train(args: argparse.Namespace, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Name -> (loss, milliseconds) of every step."""
    trainees = {name: Trainee(name, args, device) for name in args.contestants.split(",")}
    text, order = Text(args, device), random.Random(args.seed)
    history: dict[str, list[tuple[float, float]]] = {name: [] for name in trainees}
    for step in range(args.steps):
        tokens = text.draw()
        for name in order.sample(list(trainees), len(trainees)):
            history[name].append(trainees[name].step(tokens))
        if step % 50 == 0 or step + 1 == args.steps:
            print(f"step {step}: " + ", ".join(f"{n} {h[-1][0]:.4f}" for n, h in history.items()), flush=True)
    return history


def write(path: Path, history: Mapping[str, Sequence[tuple[float, float]]], facts: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = {name: facts[name] for name in COLUMNS if name in facts}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name, steps in history.items():
            who = {"contestant": name, "version": baselines.CONTESTANTS[name].version()}
            for step, (loss, milliseconds) in enumerate(steps):
                writer.writerow({**shared, **who, "step": step, "loss": f"{loss:.6f}", "ms": f"{milliseconds:.3f}"})


def summary(history: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line a contestant: losses, how far from the second one's, and the step's median."""
    names = list(history)
    base = history[names[min(1, len(names) - 1)]]
    lines = []
    for name, steps in history.items():
        apart = [abs(a[0] - b[0]) for a, b in zip(steps, base, strict=True)]
        timed = [ms for _, ms in steps[WARM_STEPS:]] or [ms for _, ms in steps]
        lines.append(
            f"{name}: loss {steps[0][0]:.4f} -> {statistics.fmean(s[0] for s in steps[-TAIL:]):.4f}, from"
            f" {names[min(1, len(names) - 1)]}'s at most {max(apart):.4f}, {statistics.fmean(apart):.5f} in the mean;"
            f" step {statistics.median(timed):.2f} ms"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = torch.device("cpu") if args.dry else torch.device("cuda", torch.cuda.current_device())
    history = train(args, device)
    write(args.out, history, machine.facts(device, args.commit or machine.commit_here()))
    print(summary(history))
    return 0


if __name__ == "__main__":
    sys.exit(main())
