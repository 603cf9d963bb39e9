"""Random and awkward batches for the device planner, on the host and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mla_lab.backends.cuda.ops import ANY_ROWS, DevicePlanner
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan, make_plan


def random_case(rng: np.random.Generator) -> tuple[DevicePlanner, Problem]:
    """A planner, and a batch within its bounds: empty requests, no keys, ragged lengths."""
    batch = int(rng.choice([1, 2, 3, 7, 32, 33, 100, 300]))
    heads = int(rng.choice([1, 7, 16, 24, 64, 100, 128]))
    longest = int(rng.choice([1, 64, 65, 1000, 8192, 131072]))
    q_most = int(rng.choice([1, 1, 2, 5, 8]))
    ragged = rng.random() < 0.5
    q_lens = rng.integers(0, q_most + 1, batch) if ragged else np.full(batch, q_most)
    kv_lens = rng.integers(0, longest + 1, batch)
    kv_lens[rng.random(batch) < 0.1] = 0
    if rng.random() < 0.3:
        kv_lens[:] = longest
    planner = DevicePlanner(
        heads=heads,
        max_batch=batch,
        max_q_len=q_most,
        max_kv_len=longest,
        tile_rows=int(rng.choice([8, 16, 32, 64, 128])),
        tile_kv=int(rng.choice([32, 64, 128])),
        num_workers=int(rng.choice([1, 2, 5, 16, 66, 132])),
        policy=str(rng.choice(["greedy", "fixed_size"])),
        overhead=int(rng.choice([0, 1, 5])),
        split_blocks=int(rng.choice([1, 2, 16])),
        max_splits=int(rng.choice([1, 3, 32])),
        half_blocks=int(rng.choice([0, 0, 3, 64])),
        least_rows=int(rng.choice([1, 1, heads + 1])),
        most_rows=int(rng.choice([ANY_ROWS, ANY_ROWS, 2 * heads])),
    )
    return planner, Problem(tuple(q_lens.tolist()), tuple(kv_lens.tolist()), heads)


def host_plan(planner: DevicePlanner, problem: Problem) -> Plan:
    """What `make_plan` says about the same batch."""
    rows = [q_len * problem.heads for q_len in problem.q_lens]
    served = [planner.least_rows <= n <= planner.most_rows for n in rows]
    q_lens = [q_len if own else 0 for q_len, own in zip(problem.q_lens, served, strict=True)]
    problem = replace(problem, q_lens=tuple(q_lens))
    knobs: dict[str, Any] = {"overhead": planner.overhead}
    if planner.policy == "fixed_size":
        names = ("split_blocks", "max_splits", "half_blocks")
        knobs = {name: getattr(planner, name) for name in names}
    return make_plan(
        problem,
        tile_rows=planner.tile_rows,
        tile_kv=planner.tile_kv,
        num_workers=planner.num_workers,
        policy=planner.policy,
        **knobs,
    )
