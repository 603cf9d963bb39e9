"""Shipped builds that tests compile: what one test wants of a build is asked of one that another
compiles anyway, and the sample of test_jit_shipped begins with these.

Page sizes differ where a test does not depend on them, so that each is in one of these builds.
"""

from __future__ import annotations

from mla_lab.plan.config import KernelConfig


def keep_ab(fields: dict[str, str | int], **options: int) -> KernelConfig:
    """A shipped build of keep_ab."""
    return _build("cute/keep_ab_sm90", fields, options)


def swap_ab(fields: dict[str, str | int], **options: int) -> KernelConfig:
    """A shipped build of swap_ab."""
    return _build("cute/swap_ab_sm90", fields, options)


def _build(kernel: str, fields: dict[str, str | int], options: dict[str, int]) -> KernelConfig:
    given = tuple(sorted((options | {"shaped": 1}).items()))
    return KernelConfig(kernel, **fields, options=given)  # type: ignore[arg-type]


E4M3: dict[str, str | int] = {"q_dtype": "e4m3", "kv_format": "e4m3"}

KEEP_AB = keep_ab({})
KEEP_AB_E4M3 = keep_ab(E4M3 | {"page_size": 32})
#: ranks of a cluster exchange partials, and splits merge behind counters
SWAP_AB_CLUSTER = swap_ab({"tile_rows": 8, "cluster": 8, "mask": "causal"}, fused_merge=2, grid=1)
#: workers find their tiles
SWAP_AB_WALK = swap_ab({"tile_rows": 16, "mask": "causal", "page_size": 128}, fused_merge=2)
SWAP_AB_WALK_656 = swap_ab(
    {"kv_format": "fp8_656", "tile_rows": 16, "mask": "causal", "page_size": 16}, fused_merge=2
)
#: splits merge without counters
SWAP_AB_LL = swap_ab({"tile_rows": 16, "mask": "causal"}, fused_merge=3, grid=1)
SWAP_AB_LL_E4M3 = swap_ab(E4M3 | {"tile_rows": 16, "mask": "causal"}, fused_merge=3, grid=1)
#: slices of a merge may be longer than what all threads take at a time
SWAP_AB_SKIP = swap_ab(E4M3 | {"tile_rows": 32, "mask": "tree"}, fused_merge=2, skip=1)

SHARED = (
    KernelConfig("cute/empty"),
    KernelConfig("cuda/ladder"),
    KernelConfig("cuda/planner"),
    KEEP_AB,
    keep_ab({}, dual=1),
    KEEP_AB_E4M3,
    SWAP_AB_CLUSTER,
    SWAP_AB_WALK,
    SWAP_AB_LL,
    SWAP_AB_LL_E4M3,
    SWAP_AB_SKIP,
)  # fmt: skip
