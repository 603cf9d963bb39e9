"""Machine code that a launch finds in the SM's instruction cache, or fetches from L2 or memory.

Behind another launch of itself a kernel is in the cache. In a decode step other kernels run between
two launches, and code that runs once costs 0.4 us a KB (H200, 2026-11-27,
`data/notes/kernel_attempts.jsonl`). The merge comes last in a launch, while the first warps with
nothing left to do run dry. They run its code ahead of those that merge, without partials and rows,
so that these find it in the cache. In a launch whose code is there already that would only take
issue slots, so that each warp measures first how long it takes to start.
"""

from __future__ import annotations

from cutlass import Boolean, Int32

from .ptx_sm90 import clock

#: SM clocks from a warp's first instruction to the barrier at the end of the setup: a launch that
#: finds its code in the cache takes less
WARM_CLOCKS = 1000


def is_cold(start: Int32) -> Boolean:
    """True where the warp has fetched code since the `clock` was at `start`."""
    return clock() - start > WARM_CLOCKS
