"""The launch shim: a stand-in for the CUDA runtime that compiled CuTe-DSL host code links to, calling back into Python.

Kernels are found by their cubin: a library is loaded with a pointer to the cubin image, and the PTX of that image was
recorded when it was compiled. So two kernels of one name never get mixed up, and objects loaded from elsewhere work
once registered.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np

from .errors import EmulatorError, Unavailable
from .machine import HOST, Launch, Options
from .memory import BoundedMemory
from .program import Program
from .ptx import Kernel, parse
from .succession import Succession

_SOURCE = r"""
#include <stdint.h>
#include <string.h>
#include <dlfcn.h>
typedef int (*load_t)(void *code);
typedef int (*kernel_t)(int library, const char *name);
typedef int (*launch_t)(int kernel, uint32_t *config, void **args);
static load_t on_load; static kernel_t on_kernel; static launch_t on_launch;
static int capability[2] = {9, 0}, sms = 132, device;
static char libraries[65536];  /* handles are addresses in here */
void emu_connect(load_t a, kernel_t b, launch_t c) { on_load = a; on_kernel = b; on_launch = c; }
void emu_device(int major, int minor, int count) { capability[0] = major; capability[1] = minor; sms = count; }
int _cudaLibraryLoadData(void **lib, void *code, void *o, void *ov, int no, void *l, void *lv, int nl) {
  
  *lib = 0; int n = on_load(code); if (n < 0 || n >= 65536) return 999; *lib = libraries + n; return 0; }
static int library_index(void *lib) {  /* some callers hand over the handle, some the place it is kept in */
  for (int hop = 0; hop < 4 && lib; hop++, lib = *(void **)lib)
    if ((char *)lib >= libraries && (char *)lib < libraries + 65536) return (char *)lib - libraries;
  return -1; }
int _cudaLibraryUnload(void *lib) { return 0; }
int _cudaLibraryGetKernel(void **k, void *lib, const char *name) {
  
  *k = 0; int i = library_index(lib); if (i < 0) return 999; int n = on_kernel(i, name); if (n < 0) return 999;
  *k = (void *)(intptr_t)(n + 1); return 0; }
int _cudaLaunchKernelEx(uint32_t *c, void *func, void **args) {
  return func ? on_launch((int)(intptr_t)func - 1, c, args) : 999; }
int _cudaLaunchKernel(void *func, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                      void **args, uint64_t smem, void *stream) {
  uint32_t c[14] = {gx, gy, gz, bx, by, bz}; memcpy(c + 6, &smem, 8); 
  return func ? on_launch((int)(intptr_t)func - 1, c, args) : 999; }
int _cudaGetDevice(int *d) { *d = device; return 0; }
int _cudaSetDevice(int d) { device = d; return 0; }
int _cudaGetDeviceCount(int *d) { *d = 1; return 0; }
int _cudaDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 97 ? 232448 : a == 16 ? sms : a == 75 ? capability[0] : a == 76 ? capability[1]
     : a == 8 ? 49152 : a == 1 ? 1024 : 232448;
  return 0; }
int _cudaFuncSetAttribute(void *k, int a, int v) { return 0; }
int _cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { return 0; }
int _cuKernelGetAttribute(int *v, int a, void *k, int d) { *v = 0; return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, long s) { *n = 1; return 0; }
static void raise_ffi(void) {  /* a failing TVM-FFI call must leave an error object behind */
  void (*set)(const char *, const char *) = dlsym(RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr");
  if (set) set("RuntimeError", "the emulator stopped this launch"); }
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int),
                                   void (*raise_)(const char *, const char *)) {
  void *lib = 0; int err;
  if (*state) return 0;
  if ((err = init(&lib)) || (load && (err = load(&lib, 0)))) {
    if (raise_) raise_("RuntimeError", "the emulator could not load a kernel"); return err; }
  *state = lib; return 0; }
void cuda_dialect_unload_library_once(void **s) {}
const char *cuda_dialect_get_error_name(int c) { return "emulator"; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void *f, int c) { raise_ffi(); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void *f, int c) { raise_ffi(); }
"""

_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_void_p))

_CLUSTER_ATTRIBUTE, _ATTRIBUTE_BYTES = 4, 72
_BESIDE_ATTRIBUTE = 6  # cudaLaunchAttributeProgrammaticStreamSerialization
_FATBIN = b"\x50\xed\x55\xba"
_FAILED = 999  # cudaErrorUnknown: the real error is kept in Runtime.error


class Runtime:
    """What stands behind the shim: known cubins, loaded kernels, and the record of launches."""

    def __init__(self):
        self.forget_knobs()
        self.sms = 132
        self.ptx_by_cubin: dict[str, str] = {}
        self.programs: dict[tuple, Program] = {}
        self.libraries: list[str] = []
        self.kernels: list[tuple[str, str]] = []
        self.error: BaseException | None = None
        self.ranges: list | None = None  # what the running call may touch, where that is known
        self.succession: Succession | None = None  # its launches
        self.library = None
        self.path = ""
        self._callbacks: tuple = ()

    def forget_knobs(self) -> None:
        """As when nothing is emulated."""
        self.options = Options()
        self.launches: list[dict] = []
        self.edit = None  # PTX text -> PTX text, applied before parsing (mutation tests)

    def build(self) -> str:
        """Compile and load the shim; -> its path."""
        if not sys.platform.startswith("linux"):
            raise Unavailable("the emulator runs on Linux only: it stands in for a shared library of the CUDA runtime")
        if self.library is not None:
            return self.path
        self.path = os.path.join(tempfile.mkdtemp(prefix="cute_flash_emulator_"), "libcute_dsl_runtime.so")
        command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-xc", "-", "-o", self.path]
        try:
            subprocess.run(command, input=_SOURCE.encode(), check=True)
        except FileNotFoundError as error:
            raise Unavailable("the emulator needs gcc, to build what stands in for the CUDA runtime") from error
        self.library = ctypes.CDLL(self.path, mode=ctypes.RTLD_GLOBAL)
        self._callbacks = (_LOAD(self._load), _KERNEL(self._kernel), _LAUNCH(self._launch))
        self.library.emu_connect(*self._callbacks)
        return self.path

    def register(self, cubin: bytes, ptx: str) -> None:
        """Say which PTX a cubin was assembled from."""
        self.ptx_by_cubin[hashlib.sha256(elf_image(cubin)).hexdigest()] = ptx

    # --- callbacks: an exception cannot cross the C frames, so it waits in self.error -----------------
    def _guard(self, function, *args) -> int:
        try:
            return function(*args)
        except BaseException as error:
            self.error = self.error or error
            return -1

    def _load(self, code) -> int:
        return self._guard(self._load_image, code)

    def _load_image(self, code: int) -> int:
        self.libraries.append(hashlib.sha256(read_elf(code)).hexdigest())
        return len(self.libraries) - 1

    def _kernel(self, library: int, name: bytes) -> int:
        return self._guard(self._find_kernel, library, name.decode())

    def _find_kernel(self, library: int, name: str) -> int:
        self.kernels.append((self.libraries[library], name))
        return len(self.kernels) - 1

    def program(self, digest: str, name: str) -> Program:
        if digest not in self.ptx_by_cubin:
            raise EmulatorError(
                f"no PTX is known for the object of kernel {name}: compile it while emulation is on, or register() it"
            )
        text = self.ptx_by_cubin[digest]
        if self.edit is not None:
            text = self.edit(text)
        key = (hashlib.sha256(text.encode()).hexdigest(), name)
        if key not in self.programs:
            self.programs[key] = Program(parse(text)[name])
        return self.programs[key]

    def _launch(self, kernel: int, config, args) -> int:
        return _FAILED if self._guard(self._run, kernel, config, args) < 0 else 0

    def _run(self, kernel: int, config, args) -> int:
        digest, name = self.kernels[kernel]
        program = self.program(digest, name)
        grid, block, shared, cluster, beside = read_config(config, program.kernel)
        params = np.zeros(program.kernel.param_bytes + 64, np.uint8)
        start = -params.ctypes.data % 64
        params = params[start : start + program.kernel.param_bytes]
        for n, param in enumerate(program.kernel.params):
            params[param.offset : param.offset + param.size] = HOST.bytes_at(args[n], param.size)
        host = HOST if self.ranges is None else BoundedMemory(self.ranges)
        succession = self._succession()
        ahead = None if succession is None else succession.begin(beside, lets_dependents_start(program.kernel))
        launch = Launch(program, grid, block, cluster, shared, params, self.options, self.sms, host, ahead)
        record = {
            "kernel": name,
            "grid": grid,
            "block": block,
            "cluster": cluster,
            "shared": shared,
            "counters": launch.counters,
        }
        self.launches.append(record)
        launch.run()
        record["steps"] = launch.steps
        if succession is not None:
            succession.end(launch, name)
        return 0

    def _succession(self) -> Succession | None:
        """Of the running call; None where what it may touch is not known."""
        if self.ranges is None:
            return None
        if self.succession is None or self.succession.ranges is not self.ranges:
            self.succession = Succession(self.ranges, HOST)
        return self.succession


def lets_dependents_start(kernel: Kernel) -> bool:
    return any(instr.op == "griddepcontrol.launch_dependents" for instr in kernel.instrs)


def read_config(config, kernel) -> tuple:
    """-> grid, block, dynamic shared bytes, cluster of a cudaLaunchConfig_t; may it start beside the one before?"""
    words = config
    raw = ctypes.string_at(ctypes.addressof(words.contents), 56)
    grid, block = struct.unpack_from("<3I", raw, 0), struct.unpack_from("<3I", raw, 12)
    (shared,) = struct.unpack_from("<Q", raw, 24)
    attributes, count = struct.unpack_from("<QI", raw, 40)
    cluster, beside = kernel.reqnctapercluster or (1, 1, 1), False
    for n in range(count if attributes else 0):
        entry = ctypes.string_at(attributes + n * _ATTRIBUTE_BYTES, 24)
        if struct.unpack_from("<I", entry)[0] == _CLUSTER_ATTRIBUTE:
            cluster = struct.unpack_from("<3I", entry, 8)
        elif struct.unpack_from("<I", entry)[0] == _BESIDE_ATTRIBUTE:
            beside = struct.unpack_from("<I", entry, 8)[0] != 0
    cluster = tuple(max(1, c) for c in (*cluster, 1, 1)[:3])
    return grid, block, shared, cluster, beside


def read_elf(address: int) -> bytes:
    """The cubin at an address, bare or as the first entry of a fat binary; lengths come from the headers themselves."""
    head = ctypes.string_at(address, 64)
    if head[:4] == _FATBIN:
        (entry_header,) = struct.unpack_from("<I", head, 20)
        address += 16 + entry_header
        head = ctypes.string_at(address, 64)
    if head[:4] != b"\x7fELF":
        raise EmulatorError("the kernel image is not a cubin")
    return elf_image(ctypes.string_at(address, _elf_size(head)))


def _elf_size(head: bytes) -> int:
    (program_at, section_at) = struct.unpack_from("<QQ", head, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", head, 54)
    return max(section_at + section_size * section_count, program_at + program_size * program_count)


def elf_image(data: bytes) -> bytes:
    """An ELF file without whatever follows it."""
    return data[: _elf_size(data[:64])]


RUNTIME = Runtime()
