"""The house rules of CONTRIBUTING.md, read from the sources: floors, limits, and words that must not appear.

Each rule is a function from a parsed file to its violations, and is itself tested on a few lines that break it.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("cute_flash", "arch")
EVERYWHERE = (*LIBRARY, "perf", "scripts", "tests")


class Violation(NamedTuple):
    path: str
    name: str  # of the function, module or line concerned
    what: str


@dataclass(frozen=True)
class Source:
    path: str  # relative to the repository
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> tuple[str, ...]:
        return Path(self.path).with_suffix("").parts

    @property
    def module(self) -> str:
        parts = self.room[:-1] if self.room[-1] == "__init__" else self.room
        return ".".join(("cute_flash", *parts) if parts[0] == "arch" else parts)


@functools.cache
def sources(*folders: str) -> list[Source]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [Source(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


# A line each: "rule path name" -> why the rule yields there.
EXCEPTIONS: dict[str, str] = {
    "floors arch/sm90/mask.py cute_flash.arch.sm90.mma": "which row and column a register holds is mma's fact",
    "floors arch/sm90/softmax.py cute_flash.arch.sm90.mma": "reads the score fragment by rows",
    "floors arch/sm90/epilogue.py cute_flash.arch.sm90.mma": "which row a thread's LSE belongs to is mma's fact",
    "floors arch/sm90/epilogue.py cute_flash.arch.sm90.load": "TMA descriptor and tensor: one bundle both ways",
    "floors arch/sm100/epilogue.py cute_flash.arch.sm100.load": "TMA descriptor and tensor: one bundle both ways",
    "floors arch/sm100/grad/epilogue.py cute_flash.arch.sm100.epilogue": "a row leaves as the forward's do",
    "floors arch/sm90/grad/mask.py cute_flash.arch.sm90.mma": "which row and column a register holds is mma's fact",
    "floors arch/sm90/cached/load.py cute_flash.arch.sm90.load": "TMA descriptor and tensor: the forward's bundle",
    "floors arch/sm90/cached/epilogue.py cute_flash.arch.sm90.cached.shares": "which row of the batch it belongs to",
    "parameters arch/sm90/decode.py __call__": "the contract's operands, from which TVM-FFI's signature is derived",
    "parameters arch/common/entry.py __call__": "the contract's operands, from which TVM-FFI's signature is derived",
    "parameters arch/triton/forward.py attention_forward": "an integer in a tuple would be compiled in",
    "parameters arch/triton/cache.py attention_cache": "an integer in a tuple would be compiled in",
    "parameters arch/triton/cache.py forward": "the contract's operands",
    "parameters arch/triton/backward.py attention_backward_dq": "an integer in a tuple would be compiled in",
    "parameters arch/triton/backward.py attention_backward_dkdv": "an integer in a tuple would be compiled in",
    "parameters arch/triton/backward.py backward": "the contract's ten operands and the Plan",
    "parameters cute_flash/integrations/flash_attn.py flash_attn_func": "FlashAttention's own",
    "parameters cute_flash/integrations/flash_attn.py flash_attn_varlen_func": "FlashAttention's own",
    "parameters cute_flash/integrations/flash_attn.py flash_attn_with_kvcache": "FlashAttention's own",
}


# ---------------------------------------------------------------------------------------------------------- floors

ROLES = {"load", "mma", "softmax", "mask", "correction", "epilogue", "operands"}
DRAWINGS = {"schedule", "memory", "pipeline"}
DECISIONS = {"support", "tiles"}
COMPILERS = ("cutlass", "triton", "cuda")


def floor(module: str) -> int | None:
    """0 is the ground. None for what stands beside the house (the emulator) or outside it."""
    parts = module.split(".")
    if parts[0] != "cute_flash" or parts[1:2] == ["emulator"]:
        return None
    if parts[1:2] == ["spec"]:
        return 0
    if parts[1:2] == ["runtime"]:
        return 7
    if parts[1:2] != ["arch"]:
        return 8
    if len(parts) == 2 or parts[-1] == "backend":
        return 6
    if parts[-1] in DECISIONS:
        return 1
    if parts[2] == "common":
        return 2
    if parts[-1] in DRAWINGS:
        return 3
    return 4 if parts[-1] in ROLES else 5


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every module imported anywhere in the file, by absolute name."""
    package = source.module.split(".") if source.room[-1] == "__init__" else source.module.split(".")[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{stem}.{alias.name}"
                yield node, deeper if _is_module(deeper) else stem


def _is_module(name: str) -> bool:
    parts = name.split(".")
    parts = parts[1:] if parts[:2] == ["cute_flash", "arch"] else parts
    return (ROOT / Path(*parts)).is_dir() or (ROOT / Path(*parts)).with_suffix(".py").is_file()


def top_level(source: Source) -> set[ast.stmt]:
    """Statements that run at import: not inside a function."""
    inside = {n for f in ast.walk(source.tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    return {node for node in ast.walk(source.tree) if isinstance(node, ast.stmt)} - inside


def architecture(module: str) -> str | None:
    parts = module.split(".")
    named = parts[:2] == ["cute_flash", "arch"] and len(parts) > 3
    return parts[2] if named and parts[2] != "common" else None


def broken_floors(source: Source) -> Iterator[Violation]:
    here, mine = floor(source.module), architecture(source.module)
    at_import = top_level(source)
    for node, module in imports(source):
        there, theirs = floor(module), architecture(module)
        root = module.split(".")[0]
        if root in COMPILERS and not _may_import_compiler(source.module, here, node in at_import):
            yield Violation(source.path, module, f"imports a compiler on floor {here}")
        if here is None and root == "cute_flash" and not module.startswith(("cute_flash.emulator", "cute_flash.spec")):
            yield Violation(source.path, module, "the emulator knows nothing of attention")
        if here is None or there is None:
            continue
        if there > here:
            yield Violation(source.path, module, f"floor {here} imports floor {there}")
        if mine and theirs and mine != theirs:
            yield Violation(source.path, module, f"{mine} imports {theirs}")
        if here == there == 4 and mine == theirs and (source.room[-1], module.split(".")[-1]) != ("softmax", "mask"):
            yield Violation(source.path, module, "roles do not import each other")
        if source.room[-1] == "backend" and there in (2, 3, 4, 5) and node in at_import:
            yield Violation(source.path, module, "backend.py imports its kernels only inside its functions")


def _may_import_compiler(module: str, here: int | None, at_import: bool) -> bool:
    if here is None or 2 <= here <= 5:
        return True
    return here == 7 and not at_import  # the office loads an object file through the compiler where no linker is


# ---------------------------------------------------------------------------------------------------------- limits

FILE, HOST, DEVICE, ENTRY = 500, 60, 120, 150
HOST_PARAMETERS, DEVICE_PARAMETERS, NESTING = 8, 10, 4
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
# Signed by name: the user's call and the backend's (spec/backend.py has the convention of the kernels it builds).
PUBLIC_ENTRIES = {"attention", "attention_varlen", "attention_kvcache"}
KERNEL_OPERANDS = {"kernel"}


def decorators(function: ast.FunctionDef) -> set[str]:
    """Last names of the decorators: {"jit"} for @cute.jit, @triton.jit(...)."""
    found = set()
    for node in function.decorator_list:
        target = node.func if isinstance(node, ast.Call) else node
        found.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return found


def functions(source: Source) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef))


def is_device(source: Source, function: ast.FunctionDef) -> bool:
    """Traced into a kernel: decorated as such, or living on a floor whose files are nothing but kernel code."""
    if decorators(function) & {"jit", "kernel", "dsl_user_op"}:
        return True
    here = floor(source.module)
    return here is not None and 2 <= here <= 4 and "cutlass" in source.text


def is_entry(function: ast.FunctionDef) -> bool:
    return "kernel" in decorators(function) or ("jit" in decorators(function) and function.name.endswith("_kernel"))


def code_lines(function: ast.FunctionDef) -> int:
    """From def to end, the docstring left out: explaining must not cost."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= first.end_lineno - first.lineno + 1
    return lines


def parameters(function: ast.FunctionDef) -> int:
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest stack of blocks in a function; elif is not a level, and a nested function starts anew."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def broken_limits(source: Source) -> Iterator[Violation]:
    lines = source.text.count("\n")
    if lines > FILE:
        yield Violation(source.path, "", f"{lines} lines, at most {FILE}")
    for function in functions(source):
        device = is_device(source, function)
        limit = ENTRY if is_entry(function) else DEVICE if device else HOST
        if code_lines(function) > limit:
            yield Violation(source.path, function.name, f"{code_lines(function)} lines, at most {limit}")
        if nesting(function) > NESTING:
            yield Violation(source.path, function.name, f"{nesting(function)} levels of nesting, at most {NESTING}")


def broken_parameters(source: Source) -> Iterator[Violation]:
    for function in functions(source):
        count = parameters(function)
        if function.name in PUBLIC_ENTRIES | KERNEL_OPERANDS or is_entry(function):
            continue
        limit = DEVICE_PARAMETERS if is_device(source, function) else HOST_PARAMETERS
        if count > limit:
            yield Violation(source.path, function.name, f"{count} parameters, at most {limit}")


# ----------------------------------------------------------------------------------------------------------- words

LINK = re.compile(r"https?://|#\d+")
POSTPONED = re.compile(r"TODO|FIXME|XXX|HACK")


def broken_words(source: Source) -> Iterator[Violation]:
    if source.room[-1] in ("utils", "helpers", "misc", "util", "helper"):
        yield Violation(source.path, "", "a file is named for what it holds")
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and POSTPONED.search(token.string) and not LINK.search(token.string):
            yield Violation(source.path, f"line {token.start[0]}", "a TODO carries a link")


def broken_library_words(source: Source) -> Iterator[Violation]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert) and node.msg is None and not _says_why(source, node):
            yield Violation(source.path, "assert", f"line {node.lineno}: a bare assert, raise with a sentence")
        if isinstance(node, ast.Attribute) and node.attr == "environ" and source.module != "cute_flash.spec.settings":
            yield Violation(source.path, "os.environ", f"line {node.lineno}: read in spec/settings.py only")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getenv"):
            yield Violation(source.path, "os.environ", f"line {node.lineno}: read in spec/settings.py only")
        if isinstance(node, ast.Compare) and source.room[0] != "arch" and _asks_for_an_architecture(node):
            yield Violation(source.path, f"line {node.lineno}", "architectures are told apart inside arch/ only")


def _says_why(source: Source, node: ast.Assert) -> bool:
    """A comment on the line, or isinstance: about our own values, to the reader or the type checker, never a user's."""
    return "#" in source.text.splitlines()[node.lineno - 1] or ast.unparse(node.test).startswith("isinstance(")


def _asks_for_an_architecture(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    names = {ast.unparse(side).split(".")[-1] for side in sides}
    return bool(names & {"arch", "capability"}) and any(isinstance(side, ast.Constant) and side.value for side in sides)


# ----------------------------------------------------------------------------------------------------------- tests

RULES: dict[str, tuple[Callable[[Source], Iterator[Violation]], tuple[str, ...]]] = {
    "floors": (broken_floors, LIBRARY),
    "limits": (broken_limits, EVERYWHERE),
    "parameters": (broken_parameters, LIBRARY),
    "words": (broken_words, EVERYWHERE),
    "library words": (broken_library_words, LIBRARY),
}


@functools.cache
def violations(rule: str) -> dict[str, Violation]:
    check, folders = RULES[rule]
    return {f"{rule} {v.path} {v.name}": v for source in sources(*folders) for v in check(source)}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rules(rule):
    found = [v for key, v in violations(rule).items() if key not in EXCEPTIONS]
    assert not found, "\n".join(f"{v.path} {v.name}: {v.what}" for v in found)


def test_every_exception_is_still_needed():
    found = {key for rule in RULES for key in violations(rule)}
    assert set(EXCEPTIONS) <= found, set(EXCEPTIONS) - found


BROKEN = {
    "arch/sm90/load.py": ("floors", "from .softmax import f", "roles do not import each other"),
    "arch/sm90/mma.py": ("floors", "from ..sm100.mma import f", "sm90 imports sm100"),
    "arch/common/order.py": ("floors", "from ..sm90.load import f", "floor 2 imports floor 4"),
    "arch/sm90/support.py": ("floors", "import cutlass", "imports a compiler on floor 1"),
    "arch/sm90/backend.py": ("floors", "from .forward import f", "only inside its functions"),
    "cute_flash/spec/mask.py": ("floors", "from ..runtime import launch", "floor 0 imports floor 7"),
    "cute_flash/runtime/launch.py": ("floors", "from ..api import attention", "floor 7 imports floor 8"),
    "cute_flash/api.py": ("floors", "def f():\n    import triton", "imports a compiler on floor 8"),
    "cute_flash/emulator/warp.py": ("floors", "from ..runtime import launch", "knows nothing of attention"),
    "cute_flash/long.py": ("limits", "x = 1\n" * 501, "501 lines, at most 500"),
    "cute_flash/host.py": ("limits", "def f():\n" + "    x = 1\n" * 60, "61 lines, at most 60"),
    "arch/sm90/deep.py": ("limits", "@cute.jit\ndef f():\n" + "    x = 1\n" * 120, "121 lines, at most 120"),
    "arch/sm90/entry.py": ("limits", "@cute.kernel\ndef f():\n" + "    x = 1\n" * 150, "151 lines, at most 150"),
    "cute_flash/nest.py": (
        "limits",
        "def f():\n for a in b:\n  if a:\n   while a:\n    with a:\n     if b: pass",
        "5 levels of nesting",
    ),
    "cute_flash/many.py": ("parameters", "def f(a, b, c, d, e, f, g, h, i): pass", "9 parameters, at most 8"),
    "arch/sm90/many.py": ("parameters", "@cute.jit\ndef f(a,b,c,d,e,f,g,h,i,j,k): pass", "11 parameters, at most 10"),
    "cute_flash/utils.py": ("words", "", "named for what it holds"),
    "perf/later.py": ("words", "x = 1  # TODO: later", "a TODO carries a link"),
    "cute_flash/check.py": ("library words", "assert x", "a bare assert"),
    "cute_flash/environment.py": ("library words", "import os\nx = os.environ['A']", "read in spec/settings.py only"),
    "cute_flash/arches.py": ("library words", "if plan.arch == 'sm_90a': pass", "inside arch/ only"),
}


@pytest.mark.parametrize("path", BROKEN)
def test_each_rule_notices_when_it_is_broken(path):
    rule, text, what = BROKEN[path]
    check, _ = RULES[rule]
    assert [v for v in check(Source(path, text)) if what in v.what]


def test_what_the_rules_allow():
    softmax = "from .mask import f\nfrom ..common.numeric import g\nfrom cute_flash.spec.plan import Plan"
    chain = ["if", *["elif"] * 9]
    link, narrowed = "x = 1  # TODO(https://example.org/issue/1)", "assert y is not None  # set above"
    allowed = {
        "arch/sm90/softmax.py": softmax,
        "arch/sm90/backend.py": "from . import support, tiles\ndef build():\n    from .forward import f",
        "cute_flash/runtime/diskcache.py": "def f():\n    import cutlass",
        "cute_flash/chain.py": "def f():\n" + "".join(f"    {word} a == {n}: pass\n" for n, word in enumerate(chain)),
        "cute_flash/said.py": f"{link}\nassert x, 'x is 0'\n{narrowed}",
    }
    for path, text in allowed.items():
        for check, _ in RULES.values():
            assert list(check(Source(path, text))) == [], path


@pytest.mark.parametrize("page, folder", [("CONTRIBUTING.md", "scripts"), ("perf/README.md", "perf")])
def test_a_page_names_every_file_of_its_folder_and_no_other(page, folder):
    rows = [line.split("|")[1] for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    files = {path.name for path in (ROOT / folder).iterdir() if path.is_file()} - {"__init__.py", "README.md"}
    assert {name for name in named if not name.endswith("/")} == files


def test_every_package_is_packed():
    """A folder missing from pyproject's list is missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {source.module for source in sources(*LIBRARY) if source.room[-1] == "__init__"}
    assert listed == found


def test_the_kernels_sources_are_all_in_the_cache_key():
    """runtime/toolchain.py hashes a backend's folder, arch/common and spec: kernels must not read anything else."""
    for source in sources("arch"):
        if floor(source.module) in (2, 3, 4, 5):
            for _, module in imports(source):
                if module.startswith("cute_flash."):
                    mine = f"cute_flash.arch.{source.room[1]}"
                    assert module.startswith((mine, "cute_flash.arch.common", "cute_flash.spec")), (source.path, module)
