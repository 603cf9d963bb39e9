"""MLA decode with swapped operands: S^T = K Q^T, O^T = V^T P^T, for 8 to 64 query rows.

KV tokens lie along M, so 8, 16 or 32 query rows are not padded to 64, and one KV tile in shared
memory feeds both MMAs. A worker is a cluster of CTAs; each takes an even part of the work tile's
64-token KV tiles, and their results are added over distributed shared memory.

Roles (288 threads; 384 with `setmaxregister` from N = 32 on and where tokens are gathered)

- producer, one warp or a warp group: reads the plan and the block table, issues the loads. Of a
  work tile: the first KV tile, then Q and the work record, then the rest.
- two consumer warp groups: KV tiles in turn for QK and softmax; both accumulate PV, 256 latent
  columns each. P overwrites the rope box of its own stage.

Pipelines, and what each barrier counts (`shared_storage.barrier_table`)

| barrier | a phase completes when | arrivals |
|---|---|---|
| kv.full[stage][range] | a range of the KV tile's columns is here | 1 + bytes; gathered: 128 |
| kv.empty[stage] | both warp groups have read the tile | 8 warps x multicast |
| q.full | Q and the work record are here (END: the record alone) | 1 + bytes of Q |
| q.empty | the work tile's last scores are computed, the record is read | 256 threads |
| q_loaded, q_split | hi and lo: Q is read as it arrived; both are written | 256 threads |
| p_full[warp group] | P of its tile is stored, with row max and rescale factors | 128 threads |
| stats_full[warp group] | e4m3: row max and rescale factors of its tile are stored | rows |
| sums_full | each warp's row sums of the work tile are stored | 256 threads |
| weights_full | the weights of a merge are stored | 256 threads |
| peers.empty | every CTA of the cluster may be sent partials | 8 warps x CTAs |
| peers.full | the partials of every active CTA are here | 1 + bytes |
| ring_drained | the partials that lay on the KV ring are read | 8 warps |

Named barriers

| barrier | threads | what it orders |
|---|---|---|
| 1 `CONSUMERS` | 256 | reads of row stats, before the next work tile writes them; stores of a |
| | | partial, before it is counted; the counter's value, before the merge; in the |
| | | merge each thread's sums in shared memory, before they are added up |
| 2, 3 `WARP_GROUPS` | 128 | row maxes of a tile by warp, before they are combined; P and row |
| | | stats of a tile, before the warp group's own PV reads them |

Data that threads store in shared memory for each other is ordered by barriers at which every writer
arrives and every reader waits itself, and all threads of a named barrier reach it at one place in
the code, as compute-sanitizer requires.

Timeline of a warp group for its own tile k: wait for P(k-1), PV(k-1), release k-1; QK(k) as its
columns arrive; softmax(k); publish P(k); PV(k); release k. (With more than two stages, and for
tile 1 of a grid, QK(k) comes first and softmax(k) overlaps PV(k-1): see `mainloop_bf16`. With e4m3
operands all of softmax(k) comes first, see `mainloop_fp8`; `fp8_operands` has the layouts.)

After the last tile both warp groups run the same code: row sums across warps; then the result from
the accumulators (one CTA), or `st.async` of the raw fragments to the rows' owners, who add them in
rank order. Where a row tile is split, partials go to the workspace and are merged by option
fused_merge (`SplitMerge`): the last CTA of those that wrote a row pair merges it in split order, or
each CTA merges a slice of the fragments (cooperative launch) behind a counter or with the LL
protocol. A group, a split row tile, has at most `cluster` counters (`counter_of`), so
groups * cluster <= 16384.

Work comes from a plan in memory or from seq_lens by the rule of `common.self_schedule` (with the
option pieces, of batch-invariant calls, by that of `common.fixed_pieces`), or in grid mode (option
grid) from block indices: see `tile_scheduler`. A launch ends with num_workers, q_len
(0 where requests differ) and costs (with a gate in the upper half); in grid mode it has no tiles
and no worker_begin, and ends with num_splits, row_tiles (of the longest request) and q_len, and
partials have room for batch * row_tiles * num_splits.

In grid mode option pair makes clusters of neighbouring row tiles that share each KV tile: a CTA
loads every pair-th box, by multicast, and releases a stage at all of them.

With pdl (the default) a launch may begin before the kernel ahead of it has ended; it accesses no
memory until then. `features` and the mask "tree" add sinks, scales in memory and a packed mask to
the arguments (`feature_operands`), skip-softmax its threshold. Under a bf16 query the cache may be
e4m3 or of 656-byte tokens (`query_hi_lo`, `kv_656`).

Rows past the request's end are computed and not stored. Scores past the length are masked by
selection, and the V rows there are zeroed, so a NaN in an unread slot reaches nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...plan.config import KernelConfig
from ..registry import CuteEntry
from ..split_merge import SplitMerge
from ..split_merge.swap_ab_fragments import CtaEvent
from .kernel import SwapAB
from .params import HEAD_DIM, LATENT_DIM, TOKEN_BYTES, Traits, traits_of


def _tensor(dtype: Any, align: int, *shape: int | None) -> cute.Tensor:
    """A compact row-major tensor; None: a size of the launch."""
    sizes = tuple(cute.sym_int() if size is None else size for size in shape)
    order = tuple(reversed(range(len(sizes))))
    return make_fake_compact_tensor(dtype, sizes, stride_order=order, assumed_align=align)


def _cache(c: Traits) -> cute.Tensor:
    """The cache: pages at multiples of 16 bytes, tokens of a page dense."""
    dtype, width = (Uint8, TOKEN_BYTES["fp8_656"]) if c.kv_656 else (c.dtype, HEAD_DIM)
    return make_fake_tensor(
        dtype,
        (cute.sym_int(), cute.sym_int() if c.gathered else c.page, width),
        (cute.sym_int64(divisibility=16 // c.bytes), width, 1),
        assumed_align=16,
    )


def arguments(c: Traits, shaped: bool) -> dict[str, Any]:
    """Fake arguments of the exported function by name, in its order: the one list of them. `shaped`
    (option shaped): query, out and lse as callers have them, [batch, q_len, heads, ...] and
    [tokens, heads], since a view costs the host a microsecond; else rows."""
    rows = [None] * (3 if shaped else 1)
    stats = (None, 4) if c.split_merge == SplitMerge.LL else (None, c.rows)
    args: dict[str, Any] = {
        "q": _tensor(c.q_dtype, 16, *rows, HEAD_DIM),
        "kv": _cache(c),
        "out": _tensor(c.out_dtype, 16, *rows, LATENT_DIM),
        "lse": _tensor(Float32, 4, *[None] * (2 if shaped else 1)),
        "partial_out": _tensor(Float32, 16, None, c.rows, LATENT_DIM),
        "partial_lse": _tensor(Float32, 16 if stats[1] == 4 else 4, *stats),
        "counters": _tensor(Int32, 4, None),
        "block_table": make_fake_tensor(
            Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int(), 1), assumed_align=4
        ),
        "seq_lens": _tensor(Int32, 4, None),
        "q_begin": _tensor(Int32, 4, None),
    }
    if not c.grid:
        args |= {"tiles": _tensor(Int32, 16, None, 8), "schedule": _tensor(Int32, 4, None)}
    if c.profile:
        args["profile"] = _tensor(Int64, 8, None, len(CtaEvent))
    args |= {"heads": Int32(1), "scale_log2": Float32(1.0), "out_scale": Float32(1.0)}
    last = ("num_splits", "row_tiles", "q_len") if c.grid else ("num_workers", "q_len", "costs")
    args |= {name: Int32(1) for name in last}
    if c.features:
        features = [_tensor(Float32, 4, None) for _ in range(3)]
        if c.tree:
            features.append(_tensor(Uint16, 4, *[None] * (3 if shaped else 2)))
        if c.skip:
            features.append(Float32(1.0))
        args["features"] = tuple(features)
    return args | {"stream": make_fake_stream(use_tvm_ffi_env_stream=True)}


def entry(config: KernelConfig) -> CuteEntry:
    """The launch of `config` and its fake arguments."""
    c = traits_of(config)
    args = arguments(c, bool(config.option("shaped")))
    return CuteEntry(SwapAB(c).exported(tuple(args)), tuple(args.values()), config.name())
