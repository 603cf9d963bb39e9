"""Two builds for one call: each is launched, and lengths on the device say which of them works.

Every CTA adds up the blocks of the batch (at least one a request) and ends at once where the gate
of its launch is closed. A gate g > 0 is open to fewer than g blocks, g < 0 to -g blocks or more,
and 0 to any. Gates of +-LONG part batches by min(longest request, blocks / WORKERS), about the
longest piece: LONG is open to at most LONGEST_BLOCKS of it, -LONG to more. A gate is the upper half
of a launch argument: `Costs.packed` of a walk, `row_tiles` of a formula.
"""

from __future__ import annotations

from ..core.errors import invalid

#: by the longest piece, in blocks
LONG = (1 << 15) - 1
LONGEST_BLOCKS = 256
#: workers that are taken to share a batch, about those of an H200 with pairs of CTAs
WORKERS = 64
#: blocks that a gate can tell apart
MOST_BLOCKS = LONG - 1
#: requests whose lengths a warp adds up in a formula
MOST_REQUESTS = 32


def gated(word: int, gate: int) -> int:
    """A launch argument of 16 bits with a gate above it, as int32."""
    if abs(gate) > LONG:
        raise invalid("gate", gate, f"up to {MOST_BLOCKS} blocks either way")
    if not 0 <= word < 1 << 16:
        raise invalid("word", word, "0 to 65535")
    return (gate << 16) | word
