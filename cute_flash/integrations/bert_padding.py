"""flash_attn.bert_padding's functions: padded batches to packed sequences and back, for attention_varlen.

    from cute_flash.integrations.bert_padding import index_first_axis, pad_input, unpad_input

Plain torch operations, differentiable. unpad_input waits for the GPU once, as any count of real tokens must; do it once
a batch, not once a layer.
"""

import torch

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens that a mask keeps, one sequence after another. Masks may have holes: tokens close up.

    Args:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask: (batch, seqlen), bool or numbers: 0 is padding.
        unused_mask: likewise: tokens that are kept as well, but not counted as used.

    Returns:
        hidden (total, ...); indices (total,) int64, where each token was in (batch * seqlen); cu_seqlens (batch + 1,)
        int32 and the longest sequence, as attention_varlen takes them; used (batch,) int32, of attention_mask alone.

    Raises:
        ValueError: a mask that is not (batch, seqlen) of hidden_states.
    """
    used = _as_mask("attention_mask", attention_mask, hidden_states)
    kept = used if unused_mask is None else used | _as_mask("unused_mask", unused_mask, hidden_states)
    lengths = kept.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
    indices = kept.flatten().nonzero()[:, 0]
    longest = int(lengths.max()) if len(lengths) else 0
    hidden = index_first_axis(hidden_states.flatten(0, 1), indices)
    return hidden, indices, cu_seqlens, longest, used.sum(dim=1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(total, ...) back to (batch, seqlen, ...), zeros at padding; indices are those of unpad_input."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of (rows, ...) at indices (total,) int64: for k and v of a batch whose q went through unpad_input."""
    return input.index_select(0, indices)


def _as_mask(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        wanted = tuple(hidden_states.shape[:2])
        raise ValueError(f"{name} must be (batch, seqlen) of hidden_states, {wanted}, got {tuple(mask.shape)}")
    return mask != 0
