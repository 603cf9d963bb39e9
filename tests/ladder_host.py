"""The ladder's kernels run on a CPU: compiled by a C++ compiler, thread blocks as fibers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

from mla_lab.core.resources import kernels_dir
from mla_lab.jit.cuda_build import include_folder
from mla_lab.jit.toolchain import find_cxx, find_nvcc
from mla_lab.reference.inputs import DecodeInputs
from mla_lab.reference.mla import Result
from mla_lab.reference.operands import q_begins

POINTERS = ("query", "cache", "block_table", "seq_lens", "q_begin", "out", "lse", "scratch")
STRIDES = ("page_stride", "table_stride")
NUMBERS = ("page_size", "batch", "heads", "total_rows", "max_rows", "max_kv", "num_splits")
SCALES = ("scale_log2", "out_scale")
LOG2_E = 1.4426950408889634


class Call(ctypes.Structure):
    """`mla::ladder::Call`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_int32) for name in NUMBERS),
        *((name, ctypes.c_float) for name in SCALES),
    )


def build(folder: Path) -> ctypes.CDLL:
    """Compile tests/cuda_on_host/ladder_host.cc into `folder`."""
    here = Path(__file__).with_name("cuda_on_host")
    library = folder / "ladder_host.so"
    # a kernel looks at 16 bytes as eight numbers; nvcc allows that
    flags = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]
    flags.append("-Wno-unknown-pragmas")
    places = [f"-I{here}", f"-I{kernels_dir()}", "-isystem", str(include_folder(find_nvcc()))]
    command = [str(find_cxx()), *flags, *places, "-shared", "-fPIC", "-Wl,-Bsymbolic"]
    subprocess.run([*command, str(here / "ladder_host.cc"), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.scratch_floats.restype = ctypes.c_int64
    loaded.shared_bytes.restype = ctypes.c_int64
    loaded.turns_per_read.restype = ctypes.c_double
    return loaded


def run_on_host(
    library: ctypes.CDLL,
    step: int,
    inputs: DecodeInputs,
    *,
    num_splits: int = 1,
    reversed_threads: bool = False,
) -> Result:
    """out bf16 query.shape[:-1] + (512,) and natural lse query.shape[:-1] of one step."""
    problem = inputs.problem
    rows = problem.total_q * problem.heads
    q_begin = torch.tensor(q_begins(inputs), dtype=torch.int32)
    out = torch.full((rows, 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((rows,), torch.nan)
    call = Call()
    given = (inputs.query, inputs.kv_cache, inputs.block_tables, inputs.seq_lens, q_begin, out, lse)
    for name, tensor in zip(POINTERS, given, strict=False):
        setattr(call, name, tensor.data_ptr())
    call.page_stride, call.table_stride = inputs.kv_cache.stride(0), inputs.block_tables.stride(0)
    call.page_size, call.batch, call.heads = problem.page_size, problem.batch, problem.heads
    call.total_rows, call.max_rows = rows, max(problem.q_lens) * problem.heads
    call.max_kv, call.num_splits = max(problem.kv_lens), num_splits
    call.scale_log2, call.out_scale = inputs.bmm1_scale * LOG2_E, inputs.bmm2_scale
    scratch = torch.full((library.scratch_floats(step, ctypes.byref(call)),), torch.nan)
    call.scratch = scratch.data_ptr()
    code = library.run_on_host(step, ctypes.byref(call), reversed_threads)
    if code:
        raise RuntimeError(f"CUDA error {code}")
    shape = inputs.query.shape[:-1]
    return Result(out.view(*shape, 512), lse.view(shape))
