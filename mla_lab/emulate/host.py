"""Launches as a kernel library's own host code makes them, without a card.

A CuTe kernel library checks its arguments, encodes tensor maps and launches through some fifty
functions of libcudart. A stand-in for those, built once with the host's C compiler, notes launches
and does nothing else. Each library is loaded beside the stand-in in a scope of its own, so that no
real libcudart of the process is in the way, and none is replaced.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import BuildError, invalid
from ..jit.cache import Cache
from ..jit.toolchain import find_cxx
from .machine import Launch
from .memory import BASE

#: launch attributes of the runtime
CLUSTER, COOPERATIVE = 4, 2
_ATTRIBUTE_BYTES = 72

#: DLPack's device type
CUDA = 2

#: functions that answer 0 and do nothing
QUIET = (
    "DeviceSynchronize EventCreate EventDestroy EventElapsedTime EventRecord Free FreeAsync "
    "FreeHost FuncSetAttribute GetLastError GraphDestroy GraphExecDestroy GraphInstantiate "
    "GraphLaunch KernelSetAttributeForDevice LibraryGetGlobal LibraryGetManaged "
    "LibraryGetUnifiedFunction LibraryLoadFromFile LibraryUnload Malloc MallocAsync MallocHost "
    "MallocManaged Memcpy MemcpyAsync Memset MemsetAsync "
    "OccupancyMaxActiveBlocksPerMultiprocessor "
    "PeekAtLastError ProfilerStart ProfilerStop "
    "SetDevice StreamAddCallback StreamBeginCapture StreamCreate StreamDestroy StreamEndCapture "
    "StreamSynchronize StreamWaitEvent"
)

STAND_IN = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { uint32_t grid[3], block[3]; size_t shared; void* stream; void* attrs; uint32_t n; }
    config_t;
typedef void (*note_t)(const config_t* config, const char* kernel, void** args);
static note_t note;
void emulate_note(note_t f) { note = f; }
static int quiet(void) { return 0; }
static const char* name_of(const void* stub);
int cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned version,
                                     unsigned long long flags, int* status) {
  *f = (void*)quiet;
  if (status) *status = 0;
  return 0;
}
int cudaLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned n, void* c,
                        void* d, unsigned m) {
  *library = malloc(8);
  return 0;
}
int cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = strdup(name);
  return 0;
}
int cudaLibraryGetKernelCount(unsigned* n, void* library) { *n = 1; return 0; }
int cudaLaunchKernelExC(const config_t* config, const void* kernel, void** args) {
  if (note) note(config, name_of(kernel), args);
  return 0;
}
const char* cudaGetErrorName(int e) { return "cudaError"; }
const char* cudaGetErrorString(int e) { return "error"; }
int cudaGetDeviceCount(int* n) { *n = 1; return 0; }
int cudaGetDevice(int* n) { *n = 0; return 0; }
int cudaDriverGetVersion(int* n) { *n = 13000; return 0; }
int cudaRuntimeGetVersion(int* n) { *n = 13000; return 0; }
int cudaDeviceGetAttribute(int* v, int a, int d) { *v = 132; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int threads,
                                                           size_t shared, unsigned flags) {
  *n = 1;
  return 0;
}
int cudaOccupancyMaxActiveClusters(int* n, const void* f, const config_t* c) { *n = 16; return 0; }
/* what nvcc's host code calls: kernels are known by the address of their host stub */
static struct { const void* stub; char* name; } known[256];
static int count;

void** __cudaRegisterFatBinary(void* binary) { return malloc(8); }
void __cudaRegisterFatBinaryEnd(void** handle) {}
void __cudaUnregisterFatBinary(void** handle) {}
void __cudaRegisterFunction(void** handle, const char* stub, char* host, const char* name, int n,
                            void* a, void* b, void* c, void* d, int* e) {
  if (count < 256) { known[count].stub = stub; known[count++].name = strdup(name); }
}
void __cudaRegisterVar(void** h, char* a, char* b, const char* c, int d, size_t e, int f, int g) {}
char __cudaInitModule(void** handle) { return 1; }
static const char* name_of(const void* stub) {
  for (int i = 0; i < count; i++)
    if (known[i].stub == stub || known[i].name == stub) return known[i].name;
  return (const char*)stub;
}
int __cudaGetKernel(void** kernel, const void* stub) { *kernel = (void*)name_of(stub); return 0; }
typedef struct { uint32_t x, y, z; } dim3_t;
static struct { dim3_t grid, block; size_t shared; void* stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t shared, void* stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(dim3_t* grid, dim3_t* block, size_t* shared, void** stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *stream = pushed.stream;
  return 0;
}
int cudaLaunchKernel(const void* stub, dim3_t grid, dim3_t block, void** args, size_t shared,
                     void* stream) {
  config_t c = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, stream, 0, 0};
  if (note) note(&c, name_of(stub), args);
  return 0;
}
int __cudaLaunchKernel(const void* kernel, dim3_t grid, dim3_t block, void** args, size_t shared,
                       void* stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
"""


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


_NOTE = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(_Config), ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)


class DeviceTensor:
    """A tensor as host code sees it: an address of emulated memory, dtype, shape and strides."""

    def __init__(
        self, offset: int, dtype: tuple[int, int], shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        self.offset, self.shape = offset, tuple(shape)
        n = len(shape)
        self._shape = (ctypes.c_int64 * n)(*shape)
        self._strides = (ctypes.c_int64 * n)(*strides)
        code, bits = dtype
        pointers = (self._shape, self._strides)
        raw = _Tensor(BASE + offset, CUDA, 0, n, code, bits, 1, *pointers, 0)
        self._managed = _Managed(raw, None, None)

    def __dlpack__(self, **_: Any) -> Any:
        """A capsule over an address that nobody on the host may read."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


@lru_cache(maxsize=1)
def _stand_in() -> Path:
    """The stand-in library, in the user's cache of kernels."""
    quiet = "".join(f"int cuda{name}(void) {{ return 0; }}\n" for name in QUIET.split())
    source = STAND_IN + quiet
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = Cache().root / "emulate"
    library = folder / f"cudart-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            text, built = Path(scratch) / "cudart.c", Path(scratch) / "cudart.so"
            text.write_text(source)
            flags = ["-x", "c", "-shared", "-fPIC", "-O1", "-w", "-o", str(built), str(text)]
            _compile([str(find_cxx()), *flags])
            built.replace(library)
    return library


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"emulate: {command[0]} failed: {done.stderr[-300:]}")


class HostCode:
    """A kernel library whose launches are noted and not done."""

    def __init__(self, library: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="mla-lab-emulate-") as folder:
            self._load(Path(folder), library)

    def _load(self, folder: Path, library: Path) -> None:
        import tvm_ffi

        # copies with names of their own, or the loader would answer with ones it has already
        stand_in, kernel, both = (folder / f"{name}.so" for name in ("cudart", "kernel", "both"))
        shutil.copy(_stand_in(), stand_in)
        shutil.copy(library, kernel)
        wanted = ["-shared", "-Wl,--no-as-needed", str(stand_in), str(kernel), "-o", str(both)]
        _compile([str(find_cxx()), "-Wl,--unresolved-symbols=ignore-all", *wanted])
        deep = 8  # RTLD_DEEPBIND: the stand-in comes before any libcudart of the process
        self._both = ctypes.CDLL(str(both), mode=ctypes.DEFAULT_MODE | deep)
        self._kernel, self._runtime = tvm_ffi.load_module(str(kernel)), ctypes.CDLL(str(stand_in))

    def launches(
        self, function: str, args: Sequence[Any], sizes: dict[str, list[int]]
    ) -> list[Launch]:
        """Launches that a call of the library's tvm-ffi function makes.

        args: `DeviceTensor`s, numbers, None. sizes: bytes of each kernel's parameters, by name.
        Raises InvalidInput with the library's own words where it refuses an argument.
        """
        found: list[Launch] = []

        def note(config: Any, name: bytes, params: Any) -> None:
            found.append(_launch(config.contents, name.decode(), params, sizes))

        callback = _NOTE(note)
        self._runtime.emulate_note(callback)
        try:
            self._kernel[function](*args)
        except (TypeError, ValueError, RuntimeError) as error:
            raise invalid("arguments", error, "what the kernel library takes") from None
        finally:
            self._runtime.emulate_note(_NOTE())
        return found


def _launch(config: _Config, name: str, params: Any, sizes: dict[str, list[int]]) -> Launch:
    cluster, cooperative = (1, 1, 1), False
    for i in range(config.count):
        raw = ctypes.string_at(config.attrs + _ATTRIBUTE_BYTES * i, _ATTRIBUTE_BYTES)
        kind, words = struct.unpack_from("<i", raw)[0], struct.unpack_from("<3I", raw, 8)
        if kind == CLUSTER:
            cluster = words
        elif kind == COOPERATIVE:
            cooperative = bool(words[0])
    values = [ctypes.string_at(params[i], n) for i, n in enumerate(sizes[name])]
    grid, block = tuple(config.grid), tuple(config.block)
    shared = int(config.shared)
    return Launch(name, grid, block, cluster, shared, tuple(values), cooperative)
