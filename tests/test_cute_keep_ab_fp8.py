"""cute/keep_ab_sm90 over e4m3 on a machine without a GPU: registers, shared memory, who has which
token, and what it compiles to."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
import torch

from mla_lab import jit
from mla_lab.core.errors import Unsupported
from mla_lab.core.problem import FP8_656_BYTES
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute import keep_ab_sm90 as keep_ab
from mla_lab.cute.keep_ab_sm90 import fp8 as transposed
from mla_lab.cute.keep_ab_sm90.fp8 import kv_656 as groups
from mla_lab.cute.keep_ab_sm90.fp8 import p_exchange_2cta as pair
from mla_lab.cute.keep_ab_sm90.fp8 import p_fp16 as weights
from mla_lab.cute.keep_ab_sm90.fp8 import params as storage
from mla_lab.cute.keep_ab_sm90.fp8 import query_hi_lo as terms
from mla_lab.cute.keep_ab_sm90.fp8.mainloop_pv import PARTIAL_LOG2
from mla_lab.cute.keep_ab_sm90.fp8.mainloop_qk_softmax import (
    FIRST,
    HIGH_BITS,
    LATE,
    TO_HIGH_BIT,
    WORDS,
)

EIGHT = KernelConfig(
    "cute/keep_ab_sm90", q_dtype="e4m3", kv_format="e4m3", tile_rows=128, cluster=2
)
SPLIT = replace(EIGHT, q_dtype="bf16")
SCALED = replace(SPLIT, kv_format="fp8_656")


def test_registers_of_all_roles_are_those_of_the_card() -> None:
    roles = (
        2 * transposed.ACCUMULATE_REGISTERS
        + transposed.ATTEND_REGISTERS
        + transposed.LOAD_REGISTERS
    )
    split = (
        2 * transposed.SPLIT_ACCUMULATE_REGISTERS
        + transposed.SPLIT_ATTEND_REGISTERS
        + transposed.LOAD_REGISTERS
    )
    assert max(roles, split) * 128 <= 65536
    assert transposed.THREADS == 4 * 128


def test_what_eight_bits_do_not_go_with() -> None:
    for changed in (
        {"kv_format": "bf16"},
        {"tile_rows": 64, "cluster": 1, "options": (("skip", 1),)},
        {"q_dtype": "bf16", "kv_format": "bf16", "out_dtype": "e4m3"},
        {"tile_rows": 32, "cluster": 1},
    ):
        with pytest.raises(Unsupported):
            keep_ab.static_facts(replace(EIGHT, **changed))
    for changed in (
        {"q_dtype": "fp16"},
        {"out_dtype": "e4m3"},
        {"tile_rows": 64, "cluster": 1, "options": (("skip", 1),)},
    ):
        with pytest.raises(Unsupported):
            keep_ab.static_facts(replace(SPLIT, **changed))


def test_weights_stay_below_what_saturates() -> None:
    facts = keep_ab.static_facts(EIGHT)
    assert 2 ** (storage.WEIGHT_LOG2 + facts.lazy_log2) < 448
    # half way to the greatest, where rounding would make it that: no weight is so by chance
    assert 2 ** (storage.WEIGHT_LOG2 + facts.lazy_log2) < 432
    # row sums of sixteen weights pass through fp16
    assert 16 * 448 < 65504
    # a query of sixteen bits has weights of fp16
    facts = keep_ab.static_facts(replace(SPLIT, tile_rows=64, cluster=1))
    assert 2 ** (facts.weight_log2 + facts.lazy_log2) <= 65504


def test_a_weight_of_a_pair_that_must_not_be_is_seen() -> None:
    """2 and more, infinity and NaN have a bit that no smaller fp16 has, in both halves."""
    facts = keep_ab.static_facts(SPLIT)
    assert facts.crossed and facts.weight_log2 + facts.lazy_log2 == 1
    bits = torch.arange(0x8000, dtype=torch.int32)
    value = bits.to(torch.int16).view(torch.float16)
    for word in (bits, bits << 16):
        seen = (word & weights.TWO) != 0
        assert torch.equal(seen, ~(value < 2))


def test_who_halves_columns() -> None:
    """A pair over e4m3 with a bf16 query; an e4m3 query has none to gain, 656 bytes no room, and
    with features the attend group has no registers."""
    crossed = keep_ab.static_facts(SPLIT)
    plain = keep_ab.static_facts(replace(SPLIT, tile_rows=64, cluster=1))
    assert crossed.crossed and not plain.crossed
    for config in (EIGHT, SCALED, replace(SPLIT, mask="tree")):
        assert not keep_ab.static_facts(config).crossed
    for option in ("features", "scales"):
        assert not keep_ab.static_facts(replace(SPLIT, options=((option, 1),))).crossed
    # weights are announced when they are made: there is nothing to choose
    with pytest.raises(Unsupported, match="go with a pair"):
        keep_ab.static_facts(replace(SPLIT, options=(("go", 1),)))
    for facts in (crossed, plain):
        # accumulators of a thread, columns of both groups of all CTAs
        assert facts.width // 2 * facts.slices == 128
        assert facts.slices * 64 * 2 * (facts.width // 64) == 512
    assert storage.SLOT == 128 * 64 * 2
    assert pair.WHOLE_BOX == 2 * pair.ROWS_OF_BOX


def test_slots_of_a_pair_take_turns() -> None:
    seen = [pair.slot_of(tile) for tile in range(8)]
    assert [slot for slot, _ in seen] == [0, 1] * 4
    # a barrier turns each time that its slot is used
    for slot in range(2):
        assert [turn for s, turn in seen if s == slot] == [0, 1, 0, 1]


@pytest.mark.parametrize("config", [SPLIT, replace(SPLIT, tile_rows=64, cluster=1), SCALED])
def test_parts_of_the_scores_are_all_products_once(config: KernelConfig) -> None:
    facts = keep_ab.static_facts(config)
    found = [x for part in range(facts.score_parts) for x in terms.products(facts, part)]
    assert sorted(found) == sorted((term, k) for term in (0, 1) for k in range(facts.steps))
    # small ones first: they would be lost beside a sum of the others
    for part in range(facts.score_parts):
        order = [term for term, _ in terms.products(facts, part)]
        assert order == sorted(order, reverse=True)
    if facts.crossed:
        assert len(terms.products(facts, 0)) >= terms.FIRST + terms.WORDS


def test_two_terms_of_a_query_lose_less_than_bf16_does() -> None:
    """Of every bf16 number below 256, as of a row that is scaled: exact down to 2^-9 of what the
    greatest may be, off by at most 2^-10 below."""
    numbers = torch.arange(0x4380, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    high = numbers.to(torch.float8_e4m3fn).float()
    both = high + (numbers - high).to(torch.float8_e4m3fn).float()
    off = (numbers - both).abs()
    assert numbers.max() < 256
    assert off[numbers >= 0.25].max() == 0
    assert 0 < off.max() <= 2.0**-10


def test_a_thread_splits_what_it_will_hold() -> None:
    """Boxes of the query arrive in 64-byte rows, whose 16-byte chunks the copy permutes by row / 2;
    operand A has columns 4q .. 4q + 3 and those 16 further of rows g and g + 8."""
    arrived = {}
    for row in range(64):
        for column in range(32):
            chunk = (column // 8) ^ (row // 2 % 4)
            arrived[row * 64 + chunk * 16 + column % 8 * 2] = row, column
    for row in range(64):
        for q in range(4):
            at = terms.place_in_box(row, q)
            for far in range(2):
                found = [arrived[(at ^ (32 * far)) + 2 * i] for i in range(4)]
                assert found == [(row, 16 * far + 4 * q + i) for i in range(4)]
            # eight rows on, the permutation is the same
            assert terms.place_in_box(row + 8, q) == at + 512


def test_saturated_weights_are_seen_four_at_once() -> None:
    """Bytes are e4m3 without a sign: 0x7E is the greatest, 0x7F no number."""
    for byte in range(0x80):
        for place in range(4):
            others = 0x7D7D7D7D & ~(0xFF << 8 * place)
            word = others | byte << 8 * place
            assert bool((word + TO_HIGH_BIT) & HIGH_BITS) == (byte >= 0x7E)


def test_parts_of_qk_are_all_of_it() -> None:
    assert 0 < FIRST < FIRST + WORDS <= LATE < storage.STEPS


def test_a_stage_of_656_byte_tokens_is_what_arrives() -> None:
    facts = keep_ab.static_facts(SCALED)
    assert facts.stage_bytes == 64 * FP8_656_BYTES
    # swizzles begin at multiples of this, boxes of P too
    assert facts.stage_bytes % 1024 == 0
    # two boxes of P take the place of the rope
    assert storage.ROPE == 2 * storage.BOX


def test_factors_lie_where_a_thread_reads_those_of_its_tokens() -> None:
    """Of scores, tokens 8 j + 2 q and the next, of two j at once; of V, those of a k-step."""
    at = {}
    for lane in range(32):
        for e in range(2):
            at[2 * lane + e] = groups.place_of_pair(lane) + e
    assert sorted(at.values()) == list(range(64))
    for q in range(4):
        for step in range(4):
            tokens = [16 * step + 8 * n + 2 * q + e for n in range(2) for e in range(2)]
            assert [at[t] for t in tokens] == [16 * step + 4 * q + i for i in range(4)]


def test_values_times_their_factors_stay_in_fp16() -> None:
    assert 448 * 2.0**groups.UNIT_LOG2 <= 65504
    # and what partials are multiplied by takes no result out of it either
    assert 448 * 2.0**PARTIAL_LOG2 <= 65504


def test_tokens_of_a_word_of_weights() -> None:
    """The picture in the docstring of `transposed.attend`: what a quad holds of 16 tokens, and what
    the bytes of V^T's k-step are (tests of swap_ab: 0 8 1 9 2 10 .. 7 15)."""
    order = [t for g in range(8) for t in (g, g + 8)]
    for q in range(4):
        # accumulators 8 i + e and 8 i + 4 + e are tokens 2q + e and 2q + 8 + e of 16
        token = {0: 2 * q, 4: 2 * q + 8, 1: 2 * q + 1, 5: 2 * q + 9}
        assert [token[x] for x in (0, 4, 1, 5)] == order[4 * q : 4 * q + 4]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("base", "features"),
    [
        (EIGHT, ()),
        (EIGHT, (("features", 1),)),
        (SPLIT, ()),
        (replace(SPLIT, tile_rows=64, cluster=1), ()),
        (SPLIT, (("scales", 1),)),
        (SCALED, ()),
        (replace(SCALED, tile_rows=64, cluster=1), ()),
    ],
    ids=[
        "plain",
        "sinks",
        "split",
        "split, 64 rows",
        "split-scales",
        "656 bytes",
        "656 bytes, 64 rows",
    ],
)
def test_compiles_without_spills(base: KernelConfig, features: tuple[tuple[str, int], ...]) -> None:
    made = jit.compile(replace(base, options=features), "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    assert tuple(kernel.block or ()) == (transposed.THREADS, 1, 1)
    assert kernel.shared <= 232_448
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", made.ptx.read_text())
    found = {p.partition(".")[2] for p in products}
    wide = {"e4m3": {"f32.f16.f16"}, "fp8_656": {"f32.f16.f16", "f32.bf16.bf16"}}
    assert found == {"f32.e4m3.e4m3"} | (wide[base.kv_format] if base.q_dtype == "bf16" else set())
    # only such a pair has products of 128 rows, and sends weights to the other CTA
    crossed = keep_ab.static_facts(replace(base, options=features)).crossed
    assert ("m64n128k16.f32.f16.f16" in products) == crossed
    assert ("cp.async.bulk.shared::cluster.shared::cta" in made.ptx.read_text()) == crossed
