"""Calls whose tokens are fetched one by one: pages that no TMA box fits, and sparse lists of slots.

One kernel takes them (`cute/swap_ab_sm90`, option gather), by a formula: each request, in a sparse
call each query token, in as many pieces. All pieces of a row tile merge a share where all workers
run at once; in a grid that is larger than the card the last CTA merges, and nobody waits. The
two merges round differently, so that under batch invariance the last CTA merges in any grid.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.dims import FP8_656_BYTES
from ...core.errors import unsupported
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...jit.shipped import PAGES, SPARSE
from ...plan import WorkspaceLayout
from ...plan.config import KernelConfig
from ...plan.launch_modes import FORMATS, PAGE_SIZES, SIXTEEN_BIT
from ...plan.workspace import MAX_GROUPS
from .device_plan import Formula, check_partials

#: blocks that a piece has at least (H200, 2026-11-20: one request of 2,048 slots takes 7.6 us so,
#: 12.4 us with 4), and pieces under batch invariance
MIN_BLOCKS, INVARIANT_SPLITS = 1, 8
#: rows of the lower tile, and of the taller one: of sparse calls of 16 bits, of all others
LOW, TALL_SPARSE, TALL = 16, 64, 32
#: requests of a grid
MOST = 65_535


def gathers(problem: Problem) -> bool:
    """Whether a call is run token by token."""
    return problem.top_k > 0 or problem.page_size not in PAGE_SIZES


def most_tokens_of_a_page(problem: Problem) -> int:
    """Tokens of a page whose offsets in it, in elements of the cache, fit into an int32."""
    width = FP8_656_BYTES if problem.kv_format == "fp8_656" else problem.head_dim
    return int((2**31 - 1) // width)


def configs_for(
    problem: Problem,
    batch_invariant: bool,
    able: Callable[[KernelConfig], bool] = lambda config: True,
) -> tuple[KernelConfig, KernelConfig]:
    """The kernel whose last CTA merges, and the one that shares its merges. Of 16 rows; taller
    where a query token has more heads, since each row tile fetches its tokens anew, or where all
    tokens of a request, which share their keys, have more rows. The taller one too where those of
    16 rows cannot be had.
    """
    sparse = problem.top_k > 0
    rows = problem.heads if sparse or batch_invariant else max(problem.rows.tolist(), default=0)
    tall, low = (_pair_of(height, sparse) for height in (tall_rows(problem), LOW))
    if rows > LOW:
        return tall
    return low if all(map(able, low)) or not all(map(able, tall)) else tall


def tall_rows(problem: Problem) -> int:
    """Rows of the taller tile: as many as there are registers for beside the tokens' addresses."""
    if (
        problem.top_k
        and FORMATS.get((problem.q_dtype, problem.kv_format), SIXTEEN_BIT) == SIXTEEN_BIT
    ):
        return TALL_SPARSE
    return LOW if not problem.top_k and problem.kv_format == "fp8_656" else TALL


def _pair_of(tile_rows: int, sparse: bool) -> tuple[KernelConfig, KernelConfig]:
    mask, merges = ("none", SPARSE) if sparse else ("tree", PAGES)
    last, shared = (
        KernelConfig("cute/swap_ab_sm90", tile_rows=tile_rows, mask=mask, options=merge)
        for merge in merges
    )
    return last, shared


def formula_for(
    problem: Problem,
    total_q: int,
    gpu: Gpu,
    batch_invariant: bool,
    able: Callable[[KernelConfig], bool] = lambda config: True,
) -> Formula:
    """Pieces that fill the card; under batch invariance by a request's own length alone, whatever
    the bounds: a kernel cuts `blocks` blocks into min(num_splits, blocks) pieces.

    Raises Unsupported for more requests, or split row tiles, than a launch has room for.
    """
    config, shared = configs_for(problem, batch_invariant, able)
    requests = total_q if problem.top_k else problem.batch
    if requests > MOST:
        name = "query" if problem.top_k else "seq_lens"
        raise unsupported(name, f"{requests} lists of keys", f"up to {MOST} in a call")
    tokens = 1 if problem.top_k else max(problem.q_lens, default=0)
    row_tiles = max(1, -(-tokens * problem.heads // config.tile_rows))
    groups = requests * row_tiles
    blocks = -(-(problem.top_k or max(problem.kv_lens)) // KernelConfig.tile_kv)
    most = max(1, blocks // MIN_BLOCKS)
    splits = min(INVARIANT_SPLITS if batch_invariant else max(1, gpu.sms // groups), most)
    if groups > MAX_GROUPS and batch_invariant and splits > 1:
        got = f"True with {groups} row tiles of keys that are cut"
        raise unsupported("batch_invariant", got, f"up to {MAX_GROUPS}")
    if groups > MAX_GROUPS:
        splits = 1
    if groups * splits <= gpu.sms and not batch_invariant:
        config = shared
    slots = groups * splits if splits > 1 else 0
    check_partials(slots, config.tile_rows)
    layout = WorkspaceLayout.of(slots, groups if slots else 0, config.tile_rows, problem.latent_dim)
    return Formula(config, splits, row_tiles, groups, layout)
