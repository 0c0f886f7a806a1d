"""The words of the command line: text to values, refused with the rule; and how results are printed."""

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .runtime import dispatch, request
from .spec import device as device_facts
from .spec.device import Device
from .spec.problem import BACKWARD, CACHE, DENSE, FORWARD, PACKED, Problem

DTYPES = tuple(request.dtype_name(dtype) for dtype in request.DTYPES)
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
SWITCH = {"no": (False,), "yes": (True,), "both": (False, True)}
DIRECTIONS = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, BACKWARD)}

FORMS = {DENSE: (FORWARD, BACKWARD), PACKED: (FORWARD, BACKWARD), CACHE: (FORWARD,)}  # which ways each goes

Value = TypeVar("Value")


def numbers(text: str, separator: str) -> tuple[int, ...]:
    """Empty where one of the parts is no whole number."""
    parts = text.split(separator)
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def dtype(text: str) -> str:
    """Of DTYPES, or short for one; anything else is left for argparse's choices to refuse."""
    return SHORT.get(text, text)


def head_dims(text: str) -> tuple[int, int]:
    """ "128" or "192,128" (head_dim, head_dim_v)."""
    found = numbers(text, ",")
    if len(found) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number (64) nor a pair head_dim,head_dim_v (192,128)")
    return found[0], found[-1]


def shape(text: str) -> tuple[int, ...]:
    """ "2,4096,16,128" (batch, seqlen, heads, head_dim)."""
    found = numbers(text, ",")
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape BATCH,SEQLEN,HEADS,HEAD_DIM (2,4096,16,128)")
    return found


def capability(text: str) -> tuple[int, int]:
    return _checked(device_facts.capability_of, text)


def count(text: str) -> int:
    found = numbers(text, ",")
    if len(found) != 1 or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return found[0]


def page_size(text: str) -> int:
    return 0 if text == "0" else count(text)


def window(text: str) -> tuple[int | None, int | None]:
    """ "1023,0" or "512,None" (left, right)."""
    try:
        left, right = (None if part.strip() == "None" else int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window LEFT,RIGHT (1023,0 or 512,None)") from None
    _checked(lambda bounds: request.spell(False, bounds, None), (left, right))
    return left, right


def softcap(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    _checked(lambda cap: request.spell(False, None, cap), value)
    return value


def _checked(rule: Callable[[Any], Value], value: Any) -> Value:
    try:
        return rule(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_bounds(command: argparse.ArgumentParser) -> None:
    command.add_argument("--window", type=window, metavar="L,R", help="such as 1023,0 or 512,None; one kernel for all")
    command.add_argument("--softcap", type=softcap, metavar="C", help="one kernel for all values above 0")


def add_shapes(command: argparse.ArgumentParser, required: bool = False) -> None:
    """Up to three: v's is k's, and k's is q's, where left out."""
    command.add_argument(
        "shapes", nargs="+" if required else "*", type=shape, metavar="BATCH,SEQLEN,HEADS,HEAD_DIM",
        help="of q, then of k, then of v; those left out are like the one before",
    )  # fmt: skip


def shapes_of(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """Of q, k and v. SystemExit for more than three."""
    given = list(arguments.shapes)
    if len(given) > 3:
        raise SystemExit(f"{len(given)} shapes are given: q's, k's and v's are three")
    return given + [given[-1]] * (3 - len(given))


def tensors(
    shapes: list[tuple[int, ...]], dtype: str, device: str, grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.empty if device == "meta" else torch.randn
    q, k, v = (make(each, dtype=getattr(torch, dtype), device=device).requires_grad_(grad) for each in shapes)
    return q, k, v


def problem(
    device: Device, dtype: str, dims: tuple[int, int], direction: str, options: request.Options, lse: bool = False,
    form: str = DENSE,
) -> Problem:  # fmt: skip
    """Of a kind of call, of no particular lengths: no plan depends on head counts, but of a backward of few query rows
    and keys on whether heads share keys."""
    return Problem(
        direction, device, dtype, dims[0], dims[1], heads_q=8, heads_kv=8, mask=options.mask,
        lse=lse or direction == BACKWARD, features=options.features, form=form,
    )  # fmt: skip


def devices() -> list[Device]:
    if not torch.cuda.is_available():
        return [device_facts.first()]
    return [device_facts.describe(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def walk_facts(decision: dispatch.Decision | str) -> dict[str, Any]:
    """A decision, or the sentence that refused it, as plain values."""
    return {"refused": decision} if isinstance(decision, str) else decision.facts()


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
