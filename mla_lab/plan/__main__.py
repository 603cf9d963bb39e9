"""`python -m mla_lab.plan`: how long planning takes, against the 10 ms that a decode step allows.

1,024 ragged requests, 128 heads, one worker an SM of an H200; median of 9 plans a policy. The time
is that of the planning thread, so that other load on the machine does not count.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import numpy as np

from ..core.problem import Problem
from .schedule import POLICIES, make_plan

REQUESTS, HEADS, MOST_KV, ROUNDS = 1024, 128, 16384, 9
BUDGET_MS = 10.0


def ragged_problem() -> Problem:
    """`REQUESTS` requests with KV lengths uniform from 1 to `MOST_KV`."""
    lens = np.random.default_rng(0).integers(1, MOST_KV + 1, REQUESTS)
    return Problem((1,) * REQUESTS, tuple(lens.tolist()), HEADS)


def planning_ms(policy: str, problem: Problem) -> list[float]:
    """Milliseconds of each of `ROUNDS` plans, after one that is not counted."""
    make_plan(problem, policy=policy)
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        make_plan(problem, policy=policy)
        times.append((time.thread_time() - start) * 1e3)
    return times


def main() -> int:
    """Print one line a policy; 1 if any median is over the budget."""
    problem = ragged_problem()
    print(f"{REQUESTS} requests, {HEADS} heads, kv 1 to {MOST_KV}: median of {ROUNDS} plans")
    slowest = 0.0
    for policy in POLICIES:
        took = median(planning_ms(policy, problem))
        slowest = max(slowest, took)
        print(f"  {policy:<12} {took:6.2f} ms  {took / BUDGET_MS:5.2f} of {BUDGET_MS:.0f} ms")
    return int(slowest >= BUDGET_MS)


if __name__ == "__main__":
    sys.exit(main())
