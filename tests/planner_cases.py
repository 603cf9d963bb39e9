"""Random and awkward batches for the device planner, on the host and on a GPU."""

from __future__ import annotations

import numpy as np

from mla_lab.backends.cuda.ops import DevicePlanner
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
        split_blocks=int(rng.choice([1, 2, 16])),
        max_splits=int(rng.choice([1, 3, 32])),
        half_blocks=int(rng.choice([0, 0, 3, 64])),
    )
    return planner, Problem(tuple(q_lens.tolist()), tuple(kv_lens.tolist()), heads)


def host_plan(planner: DevicePlanner, problem: Problem) -> Plan:
    """What `make_plan` says about the same batch."""
    return make_plan(
        problem,
        tile_rows=planner.tile_rows,
        tile_kv=planner.tile_kv,
        num_workers=planner.num_workers,
        policy="fixed_size",
        split_blocks=planner.split_blocks,
        max_splits=planner.max_splits,
        half_blocks=planner.half_blocks,
    )
