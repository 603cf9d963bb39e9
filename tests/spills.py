"""Bytes of local memory that a build may keep: none, but for the builds that are named here.

Each of these was seen to keep so much since its CTAs find their own work tiles (nvcc 13.0,
cutlass-dsl 4.8.1, 2026-11-22): a word or two that is stored and loaded once a tile or once a merge,
in the tile scheduler, the epilogue or the merge, never in a mainloop; in one kind twelve words of
the producer warp, which nobody has timed. The list is to become empty again; no build is added
unseen.
"""

from __future__ import annotations

from mla_lab.plan.config import KernelConfig


def allowed_stack(config: KernelConfig) -> int:
    """Bytes of stack of `config` at most."""
    walk = config.kernel == "cute/swap_ab_sm90" and not config.option("grid")
    bf16 = config.q_dtype == config.kv_format == "bf16"
    if walk and bf16 and config.tile_rows == 16:
        return 8 if config.mask == "tree" or config.option("features") else 0
    if walk and (config.q_dtype, config.kv_format, config.page_size) == ("bf16", "e4m3", 32):
        return 48  # of the producer warp
    if walk and config.q_dtype == "e4m3" and config.tile_rows == 16 and config.option("skip"):
        return 8
    keep_ab = config.kernel == "cute/keep_ab_sm90"
    if keep_ab and config.kv_format == "fp8_656":
        return 8 if (config.tile_rows, config.cluster) == (64, 1) else 0
    if keep_ab and bf16 and config.options == (("fused_merge", 0), ("shaped", 1)):
        return 8  # since the rule stands in it once (2026-11-23); nobody has timed it
    e4m3 = config.q_dtype == config.kv_format == "e4m3"
    return 8 if keep_ab and e4m3 and (config.cluster == 2 or config.out_dtype == "e4m3") else 0
