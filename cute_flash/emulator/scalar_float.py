"""Emitters of floating-point arithmetic and conversions, packed forms included."""

from __future__ import annotations

from .emit import CLASS_BITS, Emitter
from .errors import UnknownInstruction
from .ptx import Instr
from .scalar import emits, kind_of

_UFUNC = {"add": "add", "sub": "subtract", "mul": "multiply"}
_DIRECTED = ("rm", "rp", "rz")


def _directed(i: Instr) -> str | None:
    return next((p for p in i.parts[1:] if p in _DIRECTED), None)


def arithmetic(e: Emitter, i: Instr) -> None:
    """add, sub and mul of every floating type."""
    kind, name = kind_of(i), i.parts[0]
    if name in ("add", "sub") and i.parts[-2] == "f32" and kind in ("f16", "bf16"):
        raise UnknownInstruction(i.where())
    target = e.dst(i.args[0], kind)
    a, b = e.src(i.args[1], kind), e.src(i.args[2], kind)
    mode = _directed(i)
    if kind == "bf16x2":
        e.put(target, f"lanes.on_bf16x2({_UFUNC[name]}, {a}, {b})")
    elif kind == "bf16":
        e.put(target, f"lanes.bf16_bits({_UFUNC[name]}(lanes.from_bf16({a}), lanes.from_bf16({b})))", unsafe=True)
    elif mode and kind in ("f32", "f32x2"):
        e.put(target, f"lanes.rounded({mode!r}, {name!r}, {a}, {b})")
    elif "sat" in i.parts:
        e.put(target, f"np.clip({_UFUNC[name]}({a}, {b}), 0, 1)")
    else:
        e.ufunc(_UFUNC[name], target, a, b)


@emits("fma")
def fma(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    mode = _directed(i)
    if i.parts[-2] == "f32" and kind in ("bf16", "f16"):  # 16-bit multiplicands, f32 addend
        convert = "lanes.from_bf16({})" if kind == "bf16" else "{}.astype(f32)"
        a, b = (convert.format(e.src(x, kind)) for x in i.args[1:3])
        e.put(e.dst(i.args[0], "f32"), f"lanes.fma32({a}, {b}, {e.src(i.args[3], 'f32')})")
        return
    target = e.dst(i.args[0], kind)
    a, b, c = (e.src(x, kind) for x in i.args[1:])
    if kind in ("f32", "f32x2"):
        text = f"lanes.rounded({mode!r}, 'fma', {a}, {b}, {c})" if mode else f"lanes.fma32({a}, {b}, {c})"
        e.put(target, f"np.clip({text}, 0, 1)" if "sat" in i.parts else text)
    elif kind == "f64":
        e.put(target, f"{a} * {b} + {c}")
    elif kind in ("f16", "f16x2"):
        text = f"({a}.astype(f32) * {b} + {c}).astype(f16)"
        e.put(target, f"np.maximum({text}, 0)" if "relu" in i.parts else text)
    elif kind == "bf16x2":
        inner = "(lambda x, y, z: lanes.relu(x * y + z))" if "relu" in i.parts else "(lambda x, y, z: x * y + z)"
        e.put(target, f"lanes.on_bf16x2({inner}, {a}, {b}, {c})")
    elif kind == "bf16":
        rows = ", ".join(f"lanes.from_bf16({x})" for x in (a, b, c))
        e.put(target, f"lanes.bf16_bits(lanes.fma32({rows}))", unsafe=True)
    else:
        raise UnknownInstruction(i.where())


def divide(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    e.ufunc("true_divide", e.dst(i.args[0], kind), e.src(i.args[1], kind), e.src(i.args[2], kind))


def sign_change(e: Emitter, i: Instr) -> None:
    kind, negative = kind_of(i), i.parts[0] == "neg"
    if kind in ("f16x2", "bf16x2", "bf16"):
        bits = "u16" if kind == "bf16" else "u32"
        sign = 0x8000 if kind == "bf16" else 0x80008000
        a = e.src(i.args[1], bits)
        e.put(e.dst(i.args[0], bits), f"{a} ^ {bits}({sign})" if negative else f"{a} & ~{bits}({sign})")
        return
    e.ufunc("negative" if negative else "absolute", e.dst(i.args[0], kind), e.src(i.args[1], kind))


def float_extremum(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    propagate = "NaN" in i.parts
    names = {"min": ("fmin", "minimum"), "max": ("fmax", "maximum")}[i.parts[0]]
    name = names[propagate]
    target = e.dst(i.args[0], kind)
    sources = [e.src(x, kind) for x in i.args[1:]]
    if "xorsign" in i.parts:
        raise UnknownInstruction(i.where())
    if "abs" in i.parts:
        sources = [f"absolute({s})" for s in sources]
    if kind == "bf16x2":
        e.put(target, f"lanes.on_bf16x2({name}, {', '.join(sources)})")
        return
    if kind == "bf16":
        rows = ", ".join(f"lanes.from_bf16({s})" for s in sources)
        e.put(target, f"lanes.bf16_bits({name}({rows}))", unsafe=True)
        return
    if len(sources) == 3:
        sources = [f"{name}({sources[0]}, {sources[1]})", sources[2]]
    e.ufunc(name, target, *sources)


_UNARY = {
    "ex2": "lanes.ex2({})", "lg2": "lanes.lg2({})", "rcp": "np.float32(1) / {}", "sqrt": "np.sqrt({})",
    "rsqrt": "np.float32(1) / np.sqrt({})", "sin": "np.sin({})", "cos": "np.cos({})", "tanh": "np.tanh({})",
}  # fmt: skip


@emits(*_UNARY)
def unary(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    target, a = e.dst(i.args[0], kind), e.src(i.args[1], kind)
    text = _UNARY[i.parts[0]]
    if kind == "bf16x2":
        e.put(target, f"lanes.on_bf16x2(lambda x: {text.format('x')}, {a})")
    elif kind == "bf16":
        e.put(target, f"lanes.bf16_bits({text.format(f'lanes.from_bf16({a})')})", unsafe=True)
    elif kind in ("f16", "f16x2"):
        e.put(target, f"({text.format(f'{a}.astype(f32)')}).astype(f16)")
    else:
        e.put(target, f"lanes.flush({text.format(a)})" if i.parts[0] == "rcp" and "ftz" in i.parts else text.format(a))


@emits("copysign")
def copysign(e: Emitter, i: Instr) -> None:
    e.ufunc("copysign", e.dst(i.args[0], kind_of(i)), e.src(i.args[2], kind_of(i)), e.src(i.args[1], kind_of(i)))


@emits("testp")
def testp(e: Emitter, i: Instr) -> None:
    a = e.src(i.args[1], kind_of(i))
    text = {"finite": "np.isfinite({})", "infinite": "np.isinf({})", "number": "~isnan({})", "notanumber": "isnan({})"}[
        i.parts[1]
    ]
    e.put(e.dst(i.args[0], "pred"), text.format(a))


_ROUNDING = {"rn", "rna", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rs"}
_FP8 = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")


@emits("cvt")
def cvt(e: Emitter, i: Instr) -> None:
    to, source = i.parts[-2], i.parts[-1]
    mode = next((p for p in i.parts[1:] if p in _ROUNDING), None)
    if to in _FP8 or source in _FP8:
        _convert_fp8(e, i, to, source)
    elif to in ("bf16x2", "f16x2") and source == "f32":
        a, b = (_relu(i, e.src(x, "f32")) for x in i.args[1:3])
        if mode == "rz" and to == "bf16x2":
            text = f"(lanes.bf16_bits_zero({a}) << 16) | lanes.bf16_bits_zero({b})"
        else:
            text = f"lanes.{to}({a}, {b})"
        e.put(e.dst(i.args[0], "b32"), text)
    elif to == "tf32":
        e.put(e.dst(i.args[0], "b32"), f"lanes.tf32({e.src(i.args[1], 'f32')})")
    elif "f" in to and "f" in source:
        _float_to_float(e, i, to, source, mode)
    elif "f" in source:
        dtype = {"s": "np.int", "u": "np.uint"}[to[0]] + str(max(int(to[1:]), 8))
        a = _as_float(e, i.args[1], source)
        e.put(e.dst(i.args[0], to), f"lanes.float_to_int({a}, {mode!r}, {dtype})", unsafe=True)
    elif "f" in to:
        _int_to_float(e, i, to, source)
    else:
        _int_to_int(e, i, to, source)


def _relu(i: Instr, text: str) -> str:
    return f"lanes.relu({text})" if "relu" in i.parts else text


def _as_float(e: Emitter, arg, kind: str) -> str:
    row = e.src(arg, kind)
    return f"lanes.from_bf16({row})" if kind == "bf16" else row


def _float_to_float(e: Emitter, i: Instr, to: str, source: str, mode: str | None) -> None:
    a = _relu(i, _as_float(e, i.args[1], source))
    target = e.dst(i.args[0], "u16" if to == "bf16" else to)
    if to == source and mode in ("rni", "rzi", "rmi", "rpi"):
        name = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[mode]
        e.put(target, f"np.{name}({a})")
    elif to == "bf16":
        convert = "bf16_bits_zero" if mode == "rz" else "bf16_bits"
        e.put(target, f"lanes.{convert}({a}.astype(f32))", unsafe=True)
    elif to == "f32" and source == "f64" and mode in ("rm", "rp", "rz"):
        e.put(target, f"lanes.ROUND_F32[{mode!r}]({a})")
    elif "sat" in i.parts:
        e.put(target, f"np.clip({a}, 0, 1)", unsafe=True)
    else:
        e.put(target, a, unsafe=True)


def _int_to_float(e: Emitter, i: Instr, to: str, source: str) -> None:
    row = _narrow(e, i.args[1], source)
    if to == "bf16":
        e.put(e.dst(i.args[0], "u16"), f"lanes.bf16_bits({row}.astype(f32))", unsafe=True)
        return
    mode = next((p for p in i.parts if p in ("rm", "rp", "rz")), None)
    if mode and to == "f32":
        e.put(e.dst(i.args[0], "f32"), f"lanes.ROUND_F32[{mode!r}]({row}.astype(np.float64))")
        return
    e.put(e.dst(i.args[0], to), row, unsafe=True)


def _narrow(e: Emitter, arg, kind: str) -> str:
    """The low bits of a register, as the integer type an instruction reads."""
    row = e.src(arg, kind)
    bits = int(kind[1:])
    if getattr(arg, "cls", None) and CLASS_BITS[arg.cls] == bits:
        return row
    name = {"s": "np.int", "u": "np.uint", "b": "np.uint"}[kind[0]] + str(bits)
    return f"{row}.astype({name})"


def _int_to_int(e: Emitter, i: Instr, to: str, source: str) -> None:
    row = _narrow(e, i.args[1], source)
    bits = int(to[1:])
    name = {"s": "np.int", "u": "np.uint", "b": "np.uint"}[to[0]] + str(bits)
    if "sat" in i.parts:
        row = f"lanes.saturate_int({row}, {name})"
    elif bits < CLASS_BITS[i.args[0].cls]:
        row = f"{row}.astype({name})"
    e.put(e.dst(i.args[0], to), row, unsafe=True)


def _convert_fp8(e: Emitter, i: Instr, to: str, source: str) -> None:
    if to in _FP8 and source == "f32":
        a, b = (_relu(i, e.src(x, "f32")) for x in i.args[1:3])
        name = to[:-2]
        if name == "e2m1":
            text = f"(formats.encode_minifloat({a}, 'e2m1') << 4) | formats.encode_minifloat({b}, 'e2m1')"
        else:
            text = (
                f"(formats.encode_minifloat({a}, {name!r}).astype(u16) << 8) | formats.encode_minifloat({b}, {name!r})"
            )
        e.put(e.dst(i.args[0], "u16"), text, unsafe=True)
    elif to in _FP8 and source in ("f16x2", "bf16x2"):
        word = e.src(i.args[1], "u32")
        low, high = (f"({word} & 0xFFFF)", f"({word} >> 16)")
        to_float = "lanes.from_bf16({})" if source == "bf16x2" else "{}.astype(u16).view(f16).astype(f32)"
        name = to[:-2]
        text = (
            f"(formats.encode_minifloat({to_float.format(high)}, {name!r}).astype(u16) << 8)"
            f" | formats.encode_minifloat({to_float.format(low)}, {name!r})"
        )
        e.put(e.dst(i.args[0], "u16"), text, unsafe=True)
    elif source in ("e4m3x2", "e5m2x2") and to in ("f16x2", "bf16x2"):
        word, name = e.src(i.args[1], "u16"), source[:-2]
        table = f"formats.table({name!r})"
        e.put(e.dst(i.args[0], "b32"), f"lanes.{to}({table}[{word} >> 8], {table}[{word} & 255])")
    else:
        raise UnknownInstruction(i.where())
