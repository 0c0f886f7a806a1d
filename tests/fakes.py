"""Backends that are not there: for tests of the office, which knows a backend only through its contract."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import Problem
from cute_flash.spec.scratch import ScratchRule


def nothing(*operands: Any) -> None:
    """A kernel that writes nothing."""


@dataclass
class FakeBackend:
    """Takes every problem unless told otherwise, and remembers what it was asked to build."""

    name: str = "sm90"
    exports: bool = False
    spreads: bool = False
    row_alignment: int = 0
    toolchain: tuple[str, ...] = ()
    refusals: Sequence[str] = ()
    is_native: bool = True
    kernel: Callable[..., Any] = nothing
    error: Exception | None = None  # build() raises it
    built: list[Plan] = field(default_factory=list)

    def native(self, device: Device) -> bool:
        return self.is_native

    def caveat(self, device: Device) -> str:
        return ""

    def refuse(self, problem: Problem) -> Sequence[str]:
        return tuple(self.refusals)

    def plan(self, problem: Problem) -> Plan:
        return Plan(
            backend=self.name,
            direction=problem.direction,
            arch="sm_90a",
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=problem.mask,
            lse=problem.lse,
            lse_grad=problem.lse_grad,
            deterministic=problem.deterministic,
            ieee_float32=problem.ieee_float32,
        )

    def split(self, plan: Plan) -> Plan | None:
        return None

    def scratch(self, plan: Plan) -> ScratchRule | None:
        return None

    def pack(self, plan: Plan) -> Plan | None:
        return None

    def build(self, plan: Plan) -> Callable[..., Any]:
        self.built.append(plan)
        if self.error is not None:
            raise self.error
        return self.kernel


class Exported:
    """What build() of an exporting backend returns: callable, and written out by copying an object made before."""

    def __init__(self, object_file: Path) -> None:
        self.object_file = object_file

    def export_to_c(self, path: str, name: str) -> None:
        assert name == "entry"
        shutil.copy(self.object_file, path)

    def __call__(self, *operands: Any) -> str:
        return "called in memory"


class HostDslBackend(FakeBackend):
    """Compiles tests/host_dsl.py for real. Its forward copies q into out: head_dim_v must equal head_dim."""

    def __init__(self) -> None:
        super().__init__(exports=True, row_alignment=16, toolchain=("cutlass", "tvm_ffi"))

    def build(self, plan: Plan) -> Callable[..., Any]:
        from .host_dsl import compile_copy

        self.built.append(plan)
        return compile_copy(plan.dtype, plan.lse)
