"""attention_varlen as torch.library operators: what torch.compile, torch.export and FakeTensorMode see in its place.

    cute_flash::attention_varlen           (q, k, v, LENGTHS, lse, WORDS) -> (out, lse)
    cute_flash::attention_varlen_backward  (dout, dlse, q, k, v, out, lse, LENGTHS, WORDS) -> (dq, dk, dv)

As in ops.py; LENGTHS are packed.Lengths.
"""

from typing import Any

import torch

from . import flops, ops, packed, request
from .launch import Backward, Call
from .ops import Words
from .packed import Lengths
from .request import Options

LENGTHS = ("Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "SymInt? max_seqlen_q", "SymInt? max_seqlen_k")

_forwards: dict[tuple[Any, ...], Call] = {}
_backwards: dict[tuple[Any, ...], Backward] = {}


def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: Options
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """attention_varlen() as a graph holds it, for options that are checked; tensors are checked by the operator."""
    q, k, v = request.autocast(q, k, v)
    lse = options.return_lse or request.graph_needs_lse(q, k, v)
    q, words = ops.words_of(q, options)
    out, lse_out = torch.ops.cute_flash.attention_varlen(q, k, v, *lengths, lse, *words)
    return (out, lse_out) if options.return_lse else out


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> None:
    request.check_tensors(q, k, v, dims=3)
    packed.check_lengths(q, lengths)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Any:
    lengths, lse, words = Lengths(*given[:4]), given[4], Words(*given[5:])
    _checked(q, k, v, lengths)
    batch_of_one = packed.as_batch_of_one(q, k, v)
    of, numbers = ops.split(q, ops.dims_of(q, k, v), words)
    with torch.no_grad():  # gradients are the operator's affair
        out: torch.Tensor
        lse_out: torch.Tensor | None
        if request.is_empty(q, k):
            out, lse_out = packed.empty((q, k, v), lengths)
        else:
            key = (of, lengths.kind(q, k), lse)
            call = _forwards.get(key)
            if call is None:
                call = packed.prepare(batch_of_one, lengths.kind(q, k), words.options(lse))
                ops.remember(_forwards, key, call)
            out, lse_out = packed.run(call, (q, k, v), lengths, numbers)
    return out, ops.no_lse(q) if lse_out is None or not lse else lse_out


def _backward(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> Any:
    q, k, v, out, lse, *given = rest
    lengths, words = Lengths(*given[:4]), Words(*given[4:])
    _checked(q, k, v, lengths)
    batch_of_one = packed.as_batch_of_one(q, k, v)
    of, numbers = ops.split(q, ops.dims_of(q, k, v), words)
    if request.is_empty(q, k):
        return tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    with torch.no_grad():
        key = (of, lengths.kind(q, k), dlse is not None)
        backward = _backwards.get(key)
        if backward is None:
            backward = packed.prepare_backward(batch_of_one, lengths.kind(q, k), words.options(dlse is not None))
            ops.remember(_backwards, key, backward)
        dlse = dlse if dlse is None else dlse.contiguous().unsqueeze(0)
        saved = (*batch_of_one, out.unsqueeze(0), lse.unsqueeze(0))
        grads = backward(dout.unsqueeze(0), *saved, dlse, *lengths[:2], *numbers)
        return tuple(grad.squeeze(0) for grad in grads)


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Any:
    _checked(q, k, v, Lengths(*given[:4]))
    total_q, heads_q, _ = q.shape
    lse = given[4]
    out = q.new_empty(total_q, heads_q, v.shape[2])
    return out, q.new_empty(heads_q, total_q, dtype=request.lse_dtype(q.dtype)) if lse else ops.no_lse(q)


def _register() -> ops.Library:
    library = ops.Library("FRAGMENT")
    running = _forward, _fake_forward, _backward
    ops.define_attention(library, "attention_varlen", LENGTHS, ops.WORDS, running, flops.packed)
    return library


_library = _register()  # the operators live as long as it does
