"""Binds a compiled kernel to one kind of call: allocates outputs, keeps the backend's row rule, launches.

Everything that does not change from call to call is decided when the closure is made. The warm path therefore holds
no Problem, no Plan and no layout check: TVM-FFI checks alignment itself, and its ValueError is the cue to look closer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..spec.device import Device
from ..spec.errors import BackendBuildError
from ..spec.mask import FULL
from ..spec.problem import Problem
from ..spec.scratch import ScratchRule, TableRule
from ..spec.splits import SplitRule, rule_of
from . import compiler, counters, dispatch, report
from .dispatch import Decision
from .request import (
    Options,
    alignment_faults,
    backward_of,
    default_scale,
    describe,
    is_empty,
    lse_dtype,
    needs_grad,
    scale_copy,
)
from .tables import with_table

Kernel = Callable[..., Any]
Outputs = tuple[torch.Tensor, torch.Tensor | None]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (scale,), or (scale, left, right, softcap) where the plan is not plain; packed sequences' lengths before them.
Numbers = tuple[Any, ...]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Numbers, int, int, int], Outputs]
Backward = Callable[..., Gradients]


@dataclass(frozen=True)
class Site:
    """Where tensors of a call live and how rows must lie: what a closure below is specialised for."""

    device: torch.device
    dtype: torch.dtype
    alignment: int  # bytes; 0 = any strides
    head_dim: int
    head_dim_v: int
    heads_q: int

    @property
    def unit(self) -> int:
        """Elements that the last dimension must be a multiple of."""
        return max(1, self.alignment // self.dtype.itemsize)

    @property
    def lse_dtype(self) -> torch.dtype:
        return lse_dtype(self.dtype)


def site_of(device: torch.device, dtype: torch.dtype, decision: Decision) -> Site:
    problem = decision.problem
    alignment = decision.backend.row_alignment
    return Site(device, dtype, alignment, problem.head_dim, problem.head_dim_v, problem.heads_q)


def on_device(kernel: Kernel, device: torch.device, exports: bool) -> Kernel:
    """A kernel that launches on the tensors' GPU. TVM-FFI functions switch by themselves."""
    if exports or device.type != "cuda":
        return kernel
    index, current = device.index, torch.cuda.current_device

    def guarded(*operands: Any) -> Any:
        if current() == index:
            return kernel(*operands)
        with torch.cuda.device(index):
            return kernel(*operands)

    return guarded


def _aligned(name: str, tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    faults = alignment_faults(name, tensor, alignment)
    for fault in faults:
        report.say("dispatch", fault)
    return tensor.clone(memory_format=torch.contiguous_format) if faults else tensor


def _relaunch(
    objection: ValueError, kernel: Kernel, names: tuple[str, ...], alignment: int, operands: tuple[Any, ...]
) -> Any:
    """A kernel's own checks objected: copy what is misaligned and launch again; if nothing is, they are right."""
    count = len(names)
    inputs = [_aligned(name, t, alignment) for name, t in zip(names, operands[:count], strict=True)]
    if all(new is old for new, old in zip(inputs, operands[:count], strict=True)):
        raise objection
    return kernel(*inputs, *operands[count:])


def _aligning(kernel: Kernel, names: tuple[str, ...], alignment: int) -> Kernel:
    """Launch as things lie, and once more with aligned copies where the kernel's own checks object."""
    if not alignment:
        return kernel

    def launch(*operands: Any) -> Any:
        try:
            return kernel(*operands)
        except ValueError as objection:
            return _relaunch(objection, kernel, names, alignment, operands)

    return launch


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Splitter:
    """A forward of a backend that shares keys among CTAs, for calls whose query tiles leave most of the GPU idle; where
    it also packs, for those whose rows of a group fit one tile. Compiled when needed."""

    def __init__(self, decision: Decision, device: torch.device, packs: bool = False) -> None:
        self.decision, self.device = decision, device
        problem = decision.problem
        self.group = problem.group if packs else 1
        self.plan = decision.backend.pack(decision.plan) if packs else decision.backend.split(decision.plan)
        heads = problem.heads_q // self.group
        self.rule: SplitRule | None = rule_of(self.plan, heads, problem.device.sm_count, packs) if self.plan else None
        self.kernel: Kernel | None = None

    @property
    def packed_rows(self) -> int:
        """Query rows up to which those of a group's heads fit one tile; 0 where nothing is packed."""
        return self.rule.tile_m // self.group if self.rule and self.group > 1 else 0

    def count(self, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """CTAs that share the keys of a query tile."""
        return self.rule.count(batch, seqlen_q * self.group, seqlen_k) if self.rule else 1

    @property
    def query_tiles_max(self) -> int:
        return self.rule.query_tiles_max if self.rule else 0

    @property
    def few_keys(self) -> int:
        """Too few to share out."""
        return self.rule.few_keys if self.rule else 0

    def launch(self, splits: int, operands: tuple[Any, ...]) -> None:
        """operands: (q, k, v, out, lse, *numbers), rows as the backend wants them or not."""
        if self.kernel is None:
            self.kernel = self._compile()
        q = operands[0]
        batch, seqlen_q, heads_q, _ = q.shape
        rows = (splits, batch, heads_q, seqlen_q)
        o_partial = q.new_empty(*rows, self.decision.plan.head_dim_v, dtype=torch.float32)
        state_partial = q.new_empty(*rows, 2, dtype=torch.float32)
        self.kernel(*operands, o_partial, state_partial)

    def _compile(self) -> Kernel:
        backend, plan = self.decision.backend, self.plan
        if plan is None:
            raise BackendBuildError(f"{backend.name} shares no keys for {self.decision.plan}")
        compiled = compiler.kernel_for(backend, plan)
        dispatch.announce(replace(self.decision, plan=plan), compiled.origin)
        launch = on_device(compiled.kernel, self.device, backend.exports)
        return _aligning(launch, ("q", "k", "v"), backend.row_alignment)


def bind_run(kernel: Kernel, alignment: int, splitter: Splitter) -> Callable[..., None]:
    """(batch, seqlen_q, seqlen_k, operands) -> nothing; operands are (q, k, v, out, lse, *numbers)."""
    launch = _aligning(kernel, ("q", "k", "v"), alignment)
    counter = _counter(splitter)
    few, rule = splitter.query_tiles_max, splitter.rule
    few_keys = splitter.few_keys
    checks = splitter.decision.backend.exports  # TVM-FFI functions compare dtypes and devices themselves

    def run(batch: int, seqlen_q: int, seqlen_k: int, operands: tuple[Any, ...]) -> None:
        if not checks:
            _check_like_q(*operands[:3])
        if batch <= few and seqlen_k > few_keys and rule is not None:
            splits = rule.count(batch, seqlen_q, seqlen_k)
            if splits > 1:
                splitter.launch(splits, operands)
                return
        if counter is None:
            launch(*operands)
        else:
            launch(*operands, counter())

    return run


def _counter(splitter: Splitter) -> counters.Counter | None:
    return counters.counter_for(splitter.device) if splitter.decision.plan.draws else None


def _check_like_q(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The warm path looks at q only; its caller says which of k and v is wrong."""
    if not (q.dtype is k.dtype is v.dtype and q.device == k.device == v.device):
        raise TypeError("q, k and v must have one dtype and one device")


def _packed(problem: Problem) -> Problem:
    """What GroupRows runs instead."""
    return replace(problem, mask=FULL, heads_q=problem.heads_kv, unaligned=())


def _packs(decision: Decision) -> bool:
    """Where a backend splits keys, it also packs groups; elsewhere a row a head is what the kernel expects.

    Not under a window: rows of one tile see different keys there.
    """
    problem = decision.problem
    return problem.group > 1 and not problem.mask.windowed and decision.backend.split(decision.plan) is not None


class GroupRows:
    """One query row a head: the query heads of a group become rows of one tile, so K and V are read once a group.

    A single row, aligned bottom-right, sees every key: causal or not, the mask is full.
    """

    def __init__(self, decision: Decision, forced: str | None, device: torch.device) -> None:
        problem = decision.problem
        self.problem = _packed(problem)
        self.group, self.heads_kv = problem.group, problem.heads_kv
        self.forced, self.device = forced, device
        self._run: Callable[..., None] | None = None

    def _bind(self) -> Callable[..., None]:
        decision, kernel = ready(self.problem, self.forced, self.device)
        return bind_run(kernel, decision.backend.row_alignment, Splitter(decision, self.device))

    def run(self, batch: int, seqlen_k: int, operands: tuple[Any, ...]) -> None:
        """operands: (q, k, v, out, lse, *numbers) with seqlen_q = 1."""
        if self._run is None:
            self._run = self._bind()
        q, k, v, out, lse, *numbers = operands
        if lse is not None:
            lse = lse.view(batch, self.heads_kv, self.group)
        self._run(batch, self.group, seqlen_k, (self._as_rows(q), k, v, self._as_rows(out), lse, *numbers))

    def _as_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, 1, heads_kv * group, width) seen as (batch, group, heads_kv, width)."""
        batch, _, _, width = tensor.shape
        along_batch, _, along_heads, along_width = tensor.stride()
        strides = (along_batch, along_heads, along_heads * self.group, along_width)
        return tensor.as_strided((batch, self.group, self.heads_kv, width), strides)


def group_rows(decision: Decision, forced: str | None, device: torch.device) -> GroupRows | None:
    return GroupRows(decision, forced, device) if _packs(decision) else None


def outputs_of(site: Site, tiled_v: int, has_lse: bool) -> Callable[[torch.Tensor, int, int], Outputs]:
    """(q, batch, seqlen_q) -> (out, lse), contiguous and not yet written.

    On CUDA through the allocation that Inductor's generated code uses, half the cost of new_empty (which with its sizes
    spelled out takes half of torch.empty's). It allocates on the current device, so another one goes the public way.
    """
    dtype, lse_dtype, heads_q = site.dtype, site.lse_dtype, site.heads_q

    def public(q: torch.Tensor, batch: int, seqlen_q: int) -> Outputs:
        out = q.new_empty(batch, seqlen_q, heads_q, tiled_v)
        return out, q.new_empty(batch, heads_q, seqlen_q, dtype=lse_dtype) if has_lse else None

    quick: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if site.device.type != "cuda" or quick is None:
        return public
    index, current, row = site.device.index, torch._C._cuda_getDevice, heads_q * tiled_v

    def on_current(q: torch.Tensor, batch: int, seqlen_q: int) -> Outputs:
        if current() != index:
            return public(q, batch, seqlen_q)
        out = quick((batch, seqlen_q, heads_q, tiled_v), (seqlen_q * row, row, tiled_v, 1), dtype)
        if not has_lse:
            return out, None
        return out, quick((batch, heads_q, seqlen_q), (heads_q * seqlen_q, seqlen_q, 1), lse_dtype)

    return on_current


def bind_forward(
    kernel: Kernel,
    site: Site,
    has_lse: bool,
    splitter: Splitter,
    rows: GroupRows | None = None,
    packer: Splitter | None = None,
) -> Forward:
    """(q, k, v, numbers, batch, seqlen_q, seqlen_k) -> (out, lse). The caller has the sizes at hand already."""
    run = bind_run(kernel, site.alignment, splitter)
    tiled_v = _round_up(site.head_dim_v, site.unit)
    allocate = outputs_of(site, tiled_v, has_lse)
    few, few_keys = splitter.query_tiles_max, splitter.few_keys
    packed_rows, packed_keys = (packer.packed_rows, packer.few_keys) if packer else (0, 0)
    few_rows = max(1, packed_rows)
    counter = _counter(splitter)
    at_once = splitter.decision.backend.exports and site.alignment > 0  # without a look at k and v, see bind_run

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: Numbers, batch: int, seqlen_q: int, seqlen_k: int
    ) -> Outputs:
        out, lse = outputs = allocate(q, batch, seqlen_q)
        operands = (q, k, v, out, lse) + numbers  # noqa: RUF005  half of unpacking's time
        if at_once and seqlen_q > few_rows and (seqlen_k <= few_keys or batch > few):
            if counter is not None:
                operands += (counter(),)
            try:
                kernel(*operands)
            except ValueError as objection:
                _relaunch(objection, kernel, ("q", "k", "v"), site.alignment, operands)
        elif seqlen_q == 1 and rows is not None:
            rows.run(batch, seqlen_k, operands)
        elif packer is not None and seqlen_q <= packed_rows and seqlen_k > packed_keys:
            packer.launch(packer.count(batch, seqlen_q, seqlen_k), operands)
        else:
            run(batch, seqlen_q, seqlen_k, operands)
        return outputs

    pad, pad_v = _round_up(site.head_dim, site.unit) - site.head_dim, tiled_v - site.head_dim_v
    if not pad and not pad_v:
        return forward

    def padded(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: Numbers, batch: int, seqlen_q: int, seqlen_k: int
    ) -> Outputs:
        out, lse = forward(_pad(q, pad), _pad(k, pad), _pad(v, pad_v), numbers, batch, seqlen_q, seqlen_k)
        return _unpad(out, pad_v), lse

    return padded


def _pad(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    """Zero columns at the end: they add nothing to any score and fall off the output."""
    return F.pad(tensor, (0, pad)) if pad else tensor


def _unpad(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    return tensor[..., :-pad].contiguous() if pad else tensor


def bind_backward(kernel: Kernel, site: Site, scratch: ScratchRule | TableRule | None) -> Backward:
    """(dout, q, k, v, out, lse, dlse, *numbers) -> (dq, dk, dv), contiguous."""
    names = ("dout", "q", "k", "v", "out")

    def backward(*operands: Any) -> Gradients:
        _, q, k, v, *_ = operands
        gradients = q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)
        operands = operands[:7] + gradients + operands[7:]
        if isinstance(scratch, ScratchRule):
            batch, seqlen_q, heads_q, _ = q.shape
            sequences = 0 if scratch.table is None else operands[10].shape[0] - 1  # of cu_seqlens_q
            elements = scratch.elements(batch, heads_q, seqlen_q, sequences, k.shape[2], k.shape[1])
            operands += (q.new_empty(elements, dtype=torch.float32),)
        try:
            kernel(*operands)
        except ValueError as objection:
            if not site.alignment:
                raise
            _relaunch(objection, kernel, names, site.alignment, operands)
        return gradients

    pad = _round_up(site.head_dim, site.unit) - site.head_dim
    pad_v = _round_up(site.head_dim_v, site.unit) - site.head_dim_v
    if not pad and not pad_v:
        return backward

    def padded(*operands: Any) -> Gradients:
        dout, q, k, v, out, *others = operands
        q, k, v = _pad(q, pad), _pad(k, pad), _pad(v, pad_v)
        dq, dk, dv = backward(_pad(dout, pad_v), q, k, v, _pad(out, pad_v), *others)
        return _unpad(dq, pad), _unpad(dk, pad), _unpad(dv, pad_v)

    return padded


class Backwards:
    """The backwards a differentiable call may need, with and without a gradient through LSE; compiled when needed."""

    def __init__(self, problem: Problem, forced: str | None, site: tuple[torch.device, torch.dtype], lse: bool) -> None:
        self.forced = forced
        self.device, self.dtype = site
        self.problems = {lse_grad: backward_of(problem, lse_grad) for lse_grad in ((False, True) if lse else (False,))}
        self.bound: dict[bool, Backward] = {}
        for each in self.problems.values():
            dispatch.choose(each, forced)  # a backward nothing can run is refused before the forward runs

    def __call__(self, lse_grad: bool) -> Backward:
        backward = self.bound.get(lse_grad)
        if backward is None:
            decision, kernel = ready(self.problems[lse_grad], self.forced, self.device)
            backward = self.bound[lse_grad] = bind_backward(
                kernel, site_of(self.device, self.dtype, decision), decision.backend.scratch(decision.plan)
            )
        return backward


class Call:
    """One kind of call, ready: everything the warm path needs behind one dictionary lookup."""

    __slots__ = ("backwards", "forward", "grad", "return_lse", "scale")

    def __init__(self, forward: Forward, scale: float, return_lse: bool, backwards: Backwards | None) -> None:
        self.forward = forward
        self.scale = scale  # the default one
        self.return_lse = return_lse
        self.grad = backwards is not None
        self.backwards = backwards


def ready(problem: Problem, forced: str | None, device: torch.device) -> tuple[Decision, Kernel]:
    """Decide, compile or load, and say so. A toolchain found broken on the way is a refusal: the walk restarts."""
    while True:
        decision = dispatch.choose(problem, forced)
        try:
            compiled = compiler.kernel_for(decision.backend, decision.plan)
        except compiler.ToolchainError as error:
            dispatch.mark_broken(error.module, error.cause)
            continue
        dispatch.announce(decision, compiled.origin)
        return decision, on_device(compiled.kernel, device, decision.backend.exports)


def _sharing(
    decision: Decision, forced: str | None, device: torch.device, sizes: tuple[int, int, int]
) -> tuple[str, ...]:
    """Which plans these sizes launch in place of the decision's, and why; a sentence each, none for most calls."""
    sentences = []
    batch, seqlen_q, seqlen_k = sizes
    if seqlen_q == 1 and _packs(decision):
        seqlen_q = decision.problem.group
        decision = dispatch.choose(_packed(decision.problem), forced)
        sentences.append(f"one query row: the {seqlen_q} heads of a group share a tile, by {decision.plan}")
    splitter, packer = Splitter(decision, device), Splitter(decision, device, packs=True)
    if 1 < seqlen_q <= packer.packed_rows and seqlen_k > packer.few_keys:
        splits = packer.count(batch, seqlen_q, seqlen_k)
        keys = f" and {splits} CTAs its keys" if splits > 1 else ""
        return (f"few query rows: the {packer.group} heads of a group share a tile{keys}, by {packer.plan}",)
    splits = splitter.count(batch, seqlen_q, seqlen_k)
    if splits > 1:
        sentences.append(f"few query rows: {splits} CTAs share the keys of a query tile, by {splitter.plan}")
    return tuple(sentences)


def decide(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, device: Device | None = None
) -> Decision:
    """The forward's Decision and, where gradients are on, the backward's; for `explain`. `device` may be imagined."""
    problem = describe(q, k, v, options, device)
    decision = dispatch.choose(problem, options.backend)
    backward = None
    if needs_grad(q, k, v):
        backward = dispatch.choose(backward_of(problem, options.return_lse), options.backend)
    sizes = (q.shape[0], q.shape[1], k.shape[1])
    sharing = () if is_empty(q, k) else _sharing(decision, options.backend, q.device, sizes)
    return replace(decision, copies=scale_copy(options.scale) + decision.copies, sharing=sharing, backward=backward)


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Call:
    """The Call of checked, non-empty inputs."""
    return prepare_problem(describe(q, k, v, options), options, (q.device, q.dtype), needs_grad(q, k, v))


def prepare_problem(
    problem: Problem, options: Options, site: tuple[torch.device, torch.dtype], differentiable: bool
) -> Call:
    backwards = Backwards(problem, options.backend, site, options.return_lse) if differentiable else None
    decision, kernel = ready(problem, options.backend, site[0])
    forward = bind_forward(
        kernel,
        site_of(*site, decision),
        decision.plan.lse,
        Splitter(decision, site[0]),
        group_rows(decision, options.backend, site[0]),
        Splitter(decision, site[0], packs=True),
    )
    forward = with_table(forward, decision.backend.scratch(decision.plan))
    return Call(forward, default_scale(problem.head_dim), options.return_lse, backwards)


def prepare_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Backward:
    """The backward of checked, non-empty inputs; a gradient arrives through LSE where options return it."""
    problem = backward_of(describe(q, k, v, options), options.return_lse)
    return prepare_backward_problem(problem, options, (q.device, q.dtype))


def prepare_backward_problem(problem: Problem, options: Options, site: tuple[torch.device, torch.dtype]) -> Backward:
    decision, kernel = ready(problem, options.backend, site[0])
    return bind_backward(kernel, site_of(*site, decision), decision.backend.scratch(decision.plan))
