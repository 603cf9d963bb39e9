"""What each worker finds by the rule, written out: the self-scheduling prelude as a kernel.

It has nothing of attention: one warp a CTA, one CTA a worker, which walks its tiles as the decode
kernels do and stores their plan rows. Tests compare them with `plan.self_schedule`, on a card and
in the emulator.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from ..plan.config import KernelConfig
from .common.fixed_pieces import Before
from .common.launch_arguments import tensor
from .common.self_schedule import WORDS, Batch
from .common.worker_plan import open_plan, plan_of, tile_words
from .registry import CuteEntry


@cute.kernel
def _find(
    rule: cutlass.Constexpr[tuple], b: Batch, tiles: cute.Tensor, schedule: cute.Tensor,
    rows: cute.Tensor, counts: cute.Tensor,
):  # fmt: skip
    worker, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    single, pieces = rule
    b = replace(b, single=single, pieces=pieces, deals=True)
    plan = plan_of(open_plan(b, tiles, schedule, worker, 1))
    before = Before.none()
    for index in cutlass.range(plan.last, unroll=1):
        words = tile_words(b, tiles, plan, index, before)
        before = Before(*(cute.arch.shuffle_sync(words, i) for i in (0, 1, 4, 5)))
        if (lane < WORDS) & (index < rows.shape[1]):
            rows[worker, index, lane] = words
    if lane == 0:
        counts[worker] = plan.last


def _launch(rule: tuple[int, bool], operands) -> None:
    """Operands in the order of `entry`, the stream last."""
    lens, q_begin, tiles, schedule, rows, counts, *numbers, stream = operands
    heads, q_len, costs, tile_rows, tokens = numbers
    workers = Int32(counts.shape[0])
    b = Batch(lens, q_begin, heads, q_len, workers, costs, tile_rows, tokens=tokens)
    _find(rule, b, tiles, schedule, rows, counts).launch(
        grid=(counts.shape[0], 1, 1), block=(32, 1, 1), stream=stream
    )


def entry(config: KernelConfig) -> CuteEntry:
    """With the option `single` the batch is one request, whose pieces have at least so many blocks;
    with `pieces` workers find the pieces of `plan.fixed_pieces`, by cuts in place of costs.
    Arguments: seq_lens [batch], q_begin [batch + 1], tiles [n, 8] and schedule as of
    `worker_plan.open_plan`, rows [workers, most, 8] and counts [workers], which are written, all
    int32; heads, q_len (0: see q_begin), packed costs, tile_rows, query tokens of
    the launch."""
    shapes = ((None,), (None,), (None, WORDS), (None,), (None, None, WORDS), (None,))
    tensors = [tensor(Int32, 4, *shape) for shape in shapes]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    rule = config.option("single"), bool(config.option("pieces"))

    @cute.jit(preprocess=False)
    def launch(*operands) -> None:
        _launch(rule, operands)

    return CuteEntry(launch, (*tensors, *[Int32(0)] * 5, stream), "found_tiles")
