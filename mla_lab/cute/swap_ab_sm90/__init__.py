"""MLA decode with KV on the M side: S^T = K Q^T, O^T = V^T P^T, for 8 to 64 query rows.

Tokens lie along M, so 8, 16 or 32 rows are not padded to 64, and one K tile in shared memory
feeds both products. A worker is a cluster of CTAs; each takes an even share of the work tile's
64-token blocks, and the shares are added over distributed shared memory.

Roles (288 threads; from 32 rows on 384, with `setmaxregister`)

- producer, one warp: reads the plan and the block table, issues TMA. Of a work tile: the first
  KV block, then Q and the work record, then the rest. Nobody else reads the plan.
- two consumer warpgroups: tiles in turn for scores and softmax; both add V^T P^T, 256 latent
  columns each. P lies on the dead rope box of its own stage.

Pipelines, and what each barrier counts

| barrier | one phase | arrivals |
|---|---|---|
| full[stage][group] | 3 column boxes of a KV tile are here | 1 + their bytes |
| empty[stage] | both warpgroups are done with the tile | 8 warps |
| q_full | Q and the work record are here (END: the record alone) | 1 + bytes of Q |
| q_empty | the tile's last scores are done, the record is read | 256 threads |
| q_read, q_split | two terms: a query is read as it arrived, both are written | 256 threads |
| p_ready[warpgroup] | P of its tile is published, with the rows' maxima and factors | 128 threads |
| summed | each warp's sums of the work tile are published | 256 threads |
| weighed | the weights of a merge are there | 256 threads |
| free | every CTA of the cluster may be sent partials | 8 warps x CTAs |
| sent | the share of every active CTA is here | 1 + their bytes |
| drained | the partials that lay on the ring are read | 8 warps |

Named barriers: 1 all consumers, 2 and 3 a warpgroup. What threads leave in shared memory for each
other is ordered by barriers at which every writer arrives and every reader waits itself, and each
named barrier has one place in the code for all who meet there: orders that compute-sanitizer knows.

Timeline of a warpgroup for its own tile k: await P(k-1), O^T(k-1), release k-1; S^T(k) as its
columns arrive; softmax(k); publish P(k); O^T(k); release k. (With more than two stages, and for
tile 1 of a grid, S^T(k) comes first and softmax(k) runs under O^T(k-1): see `rounds`. Where the
products are of e4m3, all of softmax(k) comes first, see `late`; `fp8` has their operands.) After
the last tile both warpgroups go on in the same code: sums across warps; then results from the
accumulators (one CTA), or `st.async` of the raw fragments to the rows' owners, who add them in
rank order. Several workers: fp32 partials in the workspace; the last arriver of each rank merges
them in split order, or (option fused_merge 2, a cooperative launch) each worker merges a share of
the units (`share`), partials lying there in the order of the units. The counter is
`group * cluster + rank`, so groups * cluster <= 16384.

Work comes from a plan, or in grid mode (option grid) from block indices: see `work`. There the
launch has no tiles and no worker_begin, but num_splits, row_tiles (of the longest request) and
q_len (0 where requests differ) at the end; partials have room for batch * row_tiles * num_splits
slots. There `pair` neighbouring row tiles may form a cluster that shares each KV tile: a CTA asks
for every pair-th column box, by multicast, and releases a stage at all of them (empty counts 8
warps x pair). With fused_merge 3 partials are their own flags (`mail`): partial_out and
partial_lse are zero between launches, and partial_lse is [slots * (num_splits + rows / 2), 4].
With pdl (the default) a launch may begin before the kernel ahead of it has ended; it reads and
writes nothing in memory until then.

Options off by default: `features` and the mask "tree" take sinks, scales in memory and a packed
mask as a tuple at the end (`extras`); `gather` fetches token by token, for small pages and sparse
calls over caches of every format, by a producer warpgroup (`gather`); `skip` leaves out tiles by
skip-softmax where query and cache are e4m3 (`late`), and takes its factor behind the mask.

Under a bf16 query the cache may be e4m3 or of 656-byte tokens: then the products are of e4m3, as
`late` has them, and what meets the cache's bytes are two e4m3 numbers for each of the query and of
the weights (`split`); a token of 656 bytes has scales and a rope beside that (`scaled`).

Rows past the request's end are computed and not written. Scores past the length are masked by
selection, and the value rows there are zeroed, so a NaN in an unread slot reaches nothing.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...plan.config import KernelConfig
from ..registry import CuteEntry
from .kernel import (
    FeatureGridSwapAB,
    FeatureSwapAB,
    GridSwapAB,
    StampedGridSwapAB,
    StampedSwapAB,
    SwapAB,
)
from .params import HEAD_DIM, LATENT_DIM, SPLIT_BYTES, Shape, shape_of
from .shared_storage import STAMPS


def _fake(dtype, shape, align):
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _fake_cache(c: Shape):
    """The cache: pages at multiples of 16 bytes, tokens of a page dense."""
    dtype, width, sixteen = c.dtype, HEAD_DIM, 16 // c.bytes
    if c.scaled:
        dtype, width = Uint8, SPLIT_BYTES["fp8_656"]
    return make_fake_tensor(
        dtype,
        (cute.sym_int(), cute.sym_int() if c.gather else c.page, width),
        (cute.sym_int64(divisibility=sixteen), width, 1),
        assumed_align=16,
    )


def entry(config: KernelConfig) -> CuteEntry:
    """Fake arguments in the order of the kernel ABI; grid mode: no plan, but at the end num_splits,
    row_tiles and q_len. Option shaped: query, out and lse as callers have them, [batch, q_len,
    heads, ...] and [tokens, heads], since a view costs the host a microsecond."""
    c = shape_of(config)
    sym = cute.sym_int
    shaped = config.option("shaped")

    def leading(number):
        return tuple(sym() for _ in range(number))

    args = [
        _fake(c.q_dtype, (*leading(3 if shaped else 1), HEAD_DIM), 16),
        _fake_cache(c),
        _fake(c.out_dtype, (*leading(3 if shaped else 1), LATENT_DIM), 16),
        _fake(Float32, leading(2 if shaped else 1), 4),
        _fake(Float32, (sym(), c.rows, LATENT_DIM), 16),
        _fake(Float32, (sym(), 4), 16)
        if c.fused_merge == 3
        else _fake(Float32, (sym(), c.rows), 4),
        _fake(Int32, (sym(),), 4),
        make_fake_tensor(Int32, (sym(), sym()), stride=(sym(), 1), assumed_align=4),
        _fake(Int32, (sym(),), 4),
        _fake(Int32, (sym(),), 4),
    ]
    if not c.grid:
        args += [_fake(Int32, (sym(), 8), 16), _fake(Int32, (sym(),), 4)]
    if c.stamps:
        args.append(_fake(Int64, (sym(), STAMPS), 8))
    args += [Int32(1), Float32(1.0), Float32(1.0)]
    args += [Int32(1), Int32(1), Int32(1)]
    if c.grid:
        launch = StampedGridSwapAB if c.stamps else GridSwapAB
    else:
        launch = StampedSwapAB if c.stamps else SwapAB
    if c.features:
        extras = [_fake(Float32, (sym(),), 4) for _ in range(3)]
        if c.tree:
            extras.append(_fake(Uint16, leading(3 if shaped else 2), 4))
        if c.skip:
            extras.append(Float32(1.0))
        args.append(tuple(extras))
        launch = FeatureGridSwapAB if c.grid else FeatureSwapAB
    return CuteEntry(
        launch(c),
        (*args, make_fake_stream(use_tvm_ffi_env_stream=True)),
        config.name(),
    )
