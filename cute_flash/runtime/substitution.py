"""What torch.compile traces in place of a function, said without importing the compiler: that alone takes 0.6 s.

torch.compiler.substitute_in_graph says it, but imports torch._dynamo. So it is called when somebody else has imported
that: at once, or at the end of the import. Other parts of torch that few programs import are told in the same way.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as everybody else would, and calls `action` once it is imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action
        self.loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # once: the search below must not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader  # what the module remembers is its own loader
        self.loader.exec_module(module)
        self.action()


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` at once where the module is imported, else at the end of its import, whoever does that."""
    if name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False):
        action()
    else:
        sys.meta_path.insert(0, _After(name, action))


def while_tracing(function: Callable[..., None]) -> None:
    """torch.compile calls `function` while it traces, with the constants that stand there, and keeps nothing of it."""

    def say() -> None:
        import torch

        torch.compiler.assume_constant_result(function)  # None, that is

    when_imported(DYNAMO, say)


def substitute(function: Callable[..., Any], in_graph: Callable[..., Any]) -> None:
    """torch.compile traces `in_graph` where it meets `function`, called or compiled by itself. Costs eager nothing."""

    def say() -> None:
        import torch
        from torch._dynamo.eval_frame import innermost_fn

        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(in_graph)
        # torch.compile(function) looks up no substitute; it does look through wrappers, of which this makes one. Only
        # where it compares ids: functools.wraps copies these, and whoever decorates attention must not be passed over.
        if "_torchdynamo_wrapper_id" in innermost_fn.__code__.co_consts:
            function._torchdynamo_orig_callable = in_graph  # type: ignore[attr-defined]
            function._torchdynamo_wrapper_id = id(function)  # type: ignore[attr-defined]

    when_imported(DYNAMO, say)
