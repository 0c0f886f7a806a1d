"""python -m cute_flash warmup: compile a list of kernels into the disk cache, side by side. Needs no GPU."""

import argparse
import itertools
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cute_flash.arch as arch

from . import words
from .runtime import compiler, diskcache, dispatch, request
from .spec import device as device_facts
from .spec import settings
from .spec.backend import Backend
from .spec.device import Device
from .spec.errors import UnsupportedError
from .spec.plan import Plan
from .spec.problem import BACKWARD, CACHE, CACHE_FEW, DENSE, FEW, FORWARD, PACKED


class Kind(NamedTuple):
    """What a call is of, for a compiler: each serves every batch, length, head count and every value of a bound."""

    dtype: str
    dims: tuple[int, int]
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None


def _of_options(arguments: argparse.Namespace) -> Iterator[Kind]:
    grid = itertools.product(arguments.dtype, arguments.head_dim, words.SWITCH[arguments.causal])
    for dtype, dims, causal in grid:
        yield Kind(dtype, dims, causal, arguments.window, arguments.softcap)


def _read_model(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all of a config.json with Hugging Face's names, the part on text in it). SystemExit where there is none."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config {path}: {error}") from error
    return config, config.get("text_config") or config


def _group_of_model(path: Path) -> int:
    """Query heads to one of keys; 1 where it does not say."""
    _, config = _read_model(path)
    heads, heads_kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return max(1, heads // heads_kv) if heads and heads_kv else 1


def _of_model(path: Path, dtypes: list[str] | None) -> Iterator[Kind]:
    """What a model of this config.json calls. SystemExit where it does not say."""
    outer, config = _read_model(path)
    dims = _dims_of_model(path, config)
    written = config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype")
    softcap = config.get("attn_logit_softcapping")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    for dtype in dtypes or [written if written in words.DTYPES else "bfloat16"]:
        for causal in (False, True):  # one query row of grouped heads runs without a mask
            yield Kind(dtype, dims, causal, None, softcap)
        if window:
            yield Kind(dtype, dims, True, (window - 1, None), softcap)


def _dims_of_model(path: Path, config: dict[str, Any]) -> tuple[int, int]:
    try:
        if config.get("qk_nope_head_dim"):  # latent attention, as DeepSeek has it
            return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    except (KeyError, TypeError) as error:
        raise SystemExit(f"--config {path} has no {error}: head_dim, or hidden_size and num_attention_heads") from error
    return dim, dim


def _of_list(path: Path) -> Iterator[argparse.Namespace]:
    """The lines of a file: each holds options of this command. Comments start with #."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise SystemExit(f"--list {path}: {error}") from error
    own = argparse.ArgumentParser(prog=f"--list {path}")
    add_kinds(own)
    for line in lines:
        if found := shlex.split(line, comments=True):
            yield own.parse_args(found)


def _requests(arguments: argparse.Namespace) -> Iterator[tuple[Kind, argparse.Namespace]]:
    """Every kind with the options that say which of its kernels."""
    if arguments.config:
        # The command line's dtype has a default, which a configuration that says its own overrules.
        named = arguments.dtype if arguments.dtype != DEFAULT_DTYPE else None
        rows = arguments.rows or [_group_of_model(arguments.config)]
        which = argparse.Namespace(**{**vars(arguments), "rows": rows})
        yield from ((kind, which) for kind in _of_model(arguments.config, named))
    if arguments.list:
        yield from ((kind, line) for line in _of_list(arguments.list) for kind in _of_options(line))
    if not arguments.config and not arguments.list:
        yield from ((kind, arguments) for kind in _of_options(arguments))


def _target(capability: tuple[int, int] | None, sms: int | None) -> Device:
    """The GPU to compile for: a plan counts its SMs. This machine's where it is of that architecture, or none is named;
    without a GPU a Hopper."""
    here = words.devices()
    wanted = capability or here[0].capability or (9, 0)
    same = (device for device in here if device.capability == wanted)
    device = next(same, device_facts.imagined(wanted, "simulated"))
    return replace(device, sm_count=sms or device.sm_count)


def _of_form(which: argparse.Namespace, direction: str) -> Iterator[dict[str, Any]]:
    """Fields of a Problem that tell kernels of one kind apart. Lengths are beyond SHORT_KEYS or not, rows beyond
    SMALL_ROWS; most plans are the same, and the backward of packed sequences does not ask."""
    asks = which.form == DENSE or direction == FORWARD
    if which.form != CACHE:
        yield from ({"short": short} for short in ((False, True) if asks else (False,)))
    if which.form == DENSE:
        yield from ({"short": short, "small": True} for short in (False, True))
    if which.form == DENSE and direction == BACKWARD:
        yield {"short": True, "small": True, "heads_q": 16}  # heads that share keys, see words.problem
    if which.form == PACKED:
        yield from ({"short": asks, "few_rows": few, "few_keys": few} for few in (FEW[0], FEW[-1]))
    if which.form == CACHE:
        switches = words.SWITCH[which.append], words.SWITCH[which.chosen]
        for page_size, rows, appends, chosen in itertools.product(which.page_size, which.rows or [1], *switches):
            few_rows = next((few for few in CACHE_FEW if rows <= few), 0)
            if not (chosen and page_size):
                yield {"page_size": page_size, "few_rows": few_rows, "appends": appends, "chosen": chosen}


def variants(arguments: argparse.Namespace) -> tuple[dict[Plan, Backend], list[str]]:
    """The plans to compile, and a sentence for each variant that has none to keep."""
    device = _target(arguments.arch, arguments.sms)
    plans: dict[Plan, Backend] = {}
    skipped = []
    for kind, which in _requests(arguments):
        options = request.spell(kind.causal, kind.window, kind.softcap)
        directions = [way for way in words.DIRECTIONS[which.direction] if way in words.FORMS[which.form]]
        grid = ((way, fields) for way in directions for fields in _of_form(which, way))
        for (direction, fields), lse in itertools.product(grid, words.SWITCH[which.lse]):
            problem = words.problem(device, kind.dtype, kind.dims, direction, options, lse, which.form)
            problem = replace(problem, **fields)
            try:
                decision = dispatch.choose(problem)
            except UnsupportedError as refusal:
                skipped.append(str(refusal))
                continue
            backend = decision.backend
            if not backend.exports:
                skipped.append(f"{problem}: {backend.name} compiles at the first call, nothing to keep ahead")
                continue
            for split in words.SWITCH[which.split]:
                shared = None if problem.short else backend.split(decision.plan)  # nobody splits so few keys
                found = (shared, backend.pack(decision.plan)) if split else (decision.plan,)
                plans.update({plan: backend for plan in found if plan is not None})
    return plans, list(dict.fromkeys(skipped))


def _warm(task: tuple[str, Plan]) -> tuple[str, str, bool]:
    """One plan, in a worker. Errors come back as text: not every exception travels between processes."""
    name, plan = task
    backend = next(backend for backend in arch.BACKENDS if backend.name == name)
    try:
        return str(plan), compiler.kernel_for(backend, plan).origin, True
    except Exception as error:
        return str(plan), f"{type(error).__name__}: {error}", False


def _all_warm(tasks: list[tuple[str, Plan]], jobs: int) -> Iterator[tuple[str, str, bool]]:
    if jobs == 1 or len(tasks) < 2:
        yield from map(_warm, tasks)
        return
    # fork: importing the compiler costs each worker 0.5 s under fork and 1.7 s under spawn
    with multiprocessing.get_context("fork").Pool(min(jobs, len(tasks))) as pool:
        yield from pool.imap_unordered(_warm, tasks)


def _nowhere_to_keep() -> str:
    """Why, or nothing where there is a place."""
    if settings.current.cache_dir is None:
        return "CUTE_FLASH_CACHE_DIR turns the disk cache off"
    if settings.current.emulate is not None:
        return f"CUTE_FLASH_EMULATE={settings.current.emulate} is set, and emulated kernels are not kept"
    return diskcache.fault(settings.current.cache_dir, make=True)


def warmup(arguments: argparse.Namespace) -> int:
    """Compile the listed variants into the disk cache; needs no GPU. Each serves every batch, length and head count."""
    if fault := _nowhere_to_keep():
        print(f"{fault}: nowhere to keep compiled kernels", file=sys.stderr)
        return 2
    plans, skipped = variants(arguments)
    progress = sys.stderr if arguments.json else sys.stdout
    for sentence in skipped:
        print(f"skipped: {sentence}", file=progress)
    tasks = [(backend.name, plan) for plan, backend in plans.items()]
    print(f"{len(tasks)} kernels for {_target(arguments.arch, arguments.sms)}", file=progress, flush=True)
    results = []
    for number, (plan, origin, good) in enumerate(_all_warm(tasks, arguments.jobs), 1):
        print(f"[{number}/{len(tasks)}] {plan}: {origin}", file=progress, flush=True)
        results.append({"plan": plan, "result": origin, "good": good})
    if arguments.json:
        words.show_json({"kernels": results, "skipped": skipped})
    return 0 if all(result["good"] for result in results) else 1


DEFAULT_DTYPE = ["bfloat16"]


def add_kinds(command: argparse.ArgumentParser) -> None:
    """The options that a line of a list may hold, too."""
    command.add_argument("--dtype", nargs="+", type=words.dtype, choices=words.DTYPES, default=DEFAULT_DTYPE)
    command.add_argument(
        "--head-dim", nargs="+", type=words.head_dims, default=[(64, 64), (128, 128)], metavar="D|D,DV"
    )
    command.add_argument("--causal", choices=words.SWITCH, default="both", help="one row of grouped heads runs as no")
    words.add_bounds(command)
    command.add_argument("--split", choices=words.SWITCH, default="both", help="for few query rows over many keys")
    command.add_argument("--lse", choices=words.SWITCH, default="both", help="write LSE: training and return_lse")
    command.add_argument("--direction", choices=words.DIRECTIONS, default="both")
    command.add_argument(
        "--form", choices=words.FORMS, default=DENSE, help="packed: attention_varlen, cache: attention_kvcache"
    )
    command.add_argument(
        "--page-size", nargs="+", type=words.page_size, default=[0], metavar="N", help="of a cache; 0: not paged"
    )
    command.add_argument(
        "--rows", nargs="+", type=words.count, metavar="N",
        help="over a cache: query rows times heads of a group (8 of 32/4 heads, 32 with three more tokens speculated); "
        "default: one query row of the --config's heads, else 1",
    )  # fmt: skip
    command.add_argument("--append", choices=words.SWITCH, default="both", help="k_new and v_new beside a cache")
    command.add_argument("--chosen", choices=words.SWITCH, default="no", help="cache_batch_idx, if it is not paged")


def add_options(command: argparse.ArgumentParser) -> None:
    add_kinds(command)
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="a model's config.json says dtype, head dims, masks"
    )
    command.add_argument("--list", type=Path, metavar="FILE", help="a line of these options for each set of kernels")
    command.add_argument(
        "--arch",
        type=words.capability,
        metavar="9.0",
        help="the GPU to compile for, or sm_90a; default: this machine's first, else 9.0",
    )
    command.add_argument(
        "--sms", type=words.count, metavar="N", help="SMs of the GPU; default: this machine's, else the usual part's"
    )
    jobs = max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    command.add_argument(
        "--jobs", type=words.count, default=jobs, metavar="N", help=f"compile side by side; here {jobs} by default"
    )
    command.add_argument("--json", action="store_true", help="the results as JSON, progress on stderr")
    command.set_defaults(run=warmup)
