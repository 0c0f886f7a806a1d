"""python -m cute_flash doctor | explain | warmup | cache | bench: what is installed, what would run, what it costs."""

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import api, bench, warmup, words
from .runtime import diskcache, dispatch, request, toolchain
from .spec import device as device_facts
from .spec import settings
from .spec.errors import UnsupportedError
from .spec.problem import BACKWARD, CACHE, DENSE, FORWARD, SHORT_KEYS, Problem

Walk = dispatch.Decision | str  # a decision, or the sentence that refused it


def _walk(problem: Problem, backend: str | None = None) -> Walk:
    try:
        return dispatch.choose(problem, backend)
    except UnsupportedError as refusal:
        return str(refusal)


def _once(walks: Sequence[Walk]) -> list[Walk]:
    """Refusals that read alike count once: a GPU too old for all is refused both ways in the same words."""
    return list({str(walk): walk for walk in walks}.values())


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
    if fault := diskcache.fault(root):
        return f"{fault}: each process compiles for itself"
    if not root.exists():
        return f"{root} (not made yet)"
    found = diskcache.entries(root)
    damaged = sum(not entry.facts for entry in found)
    return f"{root}: {len(found)} kernels, {sum(e.size for e in found) / 1e6:.1f} MB, {damaged} damaged"


def doctor(arguments: argparse.Namespace) -> int:
    """Versions, GPU, cache, and who would serve bfloat16 at head_dim 128: dense, packed and over a cache."""
    causal = request.Options(causal=True)
    kinds = [(form, way) for form, ways in words.FORMS.items() for way in ways]
    walks = {
        str(device): _once(
            [_walk(words.problem(device, "bfloat16", (128, 128), way, causal, form=form)) for form, way in kinds]
        )
        for device in words.devices()
    }
    cached = _cache_facts(settings.current.cache_dir)
    if arguments.json:
        words.show_json({
            "versions": dict(_versions()), "cache": cached,
            "settings": {name: _plain(value) for name, value in asdict(settings.current).items()},
            "devices": {name: [words.walk_facts(walk) for walk in found] for name, found in walks.items()},
        })  # fmt: skip
        return 0
    for name, value in (*_versions(), ("cache", cached), ("settings", _spelled(settings.current))):
        print(f"{name:20} {value}")
    for device, found in walks.items():
        print(f"{'device':20} {device}")
        for walk in found:
            print("\n".join(f"  {line}" for line in str(walk).splitlines()))
    return 0


def _spelled(current: settings.Settings) -> str:
    """Those that are not as they come, as variables; the cache has a line of its own."""
    usual = asdict(settings.Settings(cache_dir=current.cache_dir))
    changed = {name: value for name, value in asdict(current).items() if value != usual[name]}
    words = (
        f"CUTE_FLASH_{name.upper()}={','.join(sorted(value)) if name == 'log' else 1 if value is True else value}"
        for name, value in changed.items()
    )
    return " ".join(words) or "as they come"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value) if isinstance(value, Path) else value


# -------------------------------------------------------------------------------------------------------- explain


def _short(decision: dispatch.Decision, backend: str | None) -> list[str]:
    """What runs over few keys or rows, where it is another plan: a call is described without its lengths here."""
    if decision.problem.form != DENSE:
        return []
    problem = decision.problem
    rows = f"up to {problem.small_rows} query rows of all heads and sequences"
    few = {f"up to {SHORT_KEYS} keys": replace(problem, short=True), rows: replace(problem, small=True)}
    plans = {words: dispatch.choose(each, backend).plan for words, each in few.items()}
    return [f"  {words}: {plan}" for words, plan in plans.items() if plan != decision.plan]


def _of_a_kind(arguments: argparse.Namespace) -> list[tuple[Walk, list[str]]]:
    """Of --dtype and --head-dim, of whatever lengths."""
    imagined = arguments.arch and device_facts.imagined(arguments.arch, "simulated")
    device = imagined or words.devices()[0]
    options = request.spell(arguments.causal, arguments.window, arguments.softcap)
    found = []
    for direction in words.DIRECTIONS[arguments.direction]:
        if direction not in words.FORMS[arguments.form]:
            continue
        lse = arguments.return_lse
        problem = words.problem(device, arguments.dtype, arguments.head_dim, direction, options, lse, arguments.form)
        more = {"deterministic": arguments.deterministic, "lse_grad": lse and direction == BACKWARD}
        problem = replace(problem, **more)
        walk = _walk(problem, arguments.backend)
        found.append((walk, [] if isinstance(walk, str) else _short(walk, arguments.backend)))
    return found


def _of_shapes(arguments: argparse.Namespace) -> list[tuple[Walk, list[str]]]:
    """Of one call, as cute_flash.explain says it of meta tensors."""
    grad = arguments.direction != FORWARD
    q, k, v = words.tensors(words.shapes_of(arguments), arguments.dtype, "meta", grad)
    named = arguments.arch and ".".join(map(str, arguments.arch))
    try:
        decision = api.explain(
            q, k, v, arch=named, causal=arguments.causal, window=arguments.window, softcap=arguments.softcap,
            return_lse=arguments.return_lse, deterministic=arguments.deterministic, backend=arguments.backend,
        )  # fmt: skip
    except (UnsupportedError, ValueError) as refusal:
        return [(str(refusal), [])]
    if arguments.direction == BACKWARD and decision.backward is not None:
        return [(decision.backward, [])]
    return [(decision, [])]


def explain(arguments: argparse.Namespace) -> int:
    """The dispatcher's walk for a call or a kind of calls, on this machine's device or an imagined one."""
    if arguments.shapes and arguments.form != DENSE:
        raise SystemExit(
            f"--form {arguments.form} is of a kind of calls: leave the shapes out, --head-dim says the width"
        )
    if arguments.form == CACHE and arguments.direction == BACKWARD:
        raise SystemExit("--form cache has no backward")
    if arguments.form == CACHE and arguments.deterministic:
        raise SystemExit("--form cache has no backward: --deterministic says nothing there")
    found = _of_shapes(arguments) if arguments.shapes else _of_a_kind(arguments)
    if arguments.json:
        words.show_json([words.walk_facts(walk) for walk in _once([walk for walk, _ in found])])
    else:
        print("\n".join(dict.fromkeys("\n".join([str(walk), *more]) for walk, more in found)))
    return int(any(isinstance(walk, str) for walk, _ in found))


# ---------------------------------------------------------------------------------------------------------- cache


def cache(arguments: argparse.Namespace) -> int:
    """List the compiled kernels on disk, or remove them."""
    root = settings.current.cache_dir
    there = root is not None and root.exists()
    removed = diskcache.clear(root) if there and root and arguments.action == "clear" else None
    entries = diskcache.entries(root) if there and root and removed is None else []
    if arguments.json:
        listed = [{"file": entry.path.name, "bytes": entry.size, **entry.facts} for entry in entries]
        words.show_json({"folder": str(root) if root else None, "removed": removed, "kernels": listed})
        return 0
    if removed is not None:
        print(f"{root}: removed {removed} kernels")
        return 0
    print(_cache_facts(root))
    for entry in entries:
        facts = entry.facts
        what = f"{facts['plan']}, compiled in {facts['seconds']:.2f} s" if facts else "damaged: will be rebuilt"
        print(f"  {entry.path.name}  {entry.size / 1e3:.0f} kB  {what}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m cute_flash", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="doctor|explain|warmup|cache|bench")

    look = commands.add_parser("doctor", help=doctor.__doc__)
    look.add_argument("--json", action="store_true")
    look.set_defaults(run=doctor)

    walk = commands.add_parser("explain", help=explain.__doc__)
    words.add_shapes(walk)
    walk.add_argument("--dtype", type=words.dtype, choices=words.DTYPES, default="bfloat16")
    walk.add_argument(
        "--head-dim", type=words.head_dims, default=(128, 128), metavar="D|D,DV", help="where no shapes are given"
    )
    walk.add_argument("--causal", action="store_true")
    words.add_bounds(walk)
    walk.add_argument("--return-lse", action="store_true", help="LSE too; gradients may arrive through it")
    walk.add_argument("--deterministic", action="store_true", help="gradients repeat to the bit")
    walk.add_argument(
        "--form", choices=words.FORMS, default=DENSE, help="packed: attention_varlen, cache: attention_kvcache"
    )
    walk.add_argument("--direction", choices=words.DIRECTIONS, default="both")
    walk.add_argument("--backend", choices=dispatch.backend_names())
    walk.add_argument(
        "--arch", "--capability", type=words.capability, metavar="9.0",
        help="an imagined GPU by compute capability or compile target (sm_90a); default: this machine",
    )  # fmt: skip
    walk.add_argument("--json", action="store_true")
    walk.set_defaults(run=explain)

    warmup.add_options(commands.add_parser("warmup", help=warmup.warmup.__doc__))

    shelf = commands.add_parser("cache", help=cache.__doc__)
    shelf.add_argument("action", choices=("list", "clear"), nargs="?", default="list")
    shelf.add_argument("--json", action="store_true")
    shelf.set_defaults(run=cache)

    bench.add_options(commands.add_parser("bench", help=bench.bench.__doc__))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush raises again
        return 141  # 128 + SIGPIPE, as shells have it
    return status
