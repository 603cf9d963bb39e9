"""How far keep_ab in e4m3 adds up a piece in the tensor cores alone, and where it adds up the rest.

See `cute.keep_ab_sm90.fp8.promotion`.
"""

from __future__ import annotations

from ..core.problem import Problem
from .config import KernelConfig

#: KV tiles of 64 keys after which the kernel promotes O to fp32. At 65,536 Gaussian keys its error
#: is 1.09 times that of torch with the same rounding; with twice as many tiles it was 1.26 (H200,
#: 2026-11-29, `data/notes/kernel_attempts.jsonl`)
PROMOTED_TILES = 128
PROMOTED_KEYS = PROMOTED_TILES * 64
#: the kernel, its operands (query, cache), and the least rows of its row tiles
KERNEL, OPERANDS, LEAST_ROWS = "cute/keep_ab_sm90", ("e4m3", "e4m3"), 64


def promoted_slots(
    problem: Problem, tile_rows: int, workers: int, config: KernelConfig | None
) -> int:
    """Slots of the workspace, behind those of the partials, for promoted O: one a worker. Without
    `config` any kernel with such row tiles may run.
    """
    formats = (problem.q_dtype, problem.kv_format)
    promotes = formats == OPERANDS and tile_rows >= LEAST_ROWS
    return workers if promotes and (config is None or config.kernel == KERNEL) else 0
