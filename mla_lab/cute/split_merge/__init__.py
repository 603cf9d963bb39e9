"""Partials of split row tiles, and the ways to merge them."""

from enum import Enum


class SplitMerge(Enum):
    """Who merges the partials of a split row tile."""

    #: the last CTA that writes a partial
    LAST_CTA = "last_cta"
    #: all CTAs that split the row tile, a share each; a cooperative launch
    COOPERATIVE = "cooperative"
    #: as COOPERATIVE, with partials that are their own flags (NCCL's LL protocol)
    LL = "ll"
