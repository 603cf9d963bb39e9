"""Bounds of shipped builds: no local memory, and machine code that does not grow unseen.

Seen on all shipped builds (nvcc 13.0, cutlass-dsl 4.8.1, 2026-12-01; `data/records/builds.jsonl`).
"""

from __future__ import annotations

from mla_lab.jit.code_size import ROOM
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.promotion import KERNEL as PROMOTED
from mla_lab.plan.promotion import OPERANDS

#: bytes of machine code of the largest shipped builds by kernel, without functions behind it
#: (2026-12-01): no build grows unseen
MOST_CODE = {
    "cute/keep_ab_sm90": 116_864,
    "cute/swap_ab_sm90": 154_112,
    "cuda/xqa": 173_696,
}
#: of keep_ab in e4m3, which promotes O
MOST_PROMOTED_CODE = 115_088
#: of a dual build, which holds two mainloops
MOST_DUAL_CODE = 148_784
#: of a build whose requests are cut into fixed pieces: three ways to merge (2026-11-30)
MOST_PIECES_CODE = 107_680


def most_code(config: KernelConfig) -> int:
    """Bytes of machine code of `config` at most."""
    if config.option("dual"):
        return MOST_DUAL_CODE
    if config.option("pieces"):
        return MOST_PIECES_CODE
    if config.kernel == PROMOTED and (config.q_dtype, config.kv_format) == OPERANDS:
        return MOST_PROMOTED_CODE
    return MOST_CODE.get(config.kernel, ROOM)
