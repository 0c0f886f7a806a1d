"""Element formats of matrix operands: raw bytes to float32 and back."""

from __future__ import annotations

import functools

import numpy as np


def _minifloat_table(exponent: int, mantissa: int, bias: int, kind: str) -> np.ndarray:
    """Every code of an 8-bit-or-smaller float; kind: 'fn' (e4m3: only NaN at the top), 'ieee', 'finite'."""
    bits = 1 + exponent + mantissa
    out = np.zeros(1 << bits, np.float32)
    for code in range(1 << bits):
        sign = -1.0 if code >> (bits - 1) else 1.0
        e = (code >> mantissa) & ((1 << exponent) - 1)
        m = code & ((1 << mantissa) - 1)
        top = e == (1 << exponent) - 1
        if kind == "ieee" and top:
            value = float("inf") if m == 0 else float("nan")
        elif kind == "fn" and top and m == (1 << mantissa) - 1:
            value = float("nan")
        elif e == 0:
            value = m * 2.0 ** (1 - bias - mantissa)
        else:
            value = (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
        out[code] = sign * value
    return out


@functools.lru_cache(None)
def table(name: str) -> np.ndarray:
    spec = {
        "e4m3": (4, 3, 7, "fn"),
        "e5m2": (5, 2, 15, "ieee"),
        "e2m3": (2, 3, 1, "finite"),
        "e3m2": (3, 2, 3, "finite"),
        "e2m1": (2, 1, 1, "finite"),
    }[name]
    return _minifloat_table(*spec)


BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "e2m3": 1, "e3m2": 1, "e2m1": 1, "s8": 1, "u8": 1}


def decode(raw: np.ndarray, name: str) -> np.ndarray:
    """Bytes (..., k * size) -> float32 (..., k)."""
    raw = np.ascontiguousarray(raw)
    if name == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    if name == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if name == "s8":
        return raw.view(np.int8).astype(np.float32)
    if name == "u8":
        return raw.astype(np.float32)
    codes = raw if name in ("e4m3", "e5m2") else raw & (len(table(name)) - 1)
    return table(name)[codes]


def encode_minifloat(row: np.ndarray, name: str) -> np.ndarray:
    """float32 -> codes, round to nearest even, saturating to the largest finite value (.satfinite)."""
    values = table(name)
    half = len(values) // 2
    finite = np.flatnonzero(np.isfinite(values[:half]))
    grid = values[finite].astype(np.float64)
    magnitude = np.abs(row.astype(np.float64))
    index = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below, above = grid[index - 1], grid[index]
    nearer_up = (magnitude - below > above - magnitude) | ((magnitude - below == above - magnitude) & (index % 2 == 0))
    code = np.where(nearer_up, index, index - 1)
    code = np.where(magnitude >= grid[-1], len(grid) - 1, code)
    nan_code = int(np.flatnonzero(np.isnan(values))[-1] & (half - 1)) if np.isnan(values).any() else len(grid) - 1
    code = np.where(np.isnan(row), nan_code, code)
    sign = np.where(np.isnan(row), False, np.signbit(row))
    return (code + np.where(sign, half, 0)).astype(np.uint8)
