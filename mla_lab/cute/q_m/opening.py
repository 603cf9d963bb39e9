"""The start of a launch, shared by the CTAs of a cluster that are independent otherwise.

At the start every CTA asks for a query and two KV tiles at once: 219 KB each, 29 MB out of the L2
for 132 of them, before the first product. Plans put work tiles that read the same beside each
other (request, split, row tile), so CTAs with the same query rows take turns with the column
groups of the query, those with the same keys with the KV tiles of the first filling, and each
group goes to all that share it. All stages are free then: what is needed is that barriers of all
of them stand, and each expects the whole of its bytes, whoever sends them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .storage import Config
from .work import WORDS, Plan

#: bits of the words of a plan row that sharers of a query have in common (request, row tile), and
#: sharers of keys (request, first and last block)
QUERY_WORDS, KEY_WORDS = 0b0011, 0b1101


@dataclass(frozen=True)
class Share:
    """CTAs of the cluster that share a load, this one among them: `place` of `count`."""

    mask: Int32
    place: Int32
    count: Int32


@dataclass(frozen=True)
class Opening:
    """With whom this CTA shares its first query, and its first KV tiles."""

    query: Share
    keys: Share


def own_rank(cfg):
    """This CTA's place in its cluster."""
    cta, _, _ = cute.arch.block_idx()
    return cta % cfg.start


def own_words(cfg: Config, plan: Plan):
    """Words of this CTA's first plan row, lane i the i-th of eight."""
    if const_expr(cfg.start == 1):
        return plan.words
    lane = cute.arch.lane_idx()
    return cute.arch.shuffle_sync(plan.words, own_rank(cfg) * WORDS + lane % WORDS)


@cute.jit
def share_of(cfg: cutlass.Constexpr[Config], differ: Int32, words: cutlass.Constexpr[int]):
    """Those whose rows of the plan differ from this CTA's in none of `words`."""
    mask = Int32(0)
    for peer in cutlass.range_constexpr(cfg.start):
        if differ & (words << (WORDS * peer)) == 0:
            mask = mask | (1 << peer)
    before = mask & ((1 << own_rank(cfg)) - 1)
    return Share(mask, cute.arch.popc(before), cute.arch.popc(mask))


@cute.jit
def open_shares(cfg: cutlass.Constexpr[Config], plan: Plan):
    """Who shares what, the same in every CTA of the cluster, from the same words of the plan."""
    differ = cute.arch.vote_ballot_sync(plan.words != own_words(cfg, plan))
    return Opening(share_of(cfg, differ, QUERY_WORDS), share_of(cfg, differ, KEY_WORDS))


@cute.jit
def my_turn(share: Share, item):
    """Whether this CTA loads the item-th of a row of loads."""
    return item % share.count == share.place
