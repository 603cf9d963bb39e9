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
| sums_full | each warp's row sums of the work tile or piece are stored | 256 threads |
| weights_full | the weights of a merge are stored | 256 threads |
| plan_full | every lane has stored its word of the worker's plan | 32 threads |
| kept_full[tile % 2] | pieces: the record of a work tile is kept for its merge | 1 thread |
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

After the last tile both warp groups run the same code, that of the merge after the producer warp
(`Traits.warms_code`): row sums across warps; then the result from
the accumulators (one CTA), or `st.async` of the raw fragments to the rows' owners, who add them in
rank order. Where a row tile is split, partials go to the workspace and are merged by option
fused_merge (`SplitMerge`): the last CTA of those that wrote a row pair merges it in split order, or
each CTA merges a slice of the fragments (cooperative launch) behind a counter or with the LL
protocol. A group, a split row tile, has at most `cluster` counters (`counter_of`), so
groups * cluster <= 16384.

A batch-invariant call (option pieces) may give a worker all pieces of an item in one work tile
(`plan.fixed_pieces`): the mainloop and the epilogue run once a piece, over the query that is there,
and the worker adds up all of them (`mainloop.consume_pieces`).

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

from ...plan.config import KernelConfig
from ..common.launch_arguments import LaunchForm, exported
from ..registry import CuteEntry
from ..split_merge import SplitMerge
from ..split_merge.swap_ab_fragments import CtaEvent
from .kernel import SwapAB
from .params import Traits, traits_of


def form_of(c: Traits, shaped: bool) -> LaunchForm:
    """What the arguments of a launch depend on."""
    ll = c.split_merge == SplitMerge.LL
    return LaunchForm(
        q=c.q_dtype,
        kv=c.dtype,
        out=c.out_dtype,
        tile_rows=c.rows,
        page_size=None if c.gathered else c.page,
        shaped=shaped,
        stats=4 if ll else c.rows,
        stats_align=16 if ll else 4,
        kv_656=c.kv_656,
        grid=c.grid,
        events=len(CtaEvent) if c.profile else 0,
        features=c.features,
        tree=c.tree,
        skip=c.skip,
    )


def entry(config: KernelConfig) -> CuteEntry:
    """The launch of `config` and its fake arguments."""
    c = traits_of(config)
    args = form_of(c, bool(config.option("shaped"))).arguments()
    launch = exported("swap_ab", SwapAB(c).launch, tuple(args))
    return CuteEntry(launch, tuple(args.values()), config.name())
