"""Bytes of local memory that a build may keep: none, but for the builds that are named here.

Each of these was seen to keep so much since its CTAs find their own work tiles (nvcc 13.0,
cutlass-dsl 4.8.1, 2026-11-23): a word or two that is stored and loaded once a tile or once a merge,
in the tile scheduler, the epilogue or the merge, in a mainloop where it says so; over gathered
656-byte tokens four words of the producer warps. The list is to become empty again; no build is
added unseen.
"""

from __future__ import annotations

from mla_lab.jit.code_size import ROOM
from mla_lab.plan.config import KernelConfig

#: bytes of machine code of the largest shipped builds by kernel (2026-11-24): no build grows unseen
MOST_CODE = {
    "cute/keep_ab_sm90": 157_824,
    "cute/swap_ab_sm90": 181_760,
    "cuda/xqa": 171_520,
}
#: of a dual build, which holds two mainloops
MOST_DUAL_CODE = 194_560


def most_code(config: KernelConfig) -> int:
    """Bytes of machine code of `config` at most."""
    if config.option("dual"):
        return MOST_DUAL_CODE
    return MOST_CODE.get(config.kernel, ROOM)


def allowed_stack(config: KernelConfig) -> int:
    """Bytes of stack of `config` at most."""
    e4m3 = config.q_dtype == config.kv_format == "e4m3"
    small_pages = config.page_size in (16, 32)
    if config.kernel == "cute/keep_ab_sm90":
        if config.option("gather"):  # one word that lies from a CTA's begin to its end
            return 8 if (config.q_dtype, config.kv_format) == ("bf16", "e4m3") else 0
        if config.kv_format == "fp8_656":
            return 8 if config.cluster == 2 else 0
        # with pages of 128 two words of softmax, in one of its three copies (2026-11-26)
        large_pages = config.page_size == 128 and config.kv_format == "bf16"
        eight_bits = e4m3 and (config.cluster == 2 or small_pages)
        return 8 if eight_bits or (large_pages and config.cluster == 2) else 0
    if config.kernel != "cute/swap_ab_sm90":
        return 0
    if not config.option("grid"):
        bf16 = config.q_dtype == config.kv_format == "bf16"
        tree = bf16 and config.mask == "tree"
        return 8 if config.tile_rows == 16 and (tree or (e4m3 and config.option("skip"))) else 0
    if config.kv_format == "fp8_656" and config.option("gather") == 2:
        return 16 if config.tile_rows == 32 and config.option("features") else 0
    return 8 if e4m3 and small_pages and config.option("fused_merge") == 3 else 0
