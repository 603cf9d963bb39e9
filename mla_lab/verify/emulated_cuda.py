"""The CUDA C++ kernels around decode on the CPU: the planner, the ladder's steps.

They are compiled with nvcc and run in the emulator with all checks on, the ladder against the
float64 oracle on poisoned inputs, the planner against the plan that the host makes.
`record` keeps PTX and launches of some cases, which then run where there is no compiler.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from .. import jit
from ..backends.cuda.ladder import CONFIG, FIRST_SPLIT, STEPS
from ..backends.cuda.ops import DevicePlan, DevicePlanner
from ..call.feature_operands import LOG2_E
from ..core.dims import LATENT_DIM
from ..core.problem import Problem
from ..core.resources import data_dir
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.machine import Launch
from ..emulate.ptx import shorten
from ..emulate.recorded import pack_launch, unpack_launch
from ..plan import make_plan
from ..plan.config import KernelConfig
from ..reference.inputs import make_inputs
from ..reference.mla import decode_reference
from ..reference.operands import q_begins
from ..reference.tolerance import lse_error, rel_error
from .record import Row, head_row

ARCH = "sm_90a"
#: largest errors: of out (relative), and of lse
OUT_ERROR, LSE_ERROR = 0.008, 2e-5
#: causal, an odd number of heads, a request without tokens, keys past a tile's end
ODD = Problem((2, 1, 1), (67, 0, 9), 5, page_size=16)
SCHEDULE, SEED = "random", 3


def names() -> list[str]:
    """All cases: kernel, and what varies."""
    found = [f"planner, {lengths}" for lengths in LENGTHS]
    return found + [f"ladder, {step.number} {step.name}" for step in STEPS]


#: kernels and calls that ship
ARCHIVE = "records/emulate_cuda.zip"
RECORDED = ("planner, mixed", "planner, many", "ladder, 3 shared", "ladder, 9 look_ahead")


class Replayed:
    """Launches of one call as they were recorded, in place of host code."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = list(launches)

    def launches(
        self, function: str, args: Sequence[Any], sizes: dict[str, list[int]]
    ) -> list[Launch]:
        """The recorded launches: equal calls get equal addresses."""
        return self._launches


def record(archive: Path) -> None:
    """Write PTX and launches of the cases `RECORDED`."""
    members: dict[str, str] = {}
    for name in RECORDED:
        kind = name.split(", ")[0]
        kernel = EmulatedKernel.of(_artifact(kind))
        _RUN[kind](kernel, *name.split(", ")[1:])
        launches = [pack_launch(launch) for launch in kernel.run.launches]
        members[f"{kind}.ptx"] = shorten(kernel.text)
        members[f"{name}.json"] = json.dumps([kernel.function, launches])
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as out:
        for name in sorted(members):
            out.writestr(zipfile.ZipInfo(name), members[name], zipfile.ZIP_LZMA)


def recorded(name: str) -> EmulatedKernel:
    """The kernel of a case of `RECORDED`, for its call alone."""
    with zipfile.ZipFile(data_dir() / ARCHIVE) as members:
        text = members.read(f"{name.split(', ')[0]}.ptx").decode()
        function, launches = json.loads(members.read(f"{name}.json"))
    return EmulatedKernel(text, function, Replayed([unpack_launch(x) for x in launches]))


def run_case(
    name: str, schedule: str = SCHEDULE, seed: int = SEED, kernel: EmulatedKernel | None = None
) -> Row:
    """The row of a case: "ok", "wrong" (results, or what a check found), or "failed"; of `kernel`
    where it is given, else of this source's.
    """
    began = perf_counter()
    kind, *words = name.split(", ")
    kernel = kernel or EmulatedKernel.of(_artifact(kind))
    kernel.options = Options("exact", schedule, seed, check=True)
    row: Row = {"kind": "case", "name": name, "schedule": schedule}
    found: list[str] = []
    try:
        row |= _RUN[kind](kernel, *words)
        row["status"] = "ok" if row.pop("right") and not kernel.run.findings else "wrong"
    except Fault as fault:
        row["status"], found = "failed", [str(fault)]
    found += [str(finding) for finding in kernel.run.findings]
    if found:
        row["findings"] = found
    return {**row, "seconds": round(perf_counter() - began, 2)}


@cache
def _artifact(kind: str) -> jit.Artifact:
    config = CONFIG if kind == "ladder" else KernelConfig(f"cuda/{kind}")
    return jit.compile(config, ARCH)


LENGTHS = {"one": (700,), "mixed": (65, 3000, 0, 130, 1), "many": tuple(range(1, 2000, 67))}


def _planner(kernel: EmulatedKernel, lengths: str) -> Row:
    kv_lens = LENGTHS[lengths]
    problem = Problem((1,) * len(kv_lens), kv_lens, 16)
    planner = DevicePlanner(16, len(kv_lens), 1, max(kv_lens), tile_rows=16, num_workers=24)
    plan = DevicePlan.empty(planner, "cpu")
    q_begin = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
    tensors = (torch.tensor(kv_lens, dtype=torch.int32), q_begin)
    words = (plan.tiles, plan.worker_begin, plan.counts)
    pieces = (planner.split_blocks, planner.most_splits, planner.half_blocks)
    numbers = (*planner.capacity[1:], planner.most_tokens, 16, 16, 64, *pieces)
    kernel(*tensors, *words, *numbers)
    host = make_plan(problem, tile_rows=16, num_workers=24, policy="fixed_size")
    tiles = int(plan.counts[0])
    same = np.array_equal(plan.tiles[:tiles].numpy(), host.tiles)
    same &= np.array_equal(plan.worker_begin.numpy(), host.worker_begin)
    same &= plan.counts.tolist() == [host.num_tiles, host.num_slots, host.num_groups, 0]
    return {"tiles": tiles, "right": same}


def _ladder(kernel: EmulatedKernel, words: str) -> Row:
    step = int(words.split()[0])
    inputs = make_inputs(ODD, 1, ("scales", "page_gap"), workspace_bytes=256)
    rows = ODD.total_q * ODD.heads
    splits = 2 if step >= FIRST_SPLIT else 1
    out = inputs.query.new_full((rows, LATENT_DIM), torch.nan)
    lse = torch.full((rows,), torch.nan)
    query = inputs.query.view(-1, inputs.query.shape[-1])
    begins = torch.tensor(q_begins(inputs), dtype=torch.int32)
    tensors = (query, inputs.kv_cache, inputs.block_tables, inputs.seq_lens, begins, out, lse)
    numbers = (ODD.heads, max(ODD.q_lens), max(ODD.kv_lens), splits)
    scales = (float(inputs.bmm1_scale) * LOG2_E, float(inputs.bmm2_scale))
    kernel(step, *tensors, torch.empty(_scratch(step, rows, splits)), *numbers, *scales)
    want = decode_reference(inputs)
    error, of_lse = rel_error(out.view(want.out.shape), want.out), lse_error(lse, want.lse.view(-1))
    return {
        "out_error": error,
        "lse_error": of_lse,
        "right": error <= OUT_ERROR and of_lse <= LSE_ERROR,
    }


def _scratch(step: int, rows: int, splits: int) -> int:
    """Floats of scratch that a step of the ladder asks for (`scratch_floats` of its files)."""
    if step < 2:
        return rows * max(ODD.kv_lens)
    return splits * rows * (LATENT_DIM + 1) if step >= FIRST_SPLIT else 0


_RUN: dict[str, Callable[..., Row]] = {"planner": _planner, "ladder": _ladder}


def rows(say: Callable[[str], None]) -> Iterator[Row]:
    """A record of all cases."""
    yield head_row("cuda", "cpu", len(names()))
    for name in names():
        row = run_case(name)
        say(f"{row['status']} {name}")
        yield row
