"""python -m cute_flash doctor | explain | warmup | cache: what is installed, what would run, and compiling ahead."""

import argparse
import itertools
import multiprocessing
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cute_flash.arch as arch

from .runtime import compiler, diskcache, dispatch, request, toolchain
from .spec import device as device_facts
from .spec import settings
from .spec.backend import Backend
from .spec.device import Device
from .spec.errors import UnsupportedError
from .spec.plan import Plan
from .spec.problem import BACKWARD, FORWARD, SHORT_KEYS, Problem

DTYPES = tuple(request.dtype_name(dtype) for dtype in request.DTYPES)
SWITCH = {"no": (False,), "yes": (True,), "both": (False, True)}
DIRECTIONS = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, BACKWARD)}


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    """Empty where one of the parts is no whole number."""
    parts = text.split(separator)
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _head_dims(text: str) -> tuple[int, int]:
    """ "128" or "192,128" (head_dim, head_dim_v)."""
    numbers = _numbers(text, ",")
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number (64) nor a pair head_dim,head_dim_v (192,128)")
    return numbers[0], numbers[-1]


def _capability(text: str) -> tuple[int, int]:
    numbers = _numbers(text, ".")
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability MAJOR.MINOR (9.0)")
    return numbers[0], numbers[1]


def _count(text: str) -> int:
    numbers = _numbers(text, ",")
    if len(numbers) != 1 or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return numbers[0]


def _window(text: str) -> tuple[int | None, int | None]:
    """ "1023,0" or "512,None" (left, right)."""
    try:
        left, right = (None if part.strip() == "None" else int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window LEFT,RIGHT (1023,0 or 512,None)") from None
    _check(window=(left, right))
    return left, right


def _softcap(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    _check(softcap=value)
    return value


def _check(window: Any = None, softcap: Any = None) -> None:
    try:
        request.spell(False, window, softcap)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _problem(
    device: Device, dtype: str, dims: tuple[int, int], direction: str, options: request.Options, lse: bool = False
) -> Problem:
    return Problem(
        direction, device, dtype, dims[0], dims[1], heads_q=8, heads_kv=8, mask=options.mask,
        lse=lse or direction == BACKWARD, features=options.features,
    )  # fmt: skip


def _devices() -> list[Device]:
    if not torch.cuda.is_available():
        return [device_facts.describe(torch.device("cpu"))]
    return [device_facts.describe(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _walk(problem: Problem) -> str:
    try:
        return str(dispatch.choose(problem))
    except UnsupportedError as refusal:
        return str(refusal)


# --------------------------------------------------------------------------------------------------------- doctor


def _versions() -> Iterable[tuple[str, str]]:
    yield "cute_flash", toolchain.version("cute-flash")
    yield "python", platform.python_version()
    yield from device_facts.version_facts().items()
    for distribution in (*toolchain.DISTRIBUTIONS, "triton"):
        yield distribution, toolchain.version(distribution)
    yield "DSL runtime", str(toolchain.runtime_library() or "not found")
    yield "linker", ", ".join(toolchain.linkers()) or "none: cached kernels load 0.5 s slower"


def _cache_facts(root: Path | None) -> str:
    if root is None:
        return "off (CUTE_FLASH_CACHE_DIR)"
    if not root.exists():
        return f"{root} (not made yet)"
    found = diskcache.entries(root)
    damaged = sum(not entry.facts for entry in found)
    return f"{root}: {len(found)} kernels, {sum(e.size for e in found) / 1e6:.1f} MB, {damaged} damaged"


def doctor(arguments: argparse.Namespace) -> int:
    """Versions, GPU, cache, and who would serve bfloat16 at head_dim 128."""
    for name, value in _versions():
        print(f"{name:20} {value}")
    print(f"{'cache':20} {_cache_facts(settings.current.cache_dir)}")
    print(f"{'settings':20} {settings.current}")
    for device in _devices():
        print(f"{'device':20} {device}")
        options = request.Options(causal=True)
        walks = [_walk(_problem(device, "bfloat16", (128, 128), each, options)) for each in (FORWARD, BACKWARD)]
        for walk in dict.fromkeys(walks):  # a GPU too old for all is refused both ways in the same words
            print("\n".join(f"  {line}" for line in walk.splitlines()))
    return 0


# -------------------------------------------------------------------------------------------------------- explain


def _short(decision: dispatch.Decision, backend: str | None) -> list[str]:
    """What a forward over few keys runs, where it is another plan: a call is described without its lengths here."""
    if decision.problem.direction != FORWARD:
        return []
    plan = dispatch.choose(replace(decision.problem, short=True), backend).plan
    return [f"  up to {SHORT_KEYS} keys: {plan}"] if plan != decision.plan else []


def explain(arguments: argparse.Namespace) -> int:
    """The dispatcher's walk for a described call, on this machine's device or an imagined one."""
    device = device_facts.imagined(arguments.capability, "simulated") if arguments.capability else _devices()[0]
    options = request.spell(arguments.causal, arguments.window, arguments.softcap)
    said, failed = [], 0
    for direction in DIRECTIONS[arguments.direction]:
        problem = _problem(device, arguments.dtype, arguments.head_dim, direction, options)
        try:
            decision = dispatch.choose(problem, arguments.backend)
            said.append("\n".join([str(decision), *_short(decision, arguments.backend)]))
        except UnsupportedError as refusal:
            said.append(str(refusal))
            failed = 1
    print("\n".join(dict.fromkeys(said)))
    return failed


# --------------------------------------------------------------------------------------------------------- warmup


def _target(arch: str, sms: int | None) -> Device:
    """The GPU to compile for: a plan counts its SMs. This machine's where it is of that architecture."""
    capability = device_facts.ARCHES[arch]
    here = (device for device in _devices() if device.capability == capability)
    device = next(here, device_facts.imagined(capability, "simulated"))
    return replace(device, sm_count=sms or device.sm_count)


def _variants(arguments: argparse.Namespace) -> tuple[dict[Plan, Backend], list[str]]:
    """The plans to compile, and a sentence for each variant that has none to keep."""
    device = _target(arguments.arch, arguments.sms)
    plans: dict[Plan, Backend] = {}
    skipped = []
    masks, lses, directions = SWITCH[arguments.causal], SWITCH[arguments.lse], DIRECTIONS[arguments.direction]
    lengths = (False, True)  # beyond SHORT_KEYS and up to there; most plans are the same
    grid = itertools.product(arguments.dtype, arguments.head_dim, directions, masks, lses, lengths)
    for dtype, dims, direction, causal, lse, short in grid:
        options = request.spell(causal, arguments.window, arguments.softcap)
        problem = _problem(device, dtype, dims, direction, options, lse)
        if short and direction == BACKWARD:
            continue
        problem = replace(problem, short=short)
        try:
            decision = dispatch.choose(problem)
        except UnsupportedError as refusal:
            skipped.append(str(refusal))
            continue
        backend = decision.backend
        if not backend.exports:
            skipped.append(f"{problem}: {backend.name} compiles at the first call, nothing to keep ahead")
            continue
        for split in SWITCH[arguments.split]:
            found = (backend.split(decision.plan), backend.pack(decision.plan)) if split else (decision.plan,)
            plans.update((plan, backend) for plan in found if plan is not None)
    return plans, skipped


def _warm(task: tuple[str, Plan]) -> tuple[str, bool]:
    """One plan, in a worker. Errors come back as text: not every exception travels between processes."""
    name, plan = task
    backend = next(backend for backend in arch.BACKENDS if backend.name == name)
    try:
        return f"{plan}: {compiler.kernel_for(backend, plan).origin}", True
    except Exception as error:
        return f"{plan}: {type(error).__name__}: {error}", False


def warmup(arguments: argparse.Namespace) -> int:
    """Compile the listed variants into the disk cache; needs no GPU. Each serves every batch, length and head count."""
    if settings.current.cache_dir is None:
        print("CUTE_FLASH_CACHE_DIR turns the disk cache off: nowhere to keep compiled kernels", file=sys.stderr)
        return 2
    plans, skipped = _variants(arguments)
    for sentence in dict.fromkeys(skipped):
        print(f"skipped: {sentence}")
    tasks = [(backend.name, plan) for plan, backend in plans.items()]
    good = True
    if arguments.jobs > 1 and len(tasks) > 1:
        # fork: importing the compiler costs each worker 0.5 s under fork and 1.7 s under spawn
        with multiprocessing.get_context("fork").Pool(min(arguments.jobs, len(tasks))) as pool:
            for line, fine in pool.imap_unordered(_warm, tasks):
                print(line, flush=True)
                good &= fine
    else:
        for line, fine in map(_warm, tasks):
            print(line, flush=True)
            good &= fine
    return 0 if good else 1


# ---------------------------------------------------------------------------------------------------------- cache


def cache(arguments: argparse.Namespace) -> int:
    """List the compiled kernels on disk, or remove them."""
    root = settings.current.cache_dir
    print(_cache_facts(root))
    if root is None or not root.exists():
        return 0
    if arguments.action == "clear":
        print(f"removed {diskcache.clear(root)} kernels")
        return 0
    for entry in diskcache.entries(root):
        facts = entry.facts
        what = f"{facts['plan']}, compiled in {facts['seconds']:.2f} s" if facts else "damaged: will be rebuilt"
        print(f"  {entry.path.name}  {entry.size / 1e3:.0f} kB  {what}")
    return 0


def _add_bounds(command: argparse.ArgumentParser) -> None:
    command.add_argument("--window", type=_window, metavar="L,R", help="such as 1023,0 or 512,None; one kernel for all")
    command.add_argument("--softcap", type=_softcap, metavar="C", help="one kernel for all values above 0")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m cute_flash", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="doctor|explain|warmup|cache")

    commands.add_parser("doctor", help=doctor.__doc__).set_defaults(run=doctor)

    walk = commands.add_parser("explain", help=explain.__doc__)
    walk.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    walk.add_argument("--head-dim", type=_head_dims, default=(128, 128), metavar="D|D,DV")
    walk.add_argument("--causal", action="store_true")
    _add_bounds(walk)
    walk.add_argument("--direction", choices=DIRECTIONS, default="both")
    walk.add_argument("--backend", choices=dispatch.backend_names())
    walk.add_argument("--capability", type=_capability, metavar="9.0", help="of an imagined GPU; default: this machine")
    walk.set_defaults(run=explain)

    ahead = commands.add_parser("warmup", help=warmup.__doc__)
    ahead.add_argument("--arch", choices=tuple(device_facts.ARCHES), default="sm_90a")
    ahead.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    ahead.add_argument("--head-dim", nargs="+", type=_head_dims, default=[(64, 64), (128, 128)], metavar="D|D,DV")
    ahead.add_argument("--causal", choices=SWITCH, default="both", help="one query row of grouped heads runs as no")
    _add_bounds(ahead)
    ahead.add_argument("--split", choices=SWITCH, default="both", help="kernels for few query rows over many keys")
    ahead.add_argument("--lse", choices=SWITCH, default="both", help="kernels that write LSE: training and return_lse")
    ahead.add_argument("--direction", choices=DIRECTIONS, default="both")
    ahead.add_argument(
        "--sms", type=_count, metavar="N", help="SMs of the GPU; default: this machine's, else the usual part's"
    )
    ahead.add_argument("--jobs", type=_count, default=1, metavar="N", help="processes that compile side by side")
    ahead.set_defaults(run=warmup)

    shelf = commands.add_parser("cache", help=cache.__doc__)
    shelf.add_argument("action", choices=("list", "clear"), nargs="?", default="list")
    shelf.set_defaults(run=cache)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status
