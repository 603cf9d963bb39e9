"""When a piece that several workers merge may be written, read, and written again: a flag of its
slot. Items that one worker runs whole use no flags.

A batch-invariant launch merges behind the tile that follows, while other workers go on, and slots
are used again (`plan.fixed_pieces`). The flag of a free slot is 0. The worker that has written a
piece stores its turn, counted from 1, above a count of 1; each of the n workers of the row tile
that has read the piece adds 1, and the last of them stores 0. So a worker that waits for a piece
cannot take an earlier one for it, and all flags are 0 behind the launch. A flag is 0 as well where
nothing was written yet. That cannot be taken for a slot that was read: all pieces of a slot are
written by one worker, one after the other.

Nobody waits in a circle: a worker runs its pieces by rising number, and before it writes piece q it
waits for workers that write pieces below q and no others. All workers are resident.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

#: bits of the count: up to 32 pieces of a row tile, and the writer
COUNT_BITS = 8


@cute.jit
def wait_until_free(flags: cute.Tensor, slot: Int32):
    """Wait until all have read what a slot held; by one thread."""
    seen = Int32(1)
    while seen > 0:
        seen = cute.arch.load(flags.iterator + slot, Int32, sem="acquire", scope="gpu")


@cute.jit
def mark_written(flags: cute.Tensor, slot: Int32, turn: Int32):
    """The piece of turn `turn` is in a slot; by one thread, behind a barrier of all that wrote."""
    flag = (turn << COUNT_BITS) + 1
    cute.arch.store(flags.iterator + slot, flag, sem="release", scope="gpu")


@cute.jit
def wait_for_pieces(flags: cute.Tensor, first: Int32, num_splits: Int32, turn: Int32):
    """Wait until all pieces of a row tile are written, from the slot `first` on; by one warp, a
    piece a lane."""
    lane = cute.arch.lane_idx()
    slot = flags.iterator + first + cutlass.min(lane, num_splits - 1)
    seen = Int32(0)
    while seen >> COUNT_BITS != turn:
        seen = cute.arch.load(slot, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def mark_read(flags: cute.Tensor, first: Int32, num_splits: Int32):
    """This worker has read all pieces of a row tile; by one warp, behind a barrier of all that
    read."""
    lane = cute.arch.lane_idx()
    if lane < num_splits:
        flag = flags.iterator + first + lane
        before = cute.arch.atomic_add(flag, Int32(1), sem="acq_rel", scope="gpu")
        if before & ((1 << COUNT_BITS) - 1) == num_splits:
            cute.arch.store(flag, Int32(0), sem="release", scope="gpu")
