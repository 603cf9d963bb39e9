"""Whether a launch with a gate takes a batch, see `plan.gate`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...plan.gate import LONG, LONGEST_BLOCKS, WORKERS


@cute.jit
def gate_open(gate: Int32, blocks: Int32, longest: Int32):
    """Whether a launch with this gate takes a batch of so many blocks, the longest request of
    `longest` (see `plan.gate`)."""
    least = gate
    if gate < 0:
        least = -gate
    many = blocks >= least
    if least == LONG:
        many = cutlass.min(longest, blocks // WORKERS) > LONGEST_BLOCKS
    return (gate == 0) | ((gate > 0) & (not many)) | ((gate < 0) & many)
