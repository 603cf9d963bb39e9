"""The device planner's arithmetic, compiled for the host and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from mla_lab.backends.cuda.ops import DevicePlanner
from mla_lab.core.problem import Problem
from mla_lab.core.resources import kernels_dir
from mla_lab.jit.toolchain import find_cxx

#: rows around the tiles, to which nothing is written
ROOM = 64
POINTER = ctypes.POINTER(ctypes.c_int32)


class Params(ctypes.Structure):
    """`mla::planner::Params`."""

    _fields_ = (
        ("seq_lens", POINTER),
        ("q_begin", POINTER),
        *((n, ctypes.c_int32) for n in ("batch", "total_q", "heads", "tile_rows", "tile_kv")),
        ("workers", ctypes.c_int32),
        *((n, ctypes.c_int32) for n in ("split_blocks", "max_splits", "half_blocks")),
        ("tiles", POINTER),
        ("worker_begin", POINTER),
        ("counts", POINTER),
        *((f"{n}_capacity", ctypes.c_int32) for n in ("tile", "slot", "group")),
    )


@dataclass
class HostPlan:
    """What the planner wrote."""

    tiles: np.ndarray
    worker_begin: np.ndarray
    counts: np.ndarray


def build(folder: Path) -> ctypes.CDLL:
    """Compile tests/planner_host.cc into `folder`."""
    library = folder / "planner_host.so"
    source = Path(__file__).with_name("planner_host.cc")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [str(find_cxx()), *flags, f"-I{kernels_dir()}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def plan_on_host(
    library: ctypes.CDLL,
    planner: DevicePlanner,
    problem: Problem,
    capacity: tuple[int, int, int] | None = None,
) -> HostPlan:
    """Run the planner for `problem`, with the capacities that `planner` promises to suffice."""
    sums = [0, *accumulate(problem.q_lens)]
    return plan_of(library, planner, problem.kv_lens, sums, capacity)


def plan_of(
    library: ctypes.CDLL,
    planner: DevicePlanner,
    lengths: Sequence[int],
    sums: Sequence[int],
    capacity: tuple[int, int, int] | None = None,
) -> HostPlan:
    """The same of any lengths and prefix sums. Nothing is written outside of the plan."""
    tiles, slots, groups = capacity or planner.capacity
    seq_lens, q_begin = (np.array(words, dtype=np.int32) for words in (lengths, sums))
    room = np.full((tiles + 2 * ROOM, 8), -7, dtype=np.int32)
    plan = HostPlan(
        room[ROOM : ROOM + tiles],
        np.full(planner.num_workers + 1, -7, dtype=np.int32),
        np.full(4, -7, dtype=np.int32),
    )

    def at(array: np.ndarray) -> object:
        return array.ctypes.data_as(POINTER)

    params = Params(
        at(seq_lens), at(q_begin), len(seq_lens), planner.most_tokens, planner.heads,
        planner.tile_rows, planner.tile_kv, planner.num_workers, planner.split_blocks,
        planner.most_splits, planner.half_blocks, at(plan.tiles), at(plan.worker_begin),
        at(plan.counts), tiles, slots, groups,
    )  # fmt: skip
    library.plan_on_host(ctypes.byref(params))
    assert (room[:ROOM] == -7).all() and (room[ROOM + tiles :] == -7).all()
    return plan
