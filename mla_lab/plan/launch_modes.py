"""Launch modes of our kernels: tile scheduler and merge of the partials, each with its own costs.

| launch mode | kernel | tile scheduler | merge of the partials |
|---|---|---|---|
| keep_ab_persistent | `cute/keep_ab_sm90` | persistent, tiles of a plan | cooperative |
| swap_ab_cluster | `cute/swap_ab_sm90` | static grid, a cluster splits the KV | cooperative |
| swap_ab_ll | `cute/swap_ab_sm90` | static grid, one CTA a worker | LL protocol |
| swap_ab_ll_m8 | `cute/swap_ab_sm90` | as swap_ab_ll; 8 rows leave room for a third KV stage | LL |
| swap_ab_ll_multicast | `cute/swap_ab_sm90` | as swap_ab_ll; row tiles share KV by multicast | LL |
| swap_ab_persistent | `cute/swap_ab_sm90` | persistent, one CTA a worker | cooperative |

A static grid derives each work tile from block indices and the request's length (see `formula`);
every request has equally many pieces, and all workers must be resident at once. A persistent
scheduler balances requests of any lengths over the workers that the card runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import KernelConfig
from .gate import LEAST_BLOCKS
from .self_schedule import COSTS, Costs

#: tokens of a page that TMA boxes fit: the swizzle repeats every 8 rows, and 8 would do at half the
#: rate
PAGE_SIZES = (16, 32, 64, 128)
#: operands of the matrix products: both in 16 bits as they are stored; a 16-bit query as hi + lo
#: of two e4m3 terms over a cache of e4m3; both in e4m3
SIXTEEN_BIT, QUERY_HI_LO, E4M3 = "sixteen_bit", "query_hi_lo", "e4m3"
#: (query, cache) that kernels take
FORMATS = {
    ("bf16", "bf16"): SIXTEEN_BIT,
    ("fp16", "fp16"): SIXTEEN_BIT,
    ("bf16", "e4m3"): QUERY_HI_LO,
    ("bf16", "fp8_656"): QUERY_HI_LO,
    ("e4m3", "e4m3"): E4M3,
}
#: output types by operands
OUTS = {
    SIXTEEN_BIT: ("bf16", "fp16"),
    QUERY_HI_LO: ("bf16", "fp16"),
    E4M3: ("bf16", "fp16", "e4m3"),
}

#: (launch mode, query, cache, tile) that is not compiled: it would spill registers
MISSING = {
    ("swap_ab_persistent", "bf16", "e4m3", (32, 1)),
    ("swap_ab_persistent", "bf16", "fp8_656", (32, 1)),
}


@dataclass(frozen=True)
class LaunchMode:
    """One launch mode, and the (tile rows, CTAs of a cluster) that it is compiled for."""

    name: str
    kernel: str
    #: for 16-bit operands
    tiles: tuple[tuple[int, int], ...]
    #: options of the kernel's configuration
    options: tuple[tuple[str, int], ...] = ()
    #: for a 16-bit query over a cache of e4m3
    hi_lo_tiles: tuple[tuple[int, int], ...] = ()
    e4m3_tiles: tuple[tuple[int, int], ...] = ()

    def tiles_for(self, q_dtype: str, kv_format: str) -> tuple[tuple[int, int], ...]:
        """Tiles that are compiled for a query and a cache of these formats. Formats that no kernel
        takes are planned like 16-bit ones.
        """
        tiles = {QUERY_HI_LO: self.hi_lo_tiles, E4M3: self.e4m3_tiles}
        found = tiles.get(FORMATS.get((q_dtype, kv_format), SIXTEEN_BIT), self.tiles)
        return tuple(t for t in found if (self.name, q_dtype, kv_format, t) not in MISSING)

    @property
    def key(self) -> tuple[str, str]:
        """Kernel and name, by which cost constants are recorded."""
        return self.kernel, self.name

    @property
    def formula(self) -> bool:
        """True for a static grid: work tiles follow from block indices and lengths (`formula`)."""
        return bool(dict(self.options).get("grid", 0))

    @property
    def pair(self) -> int:
        """Neighbouring row tiles whose workers form one cluster and share KV by multicast."""
        return dict(self.options).get("pair", 1)


KEEP_AB_PERSISTENT = LaunchMode(
    "keep_ab_persistent",
    "cute/keep_ab_sm90",
    ((64, 1), (128, 2)),
    hi_lo_tiles=((64, 1), (128, 2)),
    e4m3_tiles=((64, 1), (128, 2)),
)
#: a cluster splits the KV of short requests
SWAP_AB_CLUSTER = LaunchMode(
    "swap_ab_cluster",
    "cute/swap_ab_sm90",
    ((8, 8), (8, 16), (16, 8)),
    (("fused_merge", 2), ("grid", 1)),
    e4m3_tiles=((8, 8),),
)
#: 32 rows, where two row tiles of 16 would read the same keys twice
SWAP_AB_LL = LaunchMode(
    "swap_ab_ll",
    "cute/swap_ab_sm90",
    ((16, 1), (32, 1)),
    (("fused_merge", 3), ("grid", 1)),
    hi_lo_tiles=((16, 1), (32, 1)),
    e4m3_tiles=((16, 1), (32, 1)),
)
SWAP_AB_LL_M8 = LaunchMode("swap_ab_ll_m8", "cute/swap_ab_sm90", ((8, 1),), SWAP_AB_LL.options)
SWAP_AB_LL_MULTICAST = LaunchMode(
    "swap_ab_ll_multicast",
    "cute/swap_ab_sm90",
    ((16, 1),),
    (*SWAP_AB_LL.options, ("pair", 2)),
    e4m3_tiles=((64, 1),),
)
SWAP_AB_PERSISTENT = LaunchMode(
    "swap_ab_persistent",
    "cute/swap_ab_sm90",
    ((16, 1),),
    (("fused_merge", 2),),
    hi_lo_tiles=((16, 1), (32, 1)),
    e4m3_tiles=((16, 1), (32, 1)),
)
LAUNCH_MODES = (
    KEEP_AB_PERSISTENT,
    SWAP_AB_CLUSTER,
    SWAP_AB_LL,
    SWAP_AB_LL_M8,
    SWAP_AB_LL_MULTICAST,
    SWAP_AB_PERSISTENT,
)
#: names of the launch modes in sweep records up to 2026-11-22
FORMER_NAMES = {
    "rows": KEEP_AB_PERSISTENT.name,
    "grid": SWAP_AB_CLUSTER.name,
    "mail": SWAP_AB_LL.name,
    "deep": SWAP_AB_LL_M8.name,
    "pair": SWAP_AB_LL_MULTICAST.name,
    "walk": SWAP_AB_PERSISTENT.name,
}


def keep_ab_tiles(q_dtype: str, kv_format: str, page_size: int) -> tuple[tuple[int, int], ...]:
    """Tiles of keep_ab. Without the cluster of two in e4m3 over pages shorter than a KV tile, where
    the producer warp has too few registers for the copies.
    """
    tiles = KEEP_AB_PERSISTENT.tiles_for(q_dtype, kv_format)
    if FORMATS.get((q_dtype, kv_format)) == E4M3 and page_size < KernelConfig.tile_kv:
        return tiles[:1]
    return tiles


def in_waves(config: KernelConfig) -> bool:
    """True if a launch of whole requests may have more workers than are resident at once: no worker
    waits for another one, and the launch is not cooperative.
    """
    return (config.kernel, config.q_dtype, config.tile_rows) == (SWAP_AB_LL.kernel, "e4m3", 64)


def mode_of(config: KernelConfig) -> str:
    """Name of the launch mode of `config`."""
    if config.kernel != SWAP_AB_LL.kernel:
        return KEEP_AB_PERSISTENT.name
    if not config.option("grid"):
        return SWAP_AB_PERSISTENT.name
    if config.option("pair", 1) > 1:
        return SWAP_AB_LL_MULTICAST.name
    if config.option("fused_merge", 1) != 3:
        return SWAP_AB_CLUSTER.name
    return SWAP_AB_LL_M8.name if config.tile_rows == 8 else SWAP_AB_LL.name


def costs_of(config: KernelConfig) -> Costs:
    """What a persistent build weighs when its workers find their tiles."""
    mode = mode_of(config)
    if mode == KEEP_AB_PERSISTENT.name and config.option("gather"):
        e4m3 = config.q_dtype == "e4m3"
        return replace(COSTS[mode], deals=False) if e4m3 else COSTS["keep_ab_gather"]
    dual = config.option("dual")
    return replace(COSTS[mode], least=LEAST_BLOCKS[dual]) if dual else COSTS[mode]


def modes_of(kernel: str) -> tuple[LaunchMode, ...]:
    """The launch modes of one kernel."""
    return tuple(mode for mode in LAUNCH_MODES if mode.kernel == kernel)


def find_mode(kernel: str, name: str) -> LaunchMode | None:
    """The launch mode of that name, or None where `kernel` has none such."""
    return next((mode for mode in modes_of(kernel) if mode.name == name), None)
