"""torch.nn.functional.scaled_dot_product_attention over ours: for models that call that.

    with cute_flash.integrations.sdpa.patch():   # or patch() once, for good
        model(x)

Signature, layout (batch, heads, seqlen, head_dim) and results are SDPA's, causal masks of unequal lengths included
(they are aligned top-left there). What ours cannot do goes to torch's, with the reason said once.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..api import attention
from ..runtime import report, request, substitution
from ..spec import settings
from ..spec.errors import StrictFallbackError, UnsupportedError
from ..spec.problem import HEAD_DIM_MAX, HEAD_DIM_MIN

NAME = "scaled_dot_product_attention"
TORCH = F.scaled_dot_product_attention  # torch's own, whatever is patched later


@dataclass(frozen=True)
class Choice:
    """attention()'s options that SDPA has no word for."""

    backend: str | None = None
    deterministic: bool = False


substitution.while_tracing(report.once)
_open: list["Patch"] = []  # those in force, oldest first


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """SDPA, by ours where ours can and by torch's where not. Arguments and result are SDPA's.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).
        key, value: (batch, heads_kv, seqlen_k, head_dim), (batch, heads_kv, seqlen_k, head_dim_v). Other shapes, of
            query too, go to torch's.
        attn_mask: None, or a CausalBias of torch.nn.attention.bias; a mask of booleans or floats goes to torch's.
        dropout_p: above 0 goes to torch's.
        is_causal: row i sees keys j <= i, aligned top-left.
        scale, enable_gqa: as in SDPA. A scale that is a tensor, or outside 2**-100 to 2**16 and not 0, goes to torch's.
    """
    choice = _open[-1].choice if _open else Choice()
    bottom_right = isinstance(attn_mask, CausalBias) and attn_mask.variant == CausalVariant.LOWER_RIGHT
    reason = _reason(query, key, value, attn_mask, dropout_p, enable_gqa, choice.backend) or _misscaled(scale)
    if attn_mask is not None and is_causal:
        reason = "attn_mask and is_causal come together"
    if reason is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        top_left = is_causal or (attn_mask is not None and not bottom_right)
        try:
            return _ours(q, k, v, top_left, bottom_right, scale, choice).transpose(1, 2)
        except StrictFallbackError:
            raise
        except UnsupportedError as refusal:
            reason = str(refusal)
    report.once(f"scaled_dot_product_attention is torch's: {reason}")
    if isinstance(attn_mask, CausalBias):  # torch's own knows one only while it is not patched
        attn_mask = _plain_mask(attn_mask, query.device)
    return TORCH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _plain_mask(bias: CausalBias, device: torch.device) -> torch.Tensor:
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    diagonal = keys - rows if bias.variant == CausalVariant.LOWER_RIGHT else 0
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(diagonal)


def _ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, top_left: bool, causal: bool, scale: float | None, choice: Choice
) -> torch.Tensor:
    """Row i of a top-left mask sees keys j <= i; ours counts from the last key."""
    surplus = k.shape[1] - q.shape[1]
    window = None
    if top_left and surplus < 0:
        window = (None, -surplus)
    elif top_left:
        causal, k, v = True, k[:, : q.shape[1]], v[:, : q.shape[1]]  # nobody sees the keys behind
    out: torch.Tensor = attention(
        q, k, v, causal=causal, window=window, scale=scale, deterministic=choice.deterministic, backend=choice.backend
    )
    return out


def _reason(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, enable_gqa: bool, backend: str | None
) -> str | None:
    """Why torch's must do it, in a sentence that holds for every call alike: no sizes beyond head dims. None = ours."""
    tensors = (query, key, value)
    if dropout_p > 0:
        return "dropout_p is above 0"
    if isinstance(attn_mask, CausalBias):
        if attn_mask.variant == CausalVariant.LOWER_RIGHT and query.shape[-2] > key.shape[-2]:
            return "rows that see no key are torch's affair"
    elif attn_mask is not None:
        return "attn_mask is a tensor"
    named = backend or settings.current.backend or settings.current.emulate
    if query.device.type != "cuda" and not named:
        return f"on {query.device.type} ours is the plain reference, which is no faster"
    if any(x.dim() != 4 for x in tensors):
        return "query, key and value are not all 4-D"
    if any(request.has_no_memory(x) or x.is_nested for x in tensors):
        return "query, key or value is a tensor subclass or nested"
    if not all(x.dtype in request.DTYPES for x in tensors):
        return f"query is {request.dtype_name(query.dtype)}"
    return _misfit(query, key, value, enable_gqa)


def _misscaled(scale: Any) -> str | None:
    if isinstance(scale, torch.Tensor):
        return "scale is a tensor"
    if scale and not request.SCALE_MIN <= abs(scale) <= request.SCALE_MAX:
        return "scale is neither 0 nor from 2**-100 to 2**16"
    return None


def _misfit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str | None:
    """The rules of shapes."""
    if not all(HEAD_DIM_MIN <= x.shape[3] <= HEAD_DIM_MAX for x in (query, value)):
        return f"head_dim is outside {HEAD_DIM_MIN}..{HEAD_DIM_MAX}"
    if 0 in query.shape or 0 in key.shape:
        return "query or key is empty"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "batch sizes are broadcast"
    if key.shape[1:3] != value.shape[1:3] or query.shape[3] != key.shape[3]:
        return "key and value do not fit each other, or query and key do not"
    heads_q, heads_kv = query.shape[1], key.shape[1]
    if heads_q != heads_kv and not (enable_gqa and heads_q % heads_kv == 0):
        return "head counts differ, and enable_gqa does not explain how"
    return None


class Patch:
    """In force from patch() to remove(), or to the end of a `with` block. Several may overlap: the latest counts."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._enforce()

    def _enforce(self) -> None:
        _open.append(self)
        setattr(F, NAME, scaled_dot_product_attention)  # its stub has no keyword-only arguments

    def remove(self) -> None:
        """torch's own again, unless another patch is in force. A second time does nothing."""
        _open[:] = [other for other in _open if other is not self]
        if not _open:
            setattr(F, NAME, TORCH)

    def __enter__(self) -> "Patch":
        if all(other is not self for other in _open):  # after its end: once more
            self._enforce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def patch(*, backend: str | None = None, deterministic: bool = False) -> Patch:
    """Put ours in place of torch.nn.functional.scaled_dot_product_attention, at once; undo with remove() or `with`.

    Code that took the function out of its module before (`from torch.nn.functional import ...`) keeps torch's.
    backend and deterministic are attention()'s. ValueError for a backend that is none.
    """
    if backend is not None and backend not in settings.BACKEND_NAMES:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(settings.BACKEND_NAMES)}")
    return Patch(Choice(backend, deterministic))
