"""The merge of a batch-invariant launch: each worker of a split row tile merges a share of it,
behind the tile that it runs next, from global memory alone, as the producer is filling the KV ring.

The share of up to eight pieces is that of the cooperative merge, with equal bits; of more, columns
are added by pairs (`keep_ab_combine.sum_from_global`).
"""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Int32

from ...plan.fixed_pieces import RING
from ..common.fixed_pieces import OWN_PIECES
from ..common.ptx_sm90 import fresh_thread
from ..rows_on_m.params import PV_BARRIER, Cta, Work
from ..rows_on_m.work_records import read_work
from .keep_ab_combine import sum_from_global
from .keep_ab_cooperative import merge_share
from .keep_ab_few_splits import sum_few_splits
from .keep_ab_partials import OwnStrips, store_fragment
from .keep_ab_registers import FEW_SPLITS
from .piece_flags import mark_read, mark_written, wait_for_pieces, wait_until_free


def no_strips() -> OwnStrips:
    """Of a CTA that keeps none of its partial in shared memory."""
    return OwnStrips(Int32(0), Int32(0), Int32(0))


@cute.jit
def store_piece(cta: Cta, wg, acc: cute.Tensor, work: Work, place: tuple, scales, lse, own):
    """A piece of this CTA into its slot: work tile `index` itself, once all have read what the slot
    held, or piece `piece` of an item that it runs whole, of which the `own` strips lie in shared
    memory; `place` = (index, piece). `scales` normalise the thread's rows in fp16."""
    flags, (index, piece) = cta.g.counters, place
    shared = work.group != OWN_PIECES
    if shared & (index >= RING):  # before, no piece of this launch was there
        if fresh_thread() == 0:
            wait_until_free(flags, work.slot)
        PV_BARRIER.sync()
    at = replace(work, slot=work.slot + piece)  # of a piece that others share `piece` is 0
    store_fragment(cta, wg, acc, at, None, lse, own, scales)
    PV_BARRIER.sync()
    if shared & (fresh_thread() == 0):
        mark_written(flags, work.slot, work.group)


@cute.jit
def merge_piece(cta: Cta, index: Int32):
    """This CTA's share of the row tile of work tile `index`; by both PV warp groups, which hold
    nothing else. All of them read the record ahead of a barrier."""
    work = read_work(cta.g, cta.s, index)
    first, splits = work.slot - work.split_idx, work.num_splits
    share = merge_share(cta, work)
    warp = cute.arch.make_warp_uniform(fresh_thread() // 32)
    if warp == 0:
        wait_for_pieces(cta.g.counters, first, splits, work.group)
    PV_BARRIER.sync()
    if splits <= FEW_SPLITS:
        sum_few_splits(cta, work, share, no_strips())
    else:
        sum_from_global(cta, work, share)
    PV_BARRIER.sync()
    if warp == 0:
        mark_read(cta.g.counters, first, splits)
