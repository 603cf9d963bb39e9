"""The ways to launch our kernels, among which `choose` picks; each has constants of its own.

| way | kernel | work | partials |
|---|---|---|---|
| rows | `cute/keep_ab_sm90` | a plan's tiles | a share of each merge to all who split the row tile
| | grid | `cute/swap_ab_sm90` | a formula; a cluster divides the keys | so too |
| mail | `cute/swap_ab_sm90` | a formula, one CTA a worker | words that are their own flags |
| deep | `cute/swap_ab_sm90` | as mail; 8 rows leave room for a third KV tile in flight | as mail |
| pair | `cute/swap_ab_sm90` | as mail; two row tiles share every KV tile | as mail |
| walk | `cute/swap_ab_sm90` | a plan's tiles, one CTA a worker | as rows |

A formula (see `formula`) cuts every request into as many pieces, and wants all of its workers on
the card at once; a plan's tiles balance requests of any lengths over those that there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import KernelConfig

#: (query, cache) that kernels take, and what that makes of the products' operands: sixteen bits as
#: they are stored, a query of sixteen bits split into two terms of the cache's eight, or eight of
#: both
STORED, SPLIT, EIGHT = "stored", "split", "eight"
FORMATS = {
    ("bf16", "bf16"): STORED,
    ("fp16", "fp16"): STORED,
    ("bf16", "e4m3"): SPLIT,
    ("bf16", "fp8_656"): SPLIT,
    ("e4m3", "e4m3"): EIGHT,
}
#: formats of the result
OUTS = {STORED: ("bf16", "fp16"), SPLIT: ("bf16", "fp16"), EIGHT: ("bf16", "fp16", "e4m3")}

#: (way, query, cache, tile) that registers do not suffice for, as the record's last words would lie
#: in local memory
MISSING = {("walk", "bf16", "e4m3", (32, 1)), ("walk", "bf16", "fp8_656", (32, 1))}


@dataclass(frozen=True)
class Way:
    """One way, and the (tile rows, CTAs of a cluster) that it is compiled for."""

    name: str
    kernel: str
    tiles: tuple[tuple[int, int], ...]
    #: of the kernel's configuration
    options: tuple[tuple[str, int], ...] = ()
    #: the same for a query that is split, and for e4m3 throughout
    split: tuple[tuple[int, int], ...] = ()
    eight: tuple[tuple[int, int], ...] = ()

    def tiles_for(self, q_dtype: str, kv_format: str) -> tuple[tuple[int, int], ...]:
        """What is compiled for a query and a cache of these formats; formats that no kernel takes
        are planned like those that are stored as they are used.
        """
        tiles = {SPLIT: self.split, EIGHT: self.eight}
        found = tiles.get(FORMATS.get((q_dtype, kv_format), STORED), self.tiles)
        return tuple(t for t in found if (self.name, q_dtype, kv_format, t) not in MISSING)

    @property
    def formula(self) -> bool:
        """Work follows from block indices and lengths; no plan is in memory."""
        return bool(dict(self.options).get("grid", 0))

    @property
    def pair(self) -> int:
        """Neighbouring row tiles whose workers run as one cluster."""
        return dict(self.options).get("pair", 1)


#: clusters divide the keys of short requests; 32 rows go where two row tiles of 16 would read the
#: same keys twice
ROWS = Way(
    "rows",
    "cute/keep_ab_sm90",
    ((64, 1), (128, 2)),
    split=((64, 1), (128, 2)),
    eight=((64, 1), (128, 2)),
)
GRID = Way(
    "grid",
    "cute/swap_ab_sm90",
    ((8, 8), (8, 16), (16, 8)),
    (("fused_merge", 2), ("grid", 1)),
    eight=((8, 8),),
)
MAIL = Way(
    "mail",
    "cute/swap_ab_sm90",
    ((16, 1), (32, 1)),
    (("fused_merge", 3), ("grid", 1)),
    split=((16, 1), (32, 1)),
    eight=((16, 1), (32, 1)),
)
DEEP = Way("deep", "cute/swap_ab_sm90", ((8, 1),), MAIL.options)
PAIR = Way("pair", "cute/swap_ab_sm90", ((16, 1),), (*MAIL.options, ("pair", 2)), eight=((64, 1),))
WALK = Way(
    "walk",
    "cute/swap_ab_sm90",
    ((16, 1),),
    (("fused_merge", 2),),
    split=((16, 1), (32, 1)),
    eight=((16, 1), (32, 1)),
)
WAYS = (ROWS, GRID, MAIL, DEEP, PAIR, WALK)


def rows_tiles(q_dtype: str, kv_format: str, page_size: int) -> tuple[tuple[int, int], ...]:
    """Tiles of the way "rows": of e4m3 in pages of less than a tile no pair, whose loading warp has
    too few registers for them.
    """
    tiles = ROWS.tiles_for(q_dtype, kv_format)
    if FORMATS.get((q_dtype, kv_format)) == EIGHT and page_size < KernelConfig.tile_kv:
        return tiles[:1]
    return tiles


def in_waves(config: KernelConfig) -> bool:
    """Whether workers of whole requests may be more than run at once: nobody waits for another, and
    the launch is not cooperative.
    """
    return (config.kernel, config.q_dtype, config.tile_rows) == (MAIL.kernel, "e4m3", 64)


def way_of(config: KernelConfig) -> str:
    """The name of the way that `config` goes."""
    if config.kernel != MAIL.kernel:
        return ROWS.name
    if not config.option("grid"):
        return WALK.name
    if config.option("pair", 1) > 1:
        return PAIR.name
    if config.option("fused_merge", 1) != 3:
        return GRID.name
    return DEEP.name if config.tile_rows == 8 else MAIL.name


def ways_of(kernel: str) -> tuple[Way, ...]:
    """The ways of one kernel."""
    return tuple(way for way in WAYS if way.kernel == kernel)


def find_way(kernel: str, name: str) -> Way | None:
    """The way of that name, if the kernel goes it."""
    return next((way for way in ways_of(kernel) if way.name == name), None)
