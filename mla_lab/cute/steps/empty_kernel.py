"""Step 60: a CTA of three warp groups, a producer and two consumers, each with its registers.

All it does is to write each thread's role.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from mla_lab.cute.steps.shape import WARP_GROUP

THREADS = 3 * WARP_GROUP
PRODUCER, CONSUMER = 1, 2


def element_of(block, thread):
    """Element of `out` that belongs to a thread of a CTA."""
    return block * THREADS + thread


def producer_registers():
    """Registers of a thread that only issues copies."""
    return 24


def consumer_registers():
    """Registers of a thread that holds accumulators."""
    return 240


@cute.kernel
def write_roles(out: cute.Tensor):
    """Warp group 0 produces, the others consume."""
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    warp_group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
    if warp_group == 0:
        cute.arch.setmaxregister_decrease(producer_registers())
        out[element_of(block, thread)] = Int32(PRODUCER)
    else:
        cute.arch.setmaxregister_increase(consumer_registers())
        out[element_of(block, thread)] = Int32(CONSUMER)


@cute.jit
def launch(out: cute.Tensor, stream):
    """out: int32 [CTAs * THREADS]."""
    blocks = cute.size(out) // THREADS
    write_roles(out).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
