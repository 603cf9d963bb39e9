"""The CUDA C++ kernels around decode on the CPU: the merge, the planner, the ladder's steps.

They are compiled with nvcc and run in the emulator with all checks on, the merge and the ladder
against the float64 oracle on poisoned inputs, the planner against the plan that the host makes.
`record` keeps PTX and launches of some cases, which then run where there is no compiler.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import jit
from ..backends.cuda.ladder import CONFIG, FIRST_SPLIT, STEPS
from ..backends.cuda.ops import POLICIES, DevicePlan, DevicePlanner
from ..core.problem import LATENT_DIM, Problem
from ..core.resources import data_dir
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.calls import DTYPES, LOG2_E
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
#: largest errors: of out (relative) by its type, and of lse
OUT_ERRORS = {"bf16": 0.004, "fp16": 0.0006, "fp32": 1e-6}
LADDER_ERROR, LSE_ERROR = 0.008, 2e-5
#: causal, an odd number of heads, a request without tokens, keys past a tile's end
ODD = Problem((2, 1, 1), (67, 0, 9), 5, page_size=16)
MERGE_EXTRAS, OTHER_SPLITS = ("plain", "sinks", "device scale"), (1, 40)
TORCH = {**DTYPES, "fp32": torch.float32}
SCHEDULE, SEED = "random", 3


def names() -> list[str]:
    """All cases: kernel, and what varies."""
    merges = [(out, extras, 3) for out, extras in product(OUT_ERRORS, MERGE_EXTRAS)]
    merges += [(out, "plain", splits) for out, splits in product(OUT_ERRORS, OTHER_SPLITS)]
    found = [f"merge, {out}, {extras}, {splits} splits" for out, extras, splits in merges]
    found += [f"planner, {policy}, {lengths}" for policy in POLICIES for lengths in LENGTHS]
    return found + [f"ladder, {step.number} {step.name}" for step in STEPS]


#: kernels and calls that ship
ARCHIVE = "records/emulate_cuda.zip"
RECORDED = (
    "merge, bf16, sinks, 3 splits",
    "merge, fp16, device scale, 3 splits",
    "planner, greedy, mixed",
    "planner, fixed_size, many",
    "ladder, 3 shared",
    "ladder, 9 look_ahead",
)


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


def _merge(kernel: EmulatedKernel, out_type: str, extras: str, many: str) -> Row:
    """Two requests of two row tiles, one of them without keys in its first piece."""
    heads, rows, splits = 24, 16, int(many.split()[0])
    draw = torch.Generator().manual_seed(splits)
    items = torch.tensor(
        [[0, 0, 0, splits], [0, 1, splits, splits], [1, 0, 2 * splits, splits], [0, 0, 0, 0]],
        dtype=torch.int32,
    )
    partial_out = torch.randn(3 * splits, rows, LATENT_DIM, generator=draw)
    partial_lse = 3 * torch.randn(3 * splits, rows, generator=draw)
    partial_lse[0] = -torch.inf
    partial_out[0] = torch.nan
    q_begin = torch.tensor([0, 1, 2], dtype=torch.int32)
    out = torch.full((2 * heads, LATENT_DIM), 7.0).to(TORCH[out_type])
    lse = torch.full((2 * heads,), 7.0)
    sinks = torch.randn(heads, generator=draw) if extras == "sinks" else torch.empty(0)
    scale = torch.tensor([0.75]) if extras == "device scale" else torch.empty(0)
    tensors = (partial_out, partial_lse, items, q_begin, out, lse, sinks, scale)
    kernel(*tensors, heads, 1.5, LOG2_E, False)
    want, want_lse = _merged(partial_out, partial_lse, items, heads, sinks)
    written = torch.isfinite(want_lse) | (want_lse == -torch.inf)
    want = want * (0.75 if extras == "device scale" else 1.5)
    out_error = rel_error(out[written], want[written])
    error = lse_error(lse[written] / LOG2_E, want_lse[written])
    untouched = bool((out[~written] == 7).all() and (lse[~written] == 7).all())
    right = out_error <= OUT_ERRORS[out_type] and error <= LSE_ERROR and untouched
    return {"out_error": out_error, "lse_error": error, "right": right}


def _merged(
    out: Tensor, lse: Tensor, items: Tensor, heads: int, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """The oracle in float64; NaN where no item has the row."""
    want = torch.full((2 * heads, LATENT_DIM), torch.nan, dtype=torch.float64)
    want_lse = torch.full((2 * heads,), torch.nan, dtype=torch.float64)
    rows = out.shape[1]
    for request, tile, first, splits in items.tolist():
        for row in range(rows * tile, min(heads, rows * (tile + 1)) if splits else 0):
            parts = lse[first : first + splits, row % rows].double()
            total = torch.logsumexp(parts, 0)
            weights = torch.exp(parts - total) if torch.isfinite(total) else torch.zeros(splits)
            values = out[first : first + splits, row % rows].double().nan_to_num()
            merged = (weights[:, None] * values).sum(0)
            if len(sinks) and torch.isfinite(total):
                merged /= 1 + torch.exp(sinks[row].double() - total)
            want[request * heads + row], want_lse[request * heads + row] = merged, total
    return want, want_lse


LENGTHS = {"one": (700,), "mixed": (65, 3000, 0, 130, 1), "many": tuple(range(1, 2000, 67))}


def _planner(kernel: EmulatedKernel, policy: str, lengths: str) -> Row:
    kv_lens = LENGTHS[lengths]
    problem = Problem((1,) * len(kv_lens), kv_lens, 16)
    planner = DevicePlanner(
        16, len(kv_lens), 1, max(kv_lens), tile_rows=16, num_workers=24, policy=policy
    )
    plan = DevicePlan.empty(planner, "cpu")
    q_begin = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
    tensors = (torch.tensor(kv_lens, dtype=torch.int32), q_begin)
    words = (plan.tiles, plan.worker_begin, plan.merge_items, plan.counts)
    numbers = (planner.capacity[1], 16, 16, 64, POLICIES.index(policy), planner.overhead)
    more = (planner.split_blocks, planner.max_splits, planner.half_blocks)
    kernel(*tensors, *words, *numbers, *more, planner.least_rows, planner.most_rows)
    host = make_plan(problem, tile_rows=16, num_workers=24, policy=policy)
    tiles = int(plan.counts[0])
    same = np.array_equal(plan.tiles[:tiles].numpy(), host.tiles)
    return {"tiles": tiles, "right": same and int(plan.counts[3]) == 0}


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
        "right": error <= LADDER_ERROR and of_lse <= LSE_ERROR,
    }


def _scratch(step: int, rows: int, splits: int) -> int:
    """Floats of scratch that a step of the ladder asks for (`scratch_floats` of its files)."""
    if step < 2:
        return rows * max(ODD.kv_lens)
    return splits * rows * (LATENT_DIM + 1) if step >= FIRST_SPLIT else 0


_RUN: dict[str, Callable[..., Row]] = {"merge": _merge, "planner": _planner, "ladder": _ladder}


def rows(say: Callable[[str], None]) -> Iterator[Row]:
    """A record of all cases."""
    yield head_row("cuda", "cpu", len(names()))
    for name in names():
        row = run_case(name)
        say(f"{row['status']} {name}")
        yield row
