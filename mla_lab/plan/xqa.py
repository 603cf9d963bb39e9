"""The CUDA C++ decode kernel's builds, and how a launch of it cuts keys: values without a tensor.

Types and widths are compiled in, everything else is a launch argument. A row tile is 16 rows of
one request and KV head, times `row_tiles`; its splits follow from the request's length alone, so
that there is no plan in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..core.dims import LATENT_DIM, ROPE_DIM
from ..core.errors import unsupported
from .config import KernelConfig
from .workspace import MAX_GROUPS, WorkspaceLayout

KERNEL = "cuda/xqa"
MLA_DIMS = (LATENT_DIM + ROPE_DIM, LATENT_DIM)
#: widths of a key and of a value that it is written for
DIMS = (MLA_DIMS, (128, 128), (64, 64))
TYPES = {"bf16": 0, "fp16": 1, "e4m3": 2}
#: (query, cache)
FORMATS = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("e4m3", "e4m3"),
    ("bf16", "e4m3"),
    ("fp16", "e4m3"),
)
#: of builds that fetch a page id for each row: for values in pages of their own, which no other
#: kernel takes
SMALL_PAGES = (1, 2, 4, 8)
#: architectures with e4m3 MMA; the others convert to fp16 in registers, which is faster than the
#: emulation of ptxas and more precise
NATIVE_E4M3 = ("sm_89", "sm_120a")
#: architectures where MLA runs one block of 8 warps with 227 KB of shared memory an SM, not two of
#: 4
WHOLE_SM = ("sm_90a",)
TILE_ROWS = 16
#: architectures where a block may have two row tiles, which share the keys in shared memory
TWO_ROW_TILES = ("sm_90a",)
#: fewest blocks of two row tiles with which a launch still fills the card
LEAST_PAIRS = 12
#: splits begin at multiples of so many keys, for all types
TILE_KEYS = 64
#: fixed cost of a piece, in keys, and the fewest keys of a piece
PIECE_TOKENS, LEAST_TOKENS = 160, 256
MAX_SPLITS = 64
#: batch invariance: splits that depend on a request's own length alone
INVARIANT_TOKENS, INVARIANT_SPLITS = 1024, 32
#: blocks of a grid's y and z
MAX_BLOCKS = 65535


def config_for(
    dims: tuple[int, int],
    formats: tuple[str, str],
    arch: str,
    *,
    separate: bool = False,
    row_tiles: int = 1,
    small_pages: bool = False,
) -> KernelConfig:
    """The build for keys and values of `dims` in `formats`; options at their default are left out.

    separate: an MLA call whose values lie in other pages than its keys. small_pages: pages of
    `SMALL_PAGES`.
    """
    options = {}
    if dims != MLA_DIMS:
        options["qk_dim"] = dims[0]
    elif separate:
        options["shared_kv"] = 0
    for name, dtype in zip(("q_type", "kv_type"), formats, strict=True):
        if TYPES[dtype]:
            options[name] = TYPES[dtype]
    if formats == ("e4m3", "e4m3") and arch in NATIVE_E4M3:
        options["mma8"] = 1
    one_row_tile = dims == MLA_DIMS and not separate and row_tiles == 1
    if arch in WHOLE_SM and one_row_tile and formats[0] == formats[1]:
        options["whole_sm"] = 1
    if row_tiles > 1:
        options["row_tiles"] = row_tiles
    if small_pages:
        options["small_pages"] = 1
    return KernelConfig(KERNEL, options=tuple(options.items()))


def row_tiles_for(
    rows: int,
    formats: tuple[str, str],
    arch: str,
    *,
    separate: bool = False,
    requests: int | None = None,
) -> int:
    """Row tiles of a block for requests of `rows` rows a KV head: two on architectures where that
    was measured to be faster, if registers and shared memory suffice and enough blocks remain.
    requests: batch x KV heads; None under batch invariance.

    H200, 2026-11-20, two in place of one: B64 H128 kv 8192 bf16 864 us from 1099, e4m3 677 from
    853; GQA group 8 with 4 tokens 519 from 790; B1 H128 e4m3 63 from 41, hence the count of blocks.
    """
    if arch not in TWO_ROW_TILES or separate or formats[0] != formats[1] or rows <= TILE_ROWS:
        return 1
    pairs = -(-rows // (2 * TILE_ROWS))
    return 2 if requests is None or requests * pairs >= LEAST_PAIRS else 1


#: (dims, formats, rows) of the builds that ship; others are compiled at their first call
COMMON = (
    (MLA_DIMS, ("bf16", "bf16"), 1),
    (MLA_DIMS, ("bf16", "bf16"), 128),
    (MLA_DIMS, ("fp16", "fp16"), 1),
    (MLA_DIMS, ("fp16", "fp16"), 128),
    (MLA_DIMS, ("e4m3", "e4m3"), 1),
    (MLA_DIMS, ("e4m3", "e4m3"), 128),
    (MLA_DIMS, ("bf16", "e4m3"), 1),
    ((128, 128), ("bf16", "bf16"), 1),
)
#: formats that are also compiled beforehand for values in pages of their own, small pages too: no
#: other kernel takes them
SEPARATE = (("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("bf16", "e4m3"))


def common(arch: str) -> tuple[KernelConfig, ...]:
    """The builds that ship."""
    built = [
        config_for(dims, formats, arch, row_tiles=row_tiles_for(rows, formats, arch))
        for dims, formats, rows in COMMON
    ]
    built += [
        config_for(MLA_DIMS, formats, arch, separate=True, small_pages=small_pages)
        for formats in SEPARATE
        for small_pages in (False, True)
    ]
    return tuple(dict.fromkeys(built))


class Rows(NamedTuple):
    """Bounds that decide a launch's grid."""

    batch: int
    kv_heads: int
    #: query tokens of a request times query heads of a KV head
    rows: int
    longest: int


@dataclass(frozen=True)
class Cuts:
    """Splits of a launch, and the workspace of its partials.

    A row tile that sees n keys is cut into ceil(n / split_tokens) pieces of whole tiles, at most
    max_splits of them.
    """

    config: KernelConfig
    groups: int
    max_splits: int
    split_tokens: int
    value_dim: int

    @property
    def tile_rows(self) -> int:
        return TILE_ROWS * self.config.option("row_tiles", 1)

    @property
    def workspace(self) -> WorkspaceLayout:
        """Counters and partials; empty where no row tile is split."""
        if self.max_splits == 1:
            return WorkspaceLayout(())
        slots = self.groups * self.max_splits
        return WorkspaceLayout.of(slots, self.groups, self.tile_rows, self.value_dim)


def cut(
    config: KernelConfig, call: Rows, value_dim: int, at_once: int, batch_invariant: bool
) -> Cuts:
    """The cuts of calls within `call`'s bounds on a card that runs `at_once` blocks at once.

    Raises Unsupported for more row tiles than a grid has, or than merges have counters.
    """
    tile_rows = TILE_ROWS * config.option("row_tiles", 1)
    tiles = call.kv_heads * max(1, -(-call.rows // tile_rows))
    if max(tiles, call.batch) > MAX_BLOCKS:
        got = f"{call.batch} requests of {tiles} row tiles"
        raise unsupported("query", got, f"up to {MAX_BLOCKS} of either")
    groups = tiles * call.batch
    if batch_invariant:
        whole = -(-call.longest // TILE_KEYS) * TILE_KEYS
        splits = min(INVARIANT_SPLITS, max(1, -(-whole // INVARIANT_TOKENS)))
        if splits > 1 and groups > MAX_GROUPS:
            got = f"True with {groups} row tiles"
            raise unsupported("batch_invariant", got, f"up to {MAX_GROUPS}")
        return Cuts(config, groups, splits, INVARIANT_TOKENS, value_dim)
    splits = _splits(groups, call.longest, at_once)
    tokens = -(-call.longest // (splits * TILE_KEYS)) * TILE_KEYS
    return Cuts(config, groups, splits, max(TILE_KEYS, tokens), value_dim)


def _splits(groups: int, longest: int, at_once: int) -> int:
    """The fastest split count: waves of blocks, each with its keys and a fixed cost."""
    most = min(MAX_SPLITS, max(1, longest // LEAST_TOKENS))
    if groups > MAX_GROUPS:
        most = 1

    def cost(splits: int) -> float:
        return -(-groups * splits // at_once) * (longest / splits + PIECE_TOKENS)

    return min(range(1, most + 1), key=cost)
