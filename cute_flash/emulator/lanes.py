"""Arithmetic on rows of 32 lanes that numpy has no single ufunc for. All functions return a new row."""

from __future__ import annotations

import numpy as np

F32_TINY = np.float32(1.17549435e-38)


def flush(row):
    """Results below the normal range become zero (.ftz)."""
    row[np.abs(row) < F32_TINY] = 0
    return row


def fma32(a, b, c):
    # The product of two float32 is exact in float64, so only one rounding is left but for double rounding of the sum.
    return (a.astype(np.float64) * b + c).astype(np.float32)


def to_f32_down(row64):
    near = row64.astype(np.float32)
    return np.where(near > row64, np.nextafter(near, np.float32(-np.inf)), near)


def to_f32_up(row64):
    near = row64.astype(np.float32)
    return np.where(near < row64, np.nextafter(near, np.float32(np.inf)), near)


def to_f32_zero(row64):
    near = row64.astype(np.float32)
    return np.where(np.abs(near) > np.abs(row64), np.nextafter(near, np.float32(0)), near)


ROUND_F32 = {"rm": to_f32_down, "rp": to_f32_up, "rz": to_f32_zero}


def rounded(mode, operation, a, b, c=None):
    """add / sub / mul / fma of float32 rows with a directed rounding mode."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if operation == "add":
        exact = wide_a + wide_b
    elif operation == "sub":
        exact = wide_a - wide_b
    elif operation == "mul":
        exact = wide_a * wide_b
    else:
        exact = wide_a * wide_b + c
    return ROUND_F32[mode](exact)


def ex2(row):
    return flush(np.exp2(row))


def lg2(row):
    return np.log2(np.where(np.abs(row) < F32_TINY, np.float32(0), row))


def bf16_bits(row):
    """float32 row -> bf16 bits, round to nearest even, as uint32."""
    bits = row.view(np.uint32)
    result = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if np.isnan(row).any():
        result[np.isnan(row)] = 0x7FFF
    return result


def bf16_bits_zero(row):
    bits = row.view(np.uint32)
    return np.where(np.isnan(row), np.uint32(0x7FFF), bits >> 16)


def bf16x2(high, low):
    return (bf16_bits(high) << 16) | bf16_bits(low)


def f16x2(high, low):
    h = high.astype(np.float16).view(np.uint16).astype(np.uint32)
    return (h << 16) | low.astype(np.float16).view(np.uint16)


def from_bf16(bits):
    """uint16 / uint32 row with bf16 in the low half -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def relu(row):
    return np.maximum(row, np.float32(0))


def bf16_pair(word):
    """Packed bf16x2 row -> (low, high) float32 rows."""
    return (word << 16).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)


def on_bf16x2(function, *words):
    lows, highs = zip(*(bf16_pair(w) for w in words), strict=False)
    return bf16x2(function(*highs), function(*lows))


def shift_left(value, amount):
    bits = value.dtype.itemsize * 8
    big = amount >= bits
    shifted = value << np.where(big, 0, amount).astype(value.dtype)
    return np.where(big, value.dtype.type(0), shifted)


def shift_right(value, amount):
    """Logical for unsigned rows, arithmetic for signed rows."""
    bits = value.dtype.itemsize * 8
    clamped = np.minimum(amount, bits - 1).astype(value.dtype)
    shifted = value >> clamped
    if value.dtype.kind == "u":
        return np.where(amount >= bits, value.dtype.type(0), shifted)
    return shifted


def funnel(low, high, amount, left, clamp):
    wide = (high.astype(np.uint64) << np.uint64(32)) | low
    amount = np.minimum(amount, 32) if clamp else amount & 31
    amount = amount.astype(np.uint64)
    if left:
        return ((wide << amount) >> np.uint64(32)).astype(np.uint32) if not clamp else _funnel_left_clamp(wide, amount)
    return (wide >> amount).astype(np.uint32)


def _funnel_left_clamp(wide, amount):
    return np.where(amount == 32, wide, (wide << amount) >> np.uint64(32)).astype(np.uint32)


def permute_bytes(a, b, selector):
    source = np.stack([a, b]).astype("<u4").view(np.uint8).reshape(2, -1, 4).transpose(1, 0, 2).reshape(-1, 8)
    out = np.zeros((len(a), 4), np.uint8)
    rows = np.arange(len(a))
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & 15
        byte = source[rows, nibble & 7]
        sign = np.where(byte & 0x80, np.uint8(255), np.uint8(0))
        out[:, i] = np.where(nibble & 8, sign, byte)
    return out.view(np.uint32).ravel()


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            term = (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
            out |= term
    return out


def bit_extract(value, position, length, signed):
    bits = value.dtype.itemsize * 8
    position, length = position & 0xFF, length & 0xFF
    wide = value.astype(np.int64 if signed else np.uint64) if bits == 32 else value
    top = np.minimum(position + length, bits).astype(np.int64)
    out = np.zeros(len(value), np.int64)
    for lane in range(len(value)):
        start, stop = int(position[lane]), int(top[lane])
        raw = int(wide[lane]) & ((1 << bits) - 1)
        if stop <= start:
            out[lane] = 0 if not (signed and length[lane] and raw >> (bits - 1)) else -1
            continue
        field = (raw >> start) & ((1 << (stop - start)) - 1)
        if signed and field >> (stop - start - 1):
            field -= 1 << (stop - start)
        out[lane] = field
    return out


def bit_insert(source, target, position, length):
    position = np.minimum(position & 0xFF, 32).astype(np.uint64)
    length = np.minimum(length & 0xFF, 32).astype(np.uint64)
    mask = ((np.uint64(1) << length) - np.uint64(1)) << position
    mixed = (target & ~mask) | ((source.astype(np.uint64) << position) & mask)
    return mixed.astype(np.uint32)


def popcount(row):
    return np.bitwise_count(row).astype(np.uint32)


def reverse_bits(row):
    out = np.zeros_like(row)
    for i in range(32):
        out |= ((row >> np.uint32(i)) & np.uint32(1)) << np.uint32(31 - i)
    return out


def bit_length(row):
    return np.frexp(row.astype(np.float64))[1].astype(np.uint32)


def leading_zeros(row):
    bits = row.dtype.itemsize * 8
    if bits == 32:
        return np.uint32(32) - bit_length(row)
    high, low = (row >> np.uint64(32)).astype(np.uint32), row.astype(np.uint32)
    return np.where(high != 0, 32 - bit_length(high), 64 - bit_length(low)).astype(np.uint32)


def find_leading(row, signed, shift_amount):
    value = np.where(row >> np.uint32(31), ~row, row) if signed else row
    length = bit_length(value)
    found = (np.uint32(32) - length) if shift_amount else (length - np.uint32(1))
    return np.where(length == 0, np.uint32(0xFFFFFFFF), found).astype(np.uint32)


def mul_high(a, b):
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)
    product = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=False)]
    return np.array([p & 0xFFFFFFFFFFFFFFFF for p in product], np.uint64).view(a.dtype)


def divide_int(a, b):
    safe = np.where(b == 0, 1, b)
    wide_a, wide_b = (a.astype(np.int64), safe.astype(np.int64)) if a.dtype.itemsize < 8 else (a, safe)
    quotient = np.abs(wide_a) // np.abs(wide_b) if a.dtype.kind == "i" else wide_a // wide_b
    if a.dtype.kind == "i":
        quotient = np.where((wide_a < 0) != (wide_b < 0), -quotient, quotient)
    return np.where(b == 0, -1, quotient).astype(a.dtype)


def remainder_int(a, b):
    quotient = divide_int(a, b)
    return np.where(b == 0, a, a - quotient * b).astype(a.dtype)


_INT_TYPES = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
_INT_LIMITS = {dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max) for dtype in _INT_TYPES}
_TO_INT = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def float_to_int(row, mode, dtype):
    low, high = _INT_LIMITS[dtype]
    wide = _TO_INT[mode](row.astype(np.float64))
    wide = np.where(np.isnan(wide), 0, wide)
    if np.dtype(dtype).itemsize < 8:
        return np.clip(wide, low, high).astype(np.int64).astype(dtype)
    out = np.clip(wide, float(low), float(high))
    return np.where(out >= float(high), high, np.minimum(out, float(high) * (1 - 2**-52)).astype(dtype)).astype(dtype)


def saturate_int(row, dtype):
    low, high = _INT_LIMITS[dtype]
    return np.clip(row.astype(np.int64), low, high).astype(dtype)


def tf32(row):
    """Round to nearest, ties away: 10 fraction bits."""
    bits = row.view(np.uint32)
    return np.where(np.isfinite(row), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
