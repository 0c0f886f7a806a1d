"""Hugging Face Transformers: `register()` once, then attn_implementation="cute_flash".

    cute_flash.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cute_flash")

Causal and bidirectional masks, sliding windows, softcaps, grouped heads, dynamic and static caches, packed sequences
(position_ids that start again, or cu_seq_lens). A padding mask becomes the run of real keys of each sequence, and no
dense mask is ever made: sequences with runs of their own are attended as packed ones, and padded query rows return 0.
What has no such form (holes, chunked sequences, dense masks, sinks, dropout) is refused with a sentence.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..api import attention
from ..spec.errors import UnsupportedError
from ..varlen import attention_varlen
from . import flash_attn, spans

NAME = "cute_flash"
_UNBUILT = {
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "block_table": "paged caches",
}

# What Transformers makes of position_ids that start again; while tracing it cannot ask them, and makes it of all.
PACKED = ("remap_positions_for_packed_sequence", "packed_sequence_mask_function")


# ----------------------------------------------------------------------------------------------------------- attention


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: query (batch, heads_q, seqlen_q, head_dim), key and value likewise.

    attention_mask: None, or what mask_spans returned. options: dropout, softcap, sliding_window, is_causal as models
    pass them. Returns (out (batch, seqlen_q, heads_q, head_dim_v), None). UnsupportedError for what ours cannot do.
    """
    _refuse_unbuilt(options)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    softcap = options.get("softcap")
    if options.get("cu_seq_lens_q") is not None:  # says more than the mask, which position_ids may have led to
        flat, lengths = (x.flatten(0, 1) for x in (q, k, v)), _lengths_of(options)
        out = attention_varlen(*flat, **lengths, window=_window_of(module, options), scale=scaling, softcap=softcap)
        return out.unflatten(0, q.shape[:2]), None
    if attention_mask is None:
        return attention(q, k, v, window=_window_of(module, options), scale=scaling, softcap=softcap), None
    attend = spans.attend_in_graph if torch.compiler.is_compiling() else spans.attend
    return attend(q, k, v, attention_mask, scaling, softcap), None


def _lengths_of(options: dict[str, Any]) -> dict[str, Any]:
    """attention_varlen's, in Transformers' words; the batch lies in one piece. Lengths may be int64 there."""
    starts_q = options["cu_seq_lens_q"].int()
    starts_k = starts_q if options.get("cu_seq_lens_k") is None else options["cu_seq_lens_k"].int()
    longest = {
        f"max_seqlen_{name}": options[f"max_length_{name}"]
        for name in "qk"
        if isinstance(options.get(f"max_length_{name}"), int)  # a hint, and to read a tensor waits for the GPU
    }
    return {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, **longest}


def _window_of(module: torch.nn.Module, options: dict[str, Any]) -> tuple[int | None, int | None]:
    """Where no mask came along: as the module says of itself."""
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    causal = causal and getattr(getattr(module, "config", None), "is_causal", True)
    window = options.get("sliding_window")
    if window is not None and not causal:
        raise UnsupportedError("a bidirectional sliding window came without the mask that says how wide it is")
    return (None if window is None else window - 1), (0 if causal else None)


def _refuse_unbuilt(options: dict[str, Any]) -> None:
    for name, words in _UNBUILT.items():
        if options.get(name) is not None:
            raise UnsupportedError(f"{words} are not built yet in attn_implementation={NAME!r}: {name} is given")
    if options.get("dropout"):
        raise UnsupportedError(
            f"attention dropout is not supported by attn_implementation={NAME!r} (dropout={options['dropout']}): set "
            "the configuration's attention dropout to 0, or model.eval()"
        )
    if options.get("output_attentions"):
        raise UnsupportedError(f"output_attentions: attn_implementation={NAME!r} never forms the weights")


# ---------------------------------------------------------------------------------------------------------------- mask


def mask_spans(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Transformers' mask interface: None where the module's own flags say all, else the spans of the sequences.

    Those travel as int32 (spans, 1, 1, 6) on the CPU, a Span each, -1 for unbounded. Four dimensions, because
    Transformers hands a mask of four on as it is. UnsupportedError for a mask that has no such form.
    """
    places = spans.Places(batch_size, q_length, kv_length, q_offset, kv_offset)
    if torch.compiler.is_compiling():
        return _in_graph(mask_function, attention_mask, places, options)
    mask_function, numbers = _unpacked(mask_function)
    bounds = _bounds_of(mask_function)
    if numbers is not None:
        return spans.of_packed(numbers, bounds)
    places = places._replace(q_offset=int(q_offset))
    if _told(bounds) and spans.is_whole(attention_mask, places, bounds):
        return None
    return spans.of_mask(attention_mask, places, bounds)


def _in_graph(
    mask_function: Callable[..., Any], mask: torch.Tensor | None, places: spans.Places, options: dict[str, Any]
) -> torch.Tensor | None:
    """mask_spans while a graph is traced, where values cannot be asked for."""
    bounds = _bounds_of(mask_function) if _is_plain(mask_function) else _bounds_in_graph(mask_function, places, options)
    known = mask is None and not isinstance(places.q_offset, torch.Tensor)
    if known and _told(bounds) and spans.is_whole(None, places, bounds):
        return None
    return spans.of_mask_in_graph(mask, places, bounds)


def _told(bounds: spans.Bounds) -> bool:
    """Does the module's own is_causal, with its sliding_window, say the same?"""
    return bounds[1] == 0 or bounds == (None, None)


def _is_plain(mask_function: Callable[..., Any]) -> bool:
    from transformers import masking_utils

    return mask_function is masking_utils.causal_mask_function or (
        mask_function is masking_utils.bidirectional_mask_function
    )


def _unpacked(mask_function: Callable[..., Any]) -> tuple[Callable[..., Any], torch.Tensor | None]:
    """(the mask of each sequence, of each token (batch, seqlen) the number of its sequence; None where all is one)."""
    if _is_plain(mask_function) or _maker(mask_function) != "and_masks":
        return mask_function, None
    parts = _closed_over(mask_function)["mask_functions"]
    if tuple(map(_maker, parts)) != PACKED:
        return mask_function, None
    numbers = _closed_over(parts[1])["packed_sequence_mask"]
    return _closed_over(parts[0])["mask_function"], numbers if bool(numbers.any()) else None


def _bounds_of(mask_function: Callable[..., Any]) -> tuple[int | None, int | None]:
    """(left, right) around the diagonal. Transformers composes masks as closures: what they close over is read."""
    from transformers import masking_utils

    if _is_plain(mask_function):
        return None, None if mask_function is masking_utils.bidirectional_mask_function else 0
    kind = _maker(mask_function)
    parts = [(_maker(part), part) for part in _closed_over(mask_function).get("mask_functions", ())]
    makers = [maker for maker, _ in parts]
    if (kind, *makers) == ("and_masks", "sliding_window_overlay", "causal_mask_function"):
        return _closed_over(parts[0][1])["sliding_window"] - 1, 0
    if (kind, *makers) == ("and_masks", "sliding_window_bidirectional_overlay", "bidirectional_mask_function"):
        width = _closed_over(parts[0][1])["sliding_window"]
        return width, width
    names = f"{kind}({', '.join(makers)})" if makers else kind
    raise UnsupportedError(
        f"attn_implementation={NAME!r} serves causal, bidirectional and sliding-window masks, and this one is {names}"
    )


def _bounds_in_graph(
    mask_function: Any, places: spans.Places, options: dict[str, Any]
) -> tuple[int | None, int | None]:
    """A compiler does not look into closures: take the mask for causal, and have the graph check the ends of each row.

    The first and the last key that a row should see must be seen, and their outer neighbours not.
    """
    batch_size, q_length, kv_length, q_offset, kv_offset = places
    if options.get("use_vmap"):
        raise UnsupportedError(f"attn_implementation={NAME!r} serves no mask with functions of its own")
    width, device = options.get("local_size"), options.get("device")
    batch, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)
    row = torch.arange(q_length, device=device)[None] + q_offset
    last = row
    first = torch.full_like(row, kv_offset) if width is None else (row - width + 1).clamp(min=kv_offset)
    end = kv_offset + kv_length - 1
    before, after = (first - 1).clamp(min=kv_offset), (last + 1).clamp(max=end)
    right = mask_function(batch, head, row, first) & mask_function(batch, head, row, last)
    right = right & ((before == first) | ~mask_function(batch, head, row, before))
    right = right & ((after == last) | ~mask_function(batch, head, row, after))
    torch._assert_async(
        right.all(), "attn_implementation='cute_flash': the mask is neither causal nor a sliding window"
    )
    return None if width is None else width - 1, 0


def _maker(function: Callable[..., Any]) -> str:
    """Of "sliding_window_overlay.<locals>.inner_mask" the first word."""
    name: str = getattr(function, "__qualname__", "") or repr(function)
    return name.split(".")[0]


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return (
        {} if code is None else {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    )


# ------------------------------------------------------------------------------------------------------------ register


def register() -> None:
    """Make attn_implementation="cute_flash" known to Transformers. Calling it again does nothing more.

    ImportError where Transformers is missing, or older than 5 (tried with 5.24.0).
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"register() needs Transformers 5 (tried with 5.24.0), found {transformers.__version__}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_spans)
    _answer_for_flash()


def _answer_for_flash() -> None:
    """Transformers takes every name with "flash" in it for a package of FlashAttention functions, and imports those."""
    from transformers import modeling_flash_attention_utils as flash

    theirs = getattr(flash, "_lazy_imports", None)
    if theirs is None or getattr(theirs, "answers_for", None) == NAME:
        return

    def lazy_imports(implementation: str | None, *args: Any, **options: Any) -> Any:
        if implementation != NAME:
            return theirs(implementation, *args, **options)
        ours = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
        return (*ours, flash._pad_input, flash._unpad_input)

    lazy_imports.answers_for = NAME  # type: ignore[attr-defined]
    flash._lazy_imports = lazy_imports
