"""Words that users bring from other libraries: what each is called here, or why it is refused."""

from typing import Any

from ..spec.errors import UnsupportedError

UNBUILT = frozenset({"sink", "alibi_slopes", "score_mod", "mask_mod", "block_mask"})
NOT_BUILT = "{name}= is not built yet: {function} serves causal=, window=, scale= and softcap=, and nothing else so far"

_DROPOUT = "{name}= is not supported: attention is exact and drops nothing, leave the argument out"
_MASK = (
    "{name}= is not supported: a mask is a rule (causal=True, window=), not a tensor of booleans or floats; of padded "
    "sequences, attention_varlen takes the lengths"
)
REFUSED = {
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "attn_mask": _MASK,
    "attn_bias": _MASK,
    "attention_mask": _MASK,
    "key_padding_mask": _MASK,
}
RENAMED = {
    "is_causal": "causal=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "window_size": "window=",
    "logits_soft_cap": "softcap=",
    "return_softmax_lse": "return_lse=",
    "return_attn_probs": "return_lse=",
    "enable_gqa": "nothing: grouped heads follow from the head counts of q and k",
    "cu_seqlens": "cu_seqlens_q= and cu_seqlens_k= of attention_varlen",
    "max_seqlen": "max_seqlen_q= and max_seqlen_k= of attention_varlen",
    "block_table": "page_table= of attention_kvcache",
    "block_tables": "page_table= of attention_kvcache",
    "cache_lens": "cache_seqlens= of attention_kvcache",
    "seqused_k": "cache_seqlens= of attention_kvcache",
    "k": "k_new=",
    "v": "v_new=",
}
# Of another function here: attention is asked for what only attention_varlen has.
OWNERS = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), "attention_varlen"),
    **dict.fromkeys(("cache_seqlens", "page_table", "cache_batch_idx", "k_new", "v_new"), "attention_kvcache"),
}


def refuse(unknown: dict[str, Any], function: str) -> None:
    """The sentence for the first of these keyword arguments that says something."""
    for name, value in unknown.items():
        if name in UNBUILT:
            continue  # None: check_options has looked
        if name in REFUSED:
            if value is None or (isinstance(value, (int, float)) and value == 0):
                continue  # what other libraries spell out and mean nothing by: dropout_p=0.0, attn_mask=None
            raise UnsupportedError(REFUSED[name].format(name=name))
        raise TypeError(f"{function}() has no argument {name}={_hint(name)}")


def _hint(name: str) -> str:
    if name in OWNERS:
        return f" ({OWNERS[name]} has it)"
    return f" (here: {RENAMED[name]})" if name in RENAMED else ""
