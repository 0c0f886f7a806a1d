"""What has to change in CuTe-DSL and TVM-FFI, while emulation is on, for host code to run with CPU tensors and no
driver."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import tempfile
import threading

from .errors import EmulatorError, Unavailable
from .host import RUNTIME

_CPU, _CUDA = 1, 2
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
L2_BYTES = {"sm_90a": 50 << 20, "sm_100a": 126 << 20, "sm_103a": 126 << 20}


NO_MEMORY = "{}: a tensor without memory (a FakeTensor, a meta tensor) cannot be run, in an emulator either"


class DeviceTensor:
    """A CPU tensor that says it lives on cuda:0: through DLPack the kernels are then the ones a GPU would get.

    ValueError for a tensor that has a shape but no memory.
    """

    def __init__(self, tensor):
        self.tensor = tensor.detach() if hasattr(tensor, "detach") else tensor

    def __dlpack__(self, **_):
        capsule = self.tensor.__dlpack__()
        if _set_device(capsule) is None and self.tensor.numel():
            raise ValueError(NO_MEMORY.format(_shape_of(self.tensor)))
        return capsule

    def __dlpack_device__(self):
        return (_CUDA, 0)


def _shape_of(tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"


def _set_device(capsule) -> int | None:
    """Write CUDA where DLPack says CPU. -> the address of the tensor's data, None for a null pointer."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    start = {b"dltensor": 0, b"dltensor_versioned": 32}[name]
    address = api.PyCapsule_GetPointer(capsule, name) + start
    device = ctypes.cast(address + 8, ctypes.POINTER(ctypes.c_int32))
    if device[0] == _CPU:
        device[0], device[1] = _CUDA, 0
    return ctypes.c_void_p.from_address(address).value


def _is_cpu_tensor(value) -> bool:
    return hasattr(value, "__dlpack_device__") and hasattr(value, "is_cpu") and value.is_cpu


def present(value):
    """Arguments with every CPU tensor in them, however nested, presented as a CUDA tensor."""
    if _is_cpu_tensor(value):
        import tvm_ffi

        return tvm_ffi.from_dlpack(DeviceTensor(value))
    if getattr(value, "is_meta", False):
        raise ValueError(NO_MEMORY.format(_shape_of(value)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(present(v) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(present(v) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if any(_is_cpu_tensor(v) or isinstance(v, (tuple, list)) for v in changed.values()):
            return type(value)(**{k: present(v) for k, v in changed.items()})
    return value


_POINTER = 1 << 40  # an integer argument this large may be an address


def reachable(values) -> list | None:
    """Address ranges of the storages in some arguments; None when an argument may hide an address we cannot see."""
    found: list = []
    for value in values:
        if _is_cpu_tensor(value):
            storage = value.untyped_storage()
            found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            continue
        if value is None or isinstance(value, (bool, float, str)) or (isinstance(value, int) and value < _POINTER):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = [getattr(value, f.name) for f in dataclasses.fields(value)]
        inner = reachable(value) if isinstance(value, (tuple, list)) else None
        if inner is None:
            return None
        found += inner
    return found


_one_call = threading.RLock()  # what a running call is known by (its tensors, its error) is the process's


def raising(function, arguments=None):
    """Call host code; an error inside a launch surfaces as itself, not as a CUDA error code. Threads take turns.

    With `arguments`, launches may touch the tensors among them only, if nothing else there can be an address.
    """
    with _one_call:
        return _raising(function, arguments)


def _raising(function, arguments):
    RUNTIME.error = None
    RUNTIME.ranges = reachable(arguments) if arguments is not None else None
    try:
        result = function()
    except Exception:
        if RUNTIME.error is None:
            raise
        result = None
    finally:
        RUNTIME.ranges = None
    if RUNTIME.error is not None:
        error, RUNTIME.error = RUNTIME.error, None
        raise error from None
    return result


def _patch(stack: contextlib.ExitStack, owner, name: str, value) -> None:
    missing = object()
    old = owner.__dict__.get(name, missing) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)

    def restore():
        if old is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    stack.callback(restore)


def apply(arch: str) -> contextlib.ExitStack:
    """Switch everything on; closing the returned stack switches it off."""
    path = RUNTIME.build()
    RUNTIME.sms = SMS[arch]
    RUNTIME.library.emu_device(*CAPABILITY[arch], SMS[arch])
    stack = contextlib.ExitStack()
    try:
        _settings(stack, arch, path)
        _calls(stack)
        _tensors(stack)
        _hardware(stack, arch)
    except BaseException:
        stack.close()
        raise
    return stack


def _settings(stack: contextlib.ExitStack, arch: str, path: str) -> None:
    """What CuTe-DSL reads from its environment, set where it keeps it: so one process serves several architectures."""
    try:
        from cutlass.base_dsl import env_manager, jit_executor
        from cutlass.cutlass_dsl import CuTeDSL
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"the emulator runs programs of CuTe-DSL, which is not installed ({error}): pip install nvidia-cutlass-dsl"
        ) from error

    envar = CuTeDSL._get_dsl().envar
    dump = stack.enter_context(tempfile.TemporaryDirectory(prefix="cute_flash_ptx_"))
    for name, value in (
        ("arch", arch),
        ("shared_libs", path),
        ("keep_ptx", True),
        ("keep_cubin", True),
        ("dump_dir", dump),
    ):
        old = getattr(envar, name)
        setattr(envar, name, value)
        stack.callback(setattr, envar, name, old)
    _patch(stack, env_manager, "get_prefix_dsl_libs", lambda prefix: path)

    original = jit_executor.JitFunctionArtifacts.__post_init__

    def remember(self):
        original(self)
        if isinstance(self.CUBIN, bytes) and isinstance(self.PTX, str) and "\n" in self.PTX:
            RUNTIME.register(self.CUBIN, self.PTX)

    _patch(stack, jit_executor.JitFunctionArtifacts, "__post_init__", remember)


def _calls(stack: contextlib.ExitStack) -> None:
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl import tvm_ffi_provider
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    _patch(stack, CudaDialectJitCompiledFunction, "num_devices", 1)
    for owner in (tvm_ffi_provider.TVMFFIJitCompiledFunction, tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs):
        _patch(stack, owner, "__call__", _emulated_call(owner.__call__))
    run = JitExecutor.run_compiled_program
    _patch(stack, JitExecutor, "run_compiled_program", lambda self, args: raising(lambda: run(self, args)))


def _emulated_call(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        shown = [present(a) for a in args]
        named = {k: present(v) for k, v in kwargs.items()}
        return raising(lambda: original(self, *shown, **named), [*args, *kwargs.values()])

    call.presents = True  # type: ignore[attr-defined]
    return call


def _tensors(stack: contextlib.ExitStack) -> None:
    from cutlass.cute import runtime

    original = runtime._Tensor.__init__

    def init(self, tensor, *args, **kwargs):
        original(self, DeviceTensor(tensor) if _is_cpu_tensor(tensor) else tensor, *args, **kwargs)

    _patch(stack, runtime._Tensor, "__init__", init)


def _hardware(stack: contextlib.ExitStack, arch: str) -> None:
    from cutlass.utils import hardware_info

    info = hardware_info.HardwareInfo
    _patch(stack, info, "__init__", lambda self, device_id=0: None)
    _patch(
        stack, info, "get_max_active_clusters", lambda self, cluster_size, *a, **k: max(1, SMS[arch] // cluster_size)
    )
    _patch(stack, info, "get_device_multiprocessor_count", lambda self: SMS[arch])
    _patch(stack, info, "get_l2_cache_size_in_bytes", lambda self: L2_BYTES[arch])


__all__ = ["CAPABILITY", "EmulatorError", "apply", "present", "raising"]
