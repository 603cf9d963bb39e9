"""Bytes of local memory that a build may keep: none, but for the builds that are named here.

Seen on all shipped builds (nvcc 13.0, cutlass-dsl 4.8.1, 2026-11-26; `data/records/builds.jsonl`).
The list is to become empty; no build is added unseen.
"""

from __future__ import annotations

from mla_lab.jit.code_size import ROOM
from mla_lab.plan.config import KernelConfig

#: bytes of machine code of the largest shipped builds by kernel (2026-11-26): no build grows unseen
MOST_CODE = {
    "cute/keep_ab_sm90": 157_824,
    "cute/swap_ab_sm90": 181_760,
    "cuda/xqa": 171_520,
}
#: of a dual build, which holds two mainloops
MOST_DUAL_CODE = 194_560
#: of a build whose requests are cut into fixed pieces: the rule, and two ways to merge
MOST_PIECES_CODE = 196_352


def most_code(config: KernelConfig) -> int:
    """Bytes of machine code of `config` at most."""
    if config.option("dual"):
        return MOST_DUAL_CODE
    if config.option("pieces"):
        return MOST_PIECES_CODE
    return MOST_CODE.get(config.kernel, ROOM)


def allowed_stack(config: KernelConfig) -> int:
    """Bytes of stack of `config` at most."""
    bf16 = config.q_dtype == config.kv_format == "bf16"
    e4m3 = config.q_dtype == config.kv_format == "e4m3"
    if config.kernel == "cute/keep_ab_sm90":
        # two words of softmax, in one of its three copies
        return 8 if bf16 and config.page_size == 128 and config.cluster == 2 else 0
    if config.kernel != "cute/swap_ab_sm90" or config.option("grid") or config.cluster > 1:
        return 0
    if e4m3 and config.option("pieces") and config.tile_rows == 32:
        return 96  # the producer warp, with 40 registers, while it finds the next piece
    # a word of a worker's plan and a constant, stored once a tile
    plain = not (config.option("pieces") or config.option("skip"))
    return 8 if bf16 and config.tile_rows == 16 and config.mask == "tree" and plain else 0
