"""Predicted time of each step of the ladder, counted by hand before it was measured.

Steps 0 to 8 were counted before any of them had run; step 9 was added after those figures, and is
counted from the measured time of step 8.

Each unit that may limit a step has the clocks of its work; the largest is the prediction. Steps 0
to 3 are counted per pair (one row, one key), steps 4 to 9 per tile of 64 rows x 64 keys. The
reasons stand beside the counts below. Cache hits and stalls are not counted; notebook 53 discusses
where prediction and measurement differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backends.cuda.ladder import FIRST_SPLIT, LOOK_AHEAD, TILE_KEYS, TILE_ROWS, num_splits
from ..core.gpu import H200, Gpu
from ..core.problem import Problem

#: a warp's instructions that an SM issues a clock
ISSUE = 4.0
#: bytes a clock and SM: shared memory, and what L2 delivers to one SM
SHARED_BYTES, L2_BYTES = 128.0, 64.0
#: bytes a clock that L2 delivers to all SMs together: about 5.5 TB/s at 1.83 GHz
L2_ALL_BYTES = 3000.0
#: dense bf16 operations a clock and SM: the rate of wgmma; mma.sync reaches about 60 % of it
TENSOR_OPERATIONS = 4096 * 0.6
#: latency in clocks of a read from L2, of one from shared memory, and of a barrier of 8 warps
L2_LATENCY, SHARED_LATENCY, BARRIER = 500.0, 30.0, 50.0
#: latency in clocks of five dependent shuffles, and of an exponential
SHUFFLES, EXPONENTIAL = 5 * 25.0, 60.0
LAUNCH_US = 2.0
TOKEN_BYTES = 1152
TILE_BYTES = TILE_KEYS * TOKEN_BYTES


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a whole call, and the unit that limits it."""

    us: float
    limit: str


@dataclass(frozen=True)
class PairCost:
    """A step of one row at a time. Clocks of an SM a pair, by unit; `chain` clocks a key of a row,
    the latency that too few rows cannot hide.
    """

    clocks: dict[str, float]
    l2_bytes: float
    chain: float
    launches: int
    #: blocks of one request; None: always more blocks than SMs
    rows_per_block: int | None = None


#: 0: a lane's key is 1152 bytes from its neighbour's, so that a warp's load is 32 lookups in L1,
#:    576 times; `values` issues about 40 instructions for each of 16 warps, a division by the page
#:    size among them. The chain is that of `values`, four loads in flight.
#: 1: 18 columns a lane: 18 FMAs, 18 unpackings, 10 for the shuffles, some 40 for the address,
#:    twice (scores, and values with 2 warps a pair). Keys and values come through L2 once each.
#: 2: the same once, and 32 for the running output, 15 for the softmax. Four rows of a block read
#:    the same key at about the same time: L1 should serve three of them.
#: 3: the address is computed once for 16 rows; a sixteenth of the L2 reads.
PAIR_COSTS = {
    0: PairCost({"L1 lookups": 576.0, "issue": 16 * 40 / ISSUE}, 0.0, L2_LATENCY / 4, 3),
    1: PairCost({"issue": (86 + 2 * 45) / ISSUE}, TOKEN_BYTES + 1024, L2_LATENCY / 4, 3),
    2: PairCost(
        {"issue": 133 / ISSUE}, TOKEN_BYTES / 4, L2_LATENCY + SHUFFLES + 2 * EXPONENTIAL, 1, 4
    ),
    3: PairCost(
        {"issue": 100 / ISSUE, "shared memory": TOKEN_BYTES / SHARED_BYTES},
        TOKEN_BYTES / 16,
        SHARED_LATENCY + SHUFFLES + 2 * EXPONENTIAL,
        1,
        16,
    ),
}
#: ldmatrix bytes of a tile for all warps, by the number of warps that divide the rows: see step 8
MATRIX_BYTES = {4: (432 + 272) * 1024, 2: (432 + 160) * 1024}
#: bank conflicts of a read whose eight rows lie in the same banks
CONFLICT = 8
#: row max, softmax weights and rescale: about 300 instructions of each of 8 warps, and 4 barriers
SOFTMAX_CLOCKS = 8 * 300 / ISSUE + 4 * BARRIER
#: a tile of step 8 when it first ran (254.6 us for 32 tiles, NVIDIA H200, 2026-11-20), and what of
#: it the addresses should be: 18 page ids, four in flight, and 45 instructions for each
STEP8_MEASURED_CLOCKS = 14_445.0
ADDRESS_CLOCKS = 18 / 4 * L2_LATENCY + 18 * 45 * 8 / ISSUE
LOOK_AHEAD_GAIN = STEP8_MEASURED_CLOCKS / (STEP8_MEASURED_CLOCKS - ADDRESS_CLOCKS)


def predict(step: int, problem: Problem, gpu: Gpu = H200) -> Prediction:
    """Predicted time of `problem` by one step; every row sees all of its request's keys."""
    clock = gpu.clock_mhz
    if step in PAIR_COSTS:
        clocks, limit = _by_pairs(PAIR_COSTS[step], problem, gpu)
        return Prediction(clocks / clock + PAIR_COSTS[step].launches * LAUNCH_US, limit)
    tile, limit = _tile_clocks(step)
    splits = num_splits(step, problem, gpu)
    blocks = _blocks(problem, TILE_ROWS) * splits
    tiles = -(-max(problem.kv_lens) // (TILE_KEYS * splits))
    waves = -(-blocks // gpu.sms)
    query = L2_LATENCY + TILE_ROWS * TOKEN_BYTES / L2_BYTES
    us = waves * (query + tiles * tile) / clock + LAUNCH_US
    memory = problem.bytes() / (gpu.read_tbps * 1e6)
    if memory > us:
        us, limit = memory, "memory"
    if splits > 1:  # partials are written and read, and there is a second launch
        partials = 2 * splits * int(np.sum(problem.rows)) * 512 * 4
        us += partials / (L2_ALL_BYTES * clock) + LAUNCH_US
    return Prediction(us, limit)


def _by_pairs(cost: PairCost, problem: Problem, gpu: Gpu) -> tuple[float, str]:
    """Clocks of the slowest unit, and its name."""
    pairs = float(np.sum(problem.rows * np.asarray(problem.kv_lens)))
    busy = gpu.sms
    if cost.rows_per_block is not None:
        busy = min(busy, _blocks(problem, cost.rows_per_block))
    units = {name: pairs * clocks / busy for name, clocks in cost.clocks.items()}
    units["L2"] = pairs * cost.l2_bytes / L2_ALL_BYTES
    units["latency of one row"] = max(problem.kv_lens) * cost.chain
    limit = max(units, key=lambda name: units[name])
    return units[limit], limit


def _blocks(problem: Problem, rows: int) -> int:
    """Blocks of so many rows each, of one request's."""
    return int(np.sum(-(-problem.rows // rows)))


def _tile_clocks(step: int) -> tuple[float, str]:
    """Clocks of a tile of 64 x 64, and the unit with most of them."""
    down = 4 if step <= FIRST_SPLIT else 2
    turns = CONFLICT if step == 4 else 1
    if step == LOOK_AHEAD:
        return STEP8_MEASURED_CLOCKS / LOOK_AHEAD_GAIN, "latency"
    feeding = MATRIX_BYTES[down] * turns / SHARED_BYTES
    products = TILE_ROWS * TILE_KEYS * 2 * (576 + 512) / TENSOR_OPERATIONS
    compute = max(feeding, products) + SOFTMAX_CLOCKS
    copy = L2_LATENCY + TILE_BYTES / L2_BYTES
    limit = "bytes from shared memory" if feeding > products else "tensor cores"
    # before step 6 loads and computation do not overlap
    return (compute + copy if step < 6 else max(compute, copy)), limit
