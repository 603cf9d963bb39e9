"""Wrong answers to the exercises of notebooks 60 to 69, as a reader may write them.

The functions are text for the DSL, never called here: names that they use stand in the step's
module.
"""

# mypy: ignore-errors
# ruff: noqa: F821

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mla_lab.lab.steps import StepKernel, kernel
from mla_lab.lab.steps.text import functions_in, module_text

Functions = dict[str, Callable[..., Any]]


def only_thread() -> Functions:
    def element_of(block, thread):
        return thread

    return {"element_of": element_of}


def equal_shares() -> Functions:
    def producer_registers():
        return 168

    def consumer_registers():
        return 168

    return {"producer_registers": producer_registers, "consumer_registers": consumer_registers}


def too_many_registers() -> Functions:
    def consumer_registers():
        return 248

    return {"consumer_registers": consumer_registers}


def registers_of_the_sm() -> Functions:
    """As many as an SM has, and more than the launch gave to the CTA."""

    def producer_registers():
        return 32

    return {"producer_registers": producer_registers}


def odd_registers() -> Functions:
    def producer_registers():
        return 20

    return {"producer_registers": producer_registers}


def too_few_threads() -> Functions:
    def threads_over_tile():
        return cute.make_layout((8, 8), stride=(8, 1))

    return {"threads_over_tile": threads_over_tile}


def single_numbers() -> Functions:
    def threads_over_tile():
        return cute.make_layout((2, 64), stride=(64, 1))

    def numbers_of_thread():
        return cute.make_layout((1, 1))

    return {"threads_over_tile": threads_over_tile, "numbers_of_thread": numbers_of_thread}


def columns_first() -> Functions:
    def threads_over_tile():
        return cute.make_layout((TILE // 4, 8))

    return {"threads_over_tile": threads_over_tile}


def page_not_taken() -> Functions:
    def box_of(tensor, page, box):
        return cute.local_tile(tensor, (TILE, BOX), (page, box))

    return {"box_of": box_of}


def first_box() -> Functions:
    def box_of(tensor, page, box):
        return cute.local_tile(tensor[page, None, None], (TILE, BOX), (0, 0))

    return {"box_of": box_of}


def not_cute() -> Functions:
    def numbers_of_thread():
        return layout(1, 8)

    return {"numbers_of_thread": numbers_of_thread}


def plain_offset() -> Functions:
    def swizzled(offset):
        return offset

    return {"swizzled": swizzled}


def torn_vectors() -> Functions:
    def swizzled(offset):
        return offset ^ ((offset >> 6) & 7)

    return {"swizzled": swizzled}


def lost_rows() -> Functions:
    def swizzled(offset):
        return offset | ((offset >> 3) & 0x38)

    return {"swizzled": swizzled}


def backward_rows() -> Functions:
    def swizzled(offset):
        return offset ^ (0x38 - ((offset >> 3) & 0x38))

    return {"swizzled": swizzled}


def swizzle_of_bytes() -> Functions:
    def swizzle_numbers():
        return 3, 4, 3

    return {"swizzle_numbers": swizzle_numbers}


def too_few_swizzle_bits() -> Functions:
    def swizzle_numbers():
        return 2, 3, 3

    return {"swizzle_numbers": swizzle_numbers}


def shift_to_the_row() -> Functions:
    def swizzle_numbers():
        return 3, 3, 6

    return {"swizzle_numbers": swizzle_numbers}


def vectors_that_leave_their_row() -> Functions:
    def swizzled(offset):
        return offset ^ (offset // BOX * VECTOR)

    return {"swizzled": swizzled}


def first_page() -> Functions:
    def page_of(block_table, tile):
        return tile

    return {"page_of": page_of}


def table_of_a_batch() -> Functions:
    def page_of(block_table, tile):
        return block_table[0, tile]

    return {"page_of": page_of}


def numbers_for_bytes() -> Functions:
    def tile_bytes():
        return TILE * WIDTH

    return {"tile_bytes": tile_bytes}


def too_many_bytes() -> Functions:
    def tile_bytes():
        return TILE * WIDTH * 4

    return {"tile_bytes": tile_bytes}


def parity_that_stays() -> Functions:
    def full_parity(t):
        return 0

    return {"full_parity": full_parity}


def parity_of_the_producer() -> Functions:
    def full_parity(t):
        return (t + 1) % 2

    return {"full_parity": full_parity}


def a_warp_of_arrivals() -> Functions:
    def full_arrivals():
        return 32

    return {"full_arrivals": full_arrivals}


def no_bytes() -> Functions:
    def announce(full):
        cute.arch.mbarrier_arrive(full)

    return {"announce": announce}


def one_stage() -> Functions:
    def stage_of(t):
        return 0

    return {"stage_of": stage_of}


def full_parity_by_tile() -> Functions:
    def full_parity(t):
        return t % 2

    return {"full_parity": full_parity}


def empty_parity_of_full() -> Functions:
    def empty_parity(t):
        return t // STAGES % 2

    return {"empty_parity": empty_parity}


def empty_parity_that_stays() -> Functions:
    def empty_parity(t):
        return 1

    return {"empty_parity": empty_parity}


def always_add() -> Functions:
    def multiply(product, operands, stage):
        product.set(warpgroup.Field.ACCUMULATE, True)
        for k in range(WIDTH // K_STEP):
            q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, stage]
            cute.gemm(product, operands.scores, q, keys, operands.scores)

    return {"multiply": multiply}


def latent_alone() -> Functions:
    def multiply(product, operands, stage):
        product.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(8):
            q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, stage]
            cute.gemm(product, operands.scores, q, keys, operands.scores)
            product.set(warpgroup.Field.ACCUMULATE, True)

    return {"multiply": multiply}


def stage_zero() -> Functions:
    def multiply(product, operands, stage):
        product.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(WIDTH // K_STEP):
            q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, 0]
            cute.gemm(product, operands.scores, q, keys, operands.scores)
            product.set(warpgroup.Field.ACCUMULATE, True)

    return {"multiply": multiply}


def rows_of_a_thread() -> Functions:
    def place_of(register, thread):
        return thread // 2, 32 * (thread % 2) + register

    return {"place_of": place_of}


def own_columns() -> Functions:
    def new_max(old, greatest):
        return cute.arch.fmax(old, greatest)

    return {"new_max": new_max}


def forgotten_max() -> Functions:
    def new_max(old, greatest):
        for lanes in (1, 2):
            other = cute.arch.shuffle_sync_bfly(greatest, offset=lanes)
            greatest = cute.arch.fmax(greatest, other)
        return greatest

    return {"new_max": new_max}


def no_rescale() -> Functions:
    def rescale(old, new):
        return Float32(1.0)

    return {"rescale": rescale}


def rescale_backwards() -> Functions:
    def rescale(old, new):
        return cute.math.exp2(new - old, fastmath=True)

    return {"rescale": rescale}


def log_of_two() -> Functions:
    def lse_of(top, total):
        return top + cute.math.log2(total, fastmath=True)

    return {"lse_of": lse_of}


def rows_for_columns() -> Functions:
    def transposed_layout():
        return cute.make_layout(
            ((BOX, LATENT // BOX), TILE, STAGES),
            stride=((1, BOX), BOX, TILE * WIDTH),
        )

    return {"transposed_layout": transposed_layout}


def one_stage_of_values() -> Functions:
    def transposed_layout():
        return cute.make_layout(
            ((BOX, LATENT // BOX), TILE, STAGES),
            stride=((1, TILE * BOX), BOX, 0),
        )

    return {"transposed_layout": transposed_layout}


def factors_by_register() -> Functions:
    def rescale_rows(out, factors):
        for i in range(cute.size(out)):
            out[i] = out[i] * factors[i % 2]

    return {"rescale_rows": rescale_rows}


def nothing_rescaled() -> Functions:
    def rescale_rows(out, factors):
        pass

    return {"rescale_rows": rescale_rows}


def rounded_up() -> Functions:
    def first_of_share(worker, workers, tiles):
        return worker * ((tiles + workers - 1) // workers)

    return {"first_of_share": first_of_share}


def rounded_down() -> Functions:
    def first_of_share(worker, workers, tiles):
        return worker * (tiles // workers)

    return {"first_of_share": first_of_share}


def zeros_as_they_are() -> Functions:
    def nonzero_word(value):
        return value.bitcast(Int32)

    return {"nonzero_word": nonzero_word}


def rounded_to_one() -> Functions:
    def nonzero_word(value):
        bits = value.bitcast(Int32)
        return bits | Int32(1 << 20)

    return {"nonzero_word": nonzero_word}


def one_for_zero() -> Functions:
    """The smallest number in place of zero."""

    def nonzero_word(value):
        bits = value.bitcast(Int32)
        return bits if bits != 0 else Int32(1)

    return {"nonzero_word": nonzero_word}


def last_bit_set() -> Functions:
    def nonzero_word(value):
        return value.bitcast(Int32) | 1

    return {"nonzero_word": nonzero_word}


def equal_weights() -> Functions:
    def merge_factors(top, other):
        return Float32(0.5), Float32(0.5)

    return {"merge_factors": merge_factors}


def one_sided() -> Functions:
    def merge_factors(top, other):
        return Float32(1.0), rescale(top, other)

    return {"merge_factors": merge_factors}


BY_STEP: dict[str, tuple[Callable[[], Functions], ...]] = {
    "60": (only_thread, equal_shares, too_many_registers, registers_of_the_sm, odd_registers),
    "61": (too_few_threads, single_numbers, columns_first, page_not_taken, first_box, not_cute),
    "62": (
        plain_offset,
        torn_vectors,
        lost_rows,
        backward_rows,
        swizzle_of_bytes,
        too_few_swizzle_bits,
        shift_to_the_row,
        vectors_that_leave_their_row,
    ),
    "63": (first_page, table_of_a_batch, numbers_for_bytes, too_many_bytes),
    "64": (parity_that_stays, parity_of_the_producer, a_warp_of_arrivals, no_bytes),
    "65": (one_stage, full_parity_by_tile, empty_parity_of_full, empty_parity_that_stays),
    "66": (always_add, latent_alone, stage_zero, rows_of_a_thread),
    "67": (own_columns, forgotten_max, no_rescale, rescale_backwards, log_of_two),
    "68": (rows_for_columns, one_stage_of_values, factors_by_register, nothing_rescaled),
    "69": (
        rounded_up,
        rounded_down,
        zeros_as_they_are,
        rounded_to_one,
        one_for_zero,
        last_bit_set,
        equal_weights,
        one_sided,
    ),
}


def completed(number: str, wrong: Functions) -> StepKernel:
    """A step with these functions and the author's for the rest, as if a reader wrote all."""
    made = kernel(number, *wrong.values())
    text = module_text(made.step.path)
    author = importlib.import_module(f"mla_lab.cute.steps.{made.step.module}")
    for name in set(made.step.functions) - set(wrong):
        node = functions_in(text)[name]
        made.sources[name] = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        made.functions[name] = getattr(author, name)
    return made
