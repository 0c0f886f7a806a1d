"""Emitters of the register-only ISA: moves, integer, compare, logic. Floating point is in scalar_float.py."""

from __future__ import annotations

from .emit import CLASS_BITS, VIEWS, Emitter, type_bits
from .errors import UnknownInstruction
from .ptx import Imm, Instr, Pair, Special, Sym, Vec

EMITTERS: dict = {}


def emits(*names):
    def register(function):
        for name in names:
            EMITTERS[name] = function
        return function

    return register


def lookup(instr: Instr):
    """The emitter of an instruction, or None when it has effects beyond registers."""
    return EMITTERS.get(instr.parts[0])


def kind_of(instr: Instr) -> str:
    return instr.parts[-1]


@emits("mov")
def mov(e: Emitter, i: Instr) -> None:
    kind, (target, source) = kind_of(i), i.args
    if isinstance(source, Vec) and isinstance(target, Vec):
        raise UnknownInstruction(i.where())
    if isinstance(source, Vec):
        _pack(e, target, source.items, kind)
    elif isinstance(target, Vec):
        _unpack(e, target.items, source, kind)
    elif kind == "pred":
        e.put(e.dst(target, "pred"), e.src(source, "pred"))
    elif kind == "b128":
        e.put(e.dst(target, "b128"), e.src(source, "b128"))
    else:
        width = CLASS_BITS[target.cls]
        e.put(e.dst(target, f"u{width}"), e.src(source, f"u{width}"), unsafe=isinstance(source, (Special, Sym)))


def _pack(e: Emitter, target, items, kind: str) -> None:
    total = CLASS_BITS[target.cls]
    part = total // len(items)
    if total == 64 and part == 32:
        low, high = (e.src(item, "u32") for item in items)
        if e.mask is None:  # distinct classes, so the halves cannot alias the target
            name = f"{e.view('W')}[{target.index}]"
            e.line(f"{name}[0::2] = {low}")
            e.line(f"{name}[1::2] = {high}")
        else:
            e.put(e.dst(target, "u64"), f"pack32({low}, {high})")
    elif total == 128:
        name = f"{e.view('Q')}[{target.index}]"
        low, high = (e.src(item, "u64") for item in items)
        e.put(name, f"pack64({low}, {high})")
    elif part >= 16:
        text = " | ".join(
            f"({e.src(item, f'u{part}')}.astype(u{total}) << u{total}({part * n}))" for n, item in enumerate(items)
        )
        e.put(e.dst(target, f"u{total}"), text)
    else:
        text = " | ".join(
            f"(({e.src(item, 'u16')} & 255).astype(u{total}) << u{total}({part * n}))" for n, item in enumerate(items)
        )
        e.put(e.dst(target, f"u{total}"), text)


def _unpack(e: Emitter, items, source, kind: str) -> None:
    total = CLASS_BITS[source.cls] if hasattr(source, "cls") else type_bits(kind)
    part = total // len(items)
    if total == 128:
        name = f"{e.view('Q')}[{source.index}]"
        for n, item in enumerate(items):
            if target := e.dst(item, "u64"):
                e.put(target, f"{name}[{n}::2]")
        return
    if total == 64 and part == 32 and not isinstance(source, (Imm, Sym)):
        name = f"{e.view('W')}[{source.index}]"
        for n, item in enumerate(items):
            if target := e.dst(item, "u32"):
                e.put(target, f"{name}[{n}::2]")
        return
    row = e.temp()
    e.line(f"{row} = {e.src(source, f'u{total}')}")
    for n, item in enumerate(items):
        target = e.dst(item, f"u{max(part, 16)}")
        if target:
            mask = f" & u{total}({(1 << part) - 1})"
            e.put(target, f"(({row} >> u{total}({part * n})){mask}).astype(u{max(part, 16)})")


@emits("add", "sub")
def add(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if "f" in kind:
        from .scalar_float import arithmetic

        arithmetic(e, i)
        return
    if "cc" in i.parts or i.parts[0] != i.op.split(".")[0]:
        raise UnknownInstruction(i.where())
    if "sat" in i.parts:
        wide = f"({e.src(i.args[1], kind)}.astype(i64) {'+' if i.parts[0] == 'add' else '-'} {e.src(i.args[2], kind)})"
        e.put(e.dst(i.args[0], kind), f"np.clip({wide}, -2147483648, 2147483647)", unsafe=True)
        return
    e.ufunc(
        {"add": "add", "sub": "subtract"}[i.parts[0]],
        e.dst(i.args[0], kind),
        e.src(i.args[1], kind),
        e.src(i.args[2], kind),
    )


def _is_float(kind: str) -> bool:
    return "f" in kind


@emits("mul", "mul24")
def mul(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if _is_float(kind):
        from .scalar_float import arithmetic

        arithmetic(e, i)
        return
    a, b = e.src(i.args[1], kind), e.src(i.args[2], kind)
    if "wide" in i.parts:
        double = f"{kind[0]}{2 * type_bits(kind)}"
        target = e.dst(i.args[0], double)
        e.put(target, f"multiply({a}, {b}, dtype={_dtype(double)})")
    elif "hi" in i.parts:
        e.put(e.dst(i.args[0], kind), f"lanes.mul_high({a}, {b})")
    else:
        e.ufunc("multiply", e.dst(i.args[0], kind), a, b)


def _dtype(kind: str) -> str:
    return ("i" if kind[0] == "s" else "u") + str(type_bits(kind))


@emits("mad")
def mad(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if _is_float(kind):
        from .scalar_float import fma

        fma(e, i)
        return
    a, b = e.src(i.args[1], kind), e.src(i.args[2], kind)
    if "wide" in i.parts:
        double = f"{kind[0]}{2 * type_bits(kind)}"
        e.put(e.dst(i.args[0], double), f"multiply({a}, {b}, dtype={_dtype(double)}) + {e.src(i.args[3], double)}")
    elif "hi" in i.parts:
        e.put(e.dst(i.args[0], kind), f"lanes.mul_high({a}, {b}) + {e.src(i.args[3], kind)}")
    else:
        e.ufunc("add", e.dst(i.args[0], kind), f"{a} * {b}", e.src(i.args[3], kind))


@emits("div", "rem")
def div(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if _is_float(kind):
        from .scalar_float import divide

        divide(e, i)
        return
    name = {"div": "divide_int", "rem": "remainder_int"}[i.parts[0]]
    e.put(e.dst(i.args[0], kind), f"lanes.{name}({e.src(i.args[1], kind)}, {e.src(i.args[2], kind)})")


@emits("and", "or", "xor")
def logic(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    names = (
        {"and": "logical_and", "or": "logical_or", "xor": "logical_xor"}
        if kind == "pred"
        else {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
    )
    e.ufunc(names[i.parts[0]], e.dst(i.args[0], kind), e.src(i.args[1], kind), e.src(i.args[2], kind))


@emits("not")
def invert(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    e.ufunc("logical_not" if kind == "pred" else "invert", e.dst(i.args[0], kind), e.src(i.args[1], kind))


@emits("cnot")
def cnot(e: Emitter, i: Instr) -> None:
    e.put(e.dst(i.args[0], kind_of(i)), f"{e.src(i.args[1], kind_of(i))} == 0", unsafe=True)


@emits("neg", "abs")
def negate(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if _is_float(kind):
        from .scalar_float import sign_change

        sign_change(e, i)
        return
    e.ufunc({"neg": "negative", "abs": "absolute"}[i.parts[0]], e.dst(i.args[0], kind), e.src(i.args[1], kind))


@emits("min", "max")
def extremum(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if _is_float(kind):
        from .scalar_float import float_extremum

        float_extremum(e, i)
        return
    relu = "relu" in i.parts  # .relu (s32): a negative result becomes 0
    if "x2" in kind or (relu and kind != "s32"):
        raise UnknownInstruction(i.where())
    target = e.dst(i.args[0], kind)
    e.ufunc({"min": "minimum", "max": "maximum"}[i.parts[0]], target, e.src(i.args[1], kind), e.src(i.args[2], kind))
    if relu:
        e.ufunc("maximum", target, target, e.constant(VIEWS[kind], 0))


@emits("shl", "shr")
def shift(e: Emitter, i: Instr) -> None:
    kind, left = kind_of(i), i.parts[0] == "shl"
    bits = type_bits(kind)
    target, value, amount = e.dst(i.args[0], kind), e.src(i.args[1], kind), i.args[2]
    if isinstance(amount, Imm):
        count = amount.value & 0xFFFFFFFF
        if count >= bits and not (kind[0] == "s" and not left):
            e.put(target, "0")
            return
        row = e.constant(
            {"H": "H", "I": "I", "R": "R", "S": "S", "D": "D", "L": "L"}[_letter(kind)], min(count, bits - 1)
        )
        e.ufunc("left_shift" if left else "right_shift", target, value, row)
        return
    e.put(target, f"lanes.shift_{'left' if left else 'right'}({value}, {e.src(amount, 'u32')})")


def _letter(kind: str) -> str:
    from .emit import VIEWS

    return VIEWS[kind]


@emits("shf")
def funnel(e: Emitter, i: Instr) -> None:
    low, high, amount = (e.src(a, "u32") for a in i.args[1:])
    e.put(e.dst(i.args[0], "u32"), f"lanes.funnel({low}, {high}, {amount}, {'l' in i.parts}, {'clamp' in i.parts})")


@emits("prmt")
def permute(e: Emitter, i: Instr) -> None:
    if i.parts[-1] != "b32" or len(i.parts) > 2:
        raise UnknownInstruction(i.where())
    a, b, c = (e.src(x, "u32") for x in i.args[1:])
    e.put(e.dst(i.args[0], "u32"), f"lanes.permute_bytes({a}, {b}, {c})")


@emits("lop3")
def lop3(e: Emitter, i: Instr) -> None:
    if "BoolOp" in i.parts or isinstance(i.args[0], Pair):
        raise UnknownInstruction(i.where())
    a, b, c = (e.src(x, "u32") for x in i.args[1:4])
    e.put(e.dst(i.args[0], "u32"), f"lanes.lop3({a}, {b}, {c}, {i.args[4].value})")


@emits("bfe")
def bfe(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    a, b, c = e.src(i.args[1], kind), e.src(i.args[2], "u32"), e.src(i.args[3], "u32")
    e.put(e.dst(i.args[0], kind), f"lanes.bit_extract({a}, {b}, {c}, {kind[0] == 's'})", unsafe=True)


@emits("bfi")
def bfi(e: Emitter, i: Instr) -> None:
    if kind_of(i) != "b32":
        raise UnknownInstruction(i.where())
    a, b, c, d = (e.src(x, "u32") for x in i.args[1:])
    e.put(e.dst(i.args[0], "u32"), f"lanes.bit_insert({a}, {b}, {c}, {d})")


@emits("popc", "brev", "clz")
def bits(e: Emitter, i: Instr) -> None:
    name = {"popc": "popcount", "brev": "reverse_bits", "clz": "leading_zeros"}[i.parts[0]]
    kind = kind_of(i)
    e.put(e.dst(i.args[0], "u32"), f"lanes.{name}({e.src(i.args[1], kind)})")


@emits("bfind")
def bfind(e: Emitter, i: Instr) -> None:
    signed, amount = kind_of(i)[0] == "s", "shiftamt" in i.parts
    e.put(e.dst(i.args[0], "u32"), f"lanes.find_leading({e.src(i.args[1], 'u32')}, {signed}, {amount})")


@emits("selp")
def select(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    a, b, p = e.src(i.args[1], kind), e.src(i.args[2], kind), e.src(i.args[3], "pred")
    e.put(e.dst(i.args[0], kind), f"where({p}, {a}, {b})")


_COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


def comparison(e: Emitter, i: Instr, kind: str, a: str, b: str) -> str:
    """A boolean expression for setp and set."""
    op = i.parts[1]
    if not _is_float(kind):
        return f"{_COMPARE[op]}({a}, {b})"
    if op == "num":
        return f"~(isnan({a}) | isnan({b}))"
    if op == "nan":
        return f"(isnan({a}) | isnan({b}))"
    if op == "neu":
        return f"not_equal({a}, {b})"
    if op == "ne":
        return f"(less({a}, {b}) | greater({a}, {b}))"
    if op in _UNORDERED:
        return f"({_COMPARE[_UNORDERED[op]]}({a}, {b}) | isnan({a}) | isnan({b}))"
    return f"{_COMPARE[op]}({a}, {b})"


@emits("setp")
def setp(e: Emitter, i: Instr) -> None:
    kind = kind_of(i)
    if "x2" in kind or kind == "bf16":
        raise UnknownInstruction(i.where())
    a, b = e.src(i.args[1], kind), e.src(i.args[2], kind)
    target = i.args[0]
    boolean = next((p for p in i.parts[2:-1] if p in _BOOLEAN), None)
    if not boolean and not isinstance(target, Pair) and not _is_float(kind):
        e.ufunc(_COMPARE[i.parts[1]], e.dst(target, "pred"), a, b)
        return
    text = comparison(e, i, kind, a, b)
    if not isinstance(target, Pair):
        e.put(e.dst(target, "pred"), f"{text} {_BOOLEAN[boolean]} {e.src(i.args[3], 'pred')}" if boolean else text)
        return
    row = e.temp()
    e.line(f"{row} = {text}")
    extra = f" {_BOOLEAN[boolean]} {e.src(i.args[3], 'pred')}" if boolean else ""
    other = e.temp()
    e.line(f"{other} = ~{row}{extra}")
    e.put(e.dst(target.first, "pred"), f"{row}{extra}")
    e.put(e.dst(target.second, "pred"), other)


@emits("set")
def set_(e: Emitter, i: Instr) -> None:
    target_kind, kind = i.parts[-2], i.parts[-1]
    text = comparison(e, i, kind, e.src(i.args[1], kind), e.src(i.args[2], kind))
    true = "np.float32(1)" if target_kind == "f32" else "np.uint32(0xFFFFFFFF)"
    e.put(e.dst(i.args[0], target_kind), f"where({text}, {true}, 0)", unsafe=True)


@emits("cvta")
def cvta(e: Emitter, i: Instr) -> None:
    to_shared = i.parts[1] == "to" and i.parts[2].startswith("shared")
    from_shared = i.parts[1].startswith("shared")
    kind = kind_of(i)
    source = e.src(i.args[1], "u64")
    target = e.dst(i.args[0], "u64" if i.args[0].cls == "D" else "u32")
    if from_shared:
        e.put(target, f"{source} | SHARED_WINDOW" if kind == "u64" else source, unsafe=True)
    elif to_shared:
        e.put(target, f"{source} & u64(0xFFFFFFFF)", unsafe=True)
    else:
        e.put(target, source, unsafe=True)


@emits("createpolicy")
def createpolicy(e: Emitter, i: Instr) -> None:
    """Cache hints change nothing here."""
    e.put(e.dst(i.args[0], "b64"), "0")
