"""When a piece of a split row tile may be written, read, and written again: a flag of its slot.

A batch-invariant launch merges behind the tile that follows, while other workers go on, and slots
are used again (`plan.fixed_pieces`). The flag of a slot counts up from 0: the worker that has
written the piece, then each of the n workers of its row tile that has read it; step n + 1 takes it
back to 0, ready for the next piece and the next launch. A worker waits for 0 before it writes, and
cannot miss it, since only it begins a round. It waits for 1 or more of all n pieces before it
reads, and cannot miss that either, since its own step is among those that take a flag back.

Nobody waits in a circle: a worker runs its pieces by rising number, and before it writes piece q it
waits for workers that write pieces below q and no others. All workers are resident.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.ptx_sm90 import count_up


@cute.jit
def wait_until_free(flags: cute.Tensor, slot: Int32):
    """Wait until all have read what a slot held; by one thread."""
    seen = Int32(1)
    while seen > 0:
        seen = cute.arch.load(flags.iterator + slot, Int32, sem="acquire", scope="gpu")


@cute.jit
def mark_written(flags: cute.Tensor, slot: Int32, num_splits: Int32):
    """The piece in a slot is written; by one thread, behind a barrier of all that wrote."""
    count_up(flags.iterator + slot, num_splits, "release")


@cute.jit
def wait_for_pieces(flags: cute.Tensor, first: Int32, num_splits: Int32):
    """Wait until all pieces of a row tile are written, from the slot `first` on; by one warp, a
    piece a lane."""
    lane = cute.arch.lane_idx()
    slot = flags.iterator + first + cutlass.min(lane, num_splits - 1)
    seen = Int32(0)
    while seen == 0:
        seen = cute.arch.load(slot, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def mark_read(flags: cute.Tensor, first: Int32, num_splits: Int32):
    """This worker has read all pieces of a row tile; by one warp, behind a barrier of all that
    read."""
    lane = cute.arch.lane_idx()
    if lane < num_splits:
        count_up(flags.iterator + first + lane, num_splits, "release")
