"""Wrong answers to the exercises of notebooks 60 to 69, as a reader may write them.

The functions are text for the DSL, never called here: names that they use stand in the step's
module.
"""

# mypy: ignore-errors
# ruff: noqa: F821

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from mla_lab.lab.steps import StepKernel, kernel
from mla_lab.lab.steps.text import functions_in, module_text


class Answer:
    """A reader's functions, in place of the author's: what a class's body defines."""

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        return {name: value for name, value in vars(cls).items() if inspect.isfunction(value)}


class OnlyThread(Answer):
    def element_of(block, thread):
        return thread


class EqualShares(Answer):
    def producer_registers():
        return 168

    def consumer_registers():
        return 168


class TooManyRegisters(Answer):
    def consumer_registers():
        return 248


class RegistersOfTheSm(Answer):
    """As many as an SM has, and more than the launch gave to the CTA."""

    def producer_registers():
        return 32


class OddRegisters(Answer):
    def producer_registers():
        return 20


class TooFewThreads(Answer):
    def threads_over_tile():
        return cute.make_layout((8, 8), stride=(8, 1))


class SingleNumbers(Answer):
    def threads_over_tile():
        return cute.make_layout((2, 64), stride=(64, 1))

    def numbers_of_thread():
        return cute.make_layout((1, 1))


class ColumnsFirst(Answer):
    def threads_over_tile():
        return cute.make_layout((TILE // 4, 8))


class PageNotTaken(Answer):
    def box_of(tensor, page, box):
        return cute.local_tile(tensor, (TILE, BOX), (page, box))


class FirstBox(Answer):
    def box_of(tensor, page, box):
        return cute.local_tile(tensor[page, None, None], (TILE, BOX), (0, 0))


class NotCute(Answer):
    def numbers_of_thread():
        return layout(1, 8)


class PlainOffset(Answer):
    def swizzled(offset):
        return offset


class TornVectors(Answer):
    def swizzled(offset):
        return offset ^ ((offset >> 6) & 7)


class LostRows(Answer):
    def swizzled(offset):
        return offset | ((offset >> 3) & 0x38)


class BackwardRows(Answer):
    def swizzled(offset):
        return offset ^ (0x38 - ((offset >> 3) & 0x38))


class SwizzleOfBytes(Answer):
    def swizzle_numbers():
        return 3, 4, 3


class TooFewSwizzleBits(Answer):
    def swizzle_numbers():
        return 2, 3, 3


class ShiftToTheRow(Answer):
    def swizzle_numbers():
        return 3, 3, 6


class VectorsThatLeaveTheirRow(Answer):
    def swizzled(offset):
        return offset ^ (offset // BOX * VECTOR)


class FirstPage(Answer):
    def page_of(block_table, tile):
        return tile


class TableOfABatch(Answer):
    def page_of(block_table, tile):
        return block_table[0, tile]


class NumbersForBytes(Answer):
    def tile_bytes():
        return TILE * WIDTH


class TooManyBytes(Answer):
    def tile_bytes():
        return TILE * WIDTH * 4


class ParityThatStays(Answer):
    def full_parity(t):
        return 0


class ParityOfTheProducer(Answer):
    def full_parity(t):
        return (t + 1) % 2


class AWarpOfArrivals(Answer):
    def full_arrivals():
        return 32


class NoBytes(Answer):
    def announce(full):
        cute.arch.mbarrier_arrive(full)


class OneStage(Answer):
    def stage_of(t):
        return 0


class FullParityByTile(Answer):
    def full_parity(t):
        return t % 2


class EmptyParityOfFull(Answer):
    def empty_parity(t):
        return t // STAGES % 2


class EmptyParityThatStays(Answer):
    def empty_parity(t):
        return 1


class TileForParity(Answer):
    def full_parity(t):
        return t


class PhaseForParity(Answer):
    def full_parity(t):
        return t // STAGES


class ParityOfFiveTiles(Answer):
    def empty_parity(t):
        return 1 - t // STAGES * (2 - t // STAGES)


class AlwaysAdd(Answer):
    def multiply(product, operands, stage):
        product.set(warpgroup.Field.ACCUMULATE, True)
        for k in range(WIDTH // K_STEP):
            q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, stage]
            cute.gemm(product, operands.scores, q, keys, operands.scores)


class LatentAlone(Answer):
    def multiply(product, operands, stage):
        product.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(8):
            q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, stage]
            cute.gemm(product, operands.scores, q, keys, operands.scores)
            product.set(warpgroup.Field.ACCUMULATE, True)


class StageZero(Answer):
    def multiply(product, operands, stage):
        product.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(WIDTH // K_STEP):
            q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, 0]
            cute.gemm(product, operands.scores, q, keys, operands.scores)
            product.set(warpgroup.Field.ACCUMULATE, True)


class RowsOfAThread(Answer):
    def place_of(register, thread):
        return thread // 2, 32 * (thread % 2) + register


class OwnColumns(Answer):
    def new_max(old, greatest):
        return cute.arch.fmax(old, greatest)


class ForgottenMax(Answer):
    def new_max(old, greatest):
        for lanes in (1, 2):
            other = cute.arch.shuffle_sync_bfly(greatest, offset=lanes)
            greatest = cute.arch.fmax(greatest, other)
        return greatest


class RaisedMax(Answer):
    def new_max(old, greatest):
        for lanes in (1, 2):
            other = cute.arch.shuffle_sync_bfly(greatest, offset=lanes)
            greatest = cute.arch.fmax(greatest, other)
        return cute.arch.fmax(old, greatest) + 1.0


class NoRescale(Answer):
    def rescale(old, new):
        return Float32(1.0)


class RescaleBackwards(Answer):
    def rescale(old, new):
        return cute.math.exp2(new - old, fastmath=True)


class LogOfTwo(Answer):
    def lse_of(top, total):
        return top + cute.math.log2(total, fastmath=True)


class RowsForColumns(Answer):
    def transposed_layout():
        return cute.make_layout(
            ((BOX, LATENT // BOX), TILE, STAGES),
            stride=((1, BOX), BOX, TILE * WIDTH),
        )


class OneStageOfValues(Answer):
    def transposed_layout():
        return cute.make_layout(
            ((BOX, LATENT // BOX), TILE, STAGES),
            stride=((1, TILE * BOX), BOX, 0),
        )


class FactorsByRegister(Answer):
    def rescale_rows(out, factors):
        for i in range(cute.size(out)):
            out[i] = out[i] * factors[i % 2]


class NothingRescaled(Answer):
    def rescale_rows(out, factors):
        pass


class RoundedUp(Answer):
    def first_of_share(worker, workers, tiles):
        return worker * ((tiles + workers - 1) // workers)


class RoundedDown(Answer):
    def first_of_share(worker, workers, tiles):
        return worker * (tiles // workers)


class ZerosAsTheyAre(Answer):
    def nonzero_word(value):
        return value.bitcast(Int32)


class RoundedToOne(Answer):
    def nonzero_word(value):
        bits = value.bitcast(Int32)
        return bits | Int32(1 << 20)


class OneForZero(Answer):
    """The smallest number in place of zero."""

    def nonzero_word(value):
        bits = value.bitcast(Int32)
        return bits if bits != 0 else Int32(1)


class LastBitSet(Answer):
    def nonzero_word(value):
        return value.bitcast(Int32) | 1


class EqualWeights(Answer):
    def merge_factors(top, other):
        return Float32(0.5), Float32(0.5)


class OneSided(Answer):
    def merge_factors(top, other):
        return Float32(1.0), rescale(top, other)


def completed(number: str, answer: type[Answer]) -> StepKernel:
    """A step with these functions and the author's for the rest, as if a reader wrote all."""
    wrong = answer.functions()
    made = kernel(number, *wrong.values())
    text = module_text(made.step.path)
    author = importlib.import_module(f"mla_lab.cute.steps.{made.step.module}")
    for name in set(made.step.functions) - set(wrong):
        node = functions_in(text)[name]
        made.sources[name] = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        made.functions[name] = getattr(author, name)
    return made
