"""cute/keep_ab_sm90 over e4m3 on a machine without a GPU: registers, shared memory, who has which
token, and what it compiles to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from mla_lab.core.dims import FP8_656_BYTES
from mla_lab.core.errors import Unsupported
from mla_lab.jit.shipped import CUTE
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute import keep_ab_sm90 as keep_ab
from mla_lab.cute.keep_ab_sm90 import fp8
from mla_lab.cute.keep_ab_sm90.fp8 import (
    kv_656,
    p_exchange_2cta,
    p_fp16,
    params,
    query_hi_lo,
    query_split,
)
from mla_lab.cute.keep_ab_sm90.fp8.mainloop_pv import PARTIAL_LOG2
from mla_lab.cute.keep_ab_sm90.fp8.mainloop_qk_softmax import (
    FIRST,
    HIGH_BITS,
    LATE,
    TO_HIGH_BIT,
    WORDS,
)
from mla_lab.cute.keep_ab_sm90.params import BOX

from .built import kernel_of, products_of, ptx_of
from .needs import needs_cxx

EIGHT = KernelConfig(
    "cute/keep_ab_sm90", q_dtype="e4m3", kv_format="e4m3", tile_rows=128, cluster=2
)
HI_LO = replace(EIGHT, q_dtype="bf16")
KV_656 = replace(HI_LO, kv_format="fp8_656")


def static_facts(config: KernelConfig) -> params.Fp8Config:
    facts = keep_ab.static_facts(config)
    assert isinstance(facts, params.Fp8Config)
    return facts


@pytest.mark.parametrize("config", [EIGHT, HI_LO, replace(HI_LO, tile_rows=64, cluster=1), KV_656])
def test_registers_of_all_roles_are_those_of_the_card(config: KernelConfig) -> None:
    producer, qk_softmax, pv = fp8.role_registers(static_facts(config))
    assert (2 * pv + qk_softmax + producer) * 128 <= 65536
    assert fp8.THREADS == 4 * 128


@pytest.mark.parametrize(("config", "stages"), [(EIGHT, 6), (HI_LO, 5), (KV_656, 5)])
def test_stages_that_do_not_fit_are_refused(config: KernelConfig, stages: int) -> None:
    static_facts(replace(config, options=(("stages", stages - 1),)))
    with pytest.raises(Unsupported, match="B of shared memory"):
        static_facts(replace(config, options=(("stages", stages),)))


def test_what_eight_bits_do_not_go_with() -> None:
    for changed in (
        {"kv_format": "bf16"},
        {"tile_rows": 64, "cluster": 1, "options": (("skip", 1),)},
        {"q_dtype": "bf16", "kv_format": "bf16", "out_dtype": "e4m3"},
        {"tile_rows": 32, "cluster": 1},
    ):
        with pytest.raises(Unsupported):
            static_facts(replace(EIGHT, **changed))
    for changed in (
        {"q_dtype": "fp16"},
        {"out_dtype": "e4m3"},
        {"tile_rows": 64, "cluster": 1, "options": (("skip", 1),)},
    ):
        with pytest.raises(Unsupported):
            static_facts(replace(HI_LO, **changed))


def test_weights_stay_below_what_saturates() -> None:
    facts = static_facts(EIGHT)
    assert 2 ** (params.WEIGHT_LOG2 + facts.rescale_log2) < 448
    # half way to the greatest, where rounding would make it that: no weight is so by chance
    assert 2 ** (params.WEIGHT_LOG2 + facts.rescale_log2) < 432
    # row sums of sixteen weights pass through fp16
    assert 16 * 448 < 65504
    # a query of sixteen bits has weights of fp16, the least of which is 2**-24: of the greatest
    # 2**-30, and 2**-19 of lists of slots, where a bit of a weight tells that a row max moves
    gathers = ((), (("gather", 1),), (("gather", 2),))
    for kv_format, options in product(("e4m3", "fp8_656"), gathers):
        build = replace(HI_LO, kv_format=kv_format, tile_rows=64, cluster=1, options=options)
        facts = static_facts(build)
        lists = options == (("gather", 2),)
        assert 2 ** (facts.weight_log2 + facts.rescale_log2) <= (2 if lists else 65504)
        assert facts.optimistic is lists
        assert 2.0**-24 / 2**facts.weight_log2 <= (2**-19 if lists else 2**-30)


def test_a_weight_of_a_list_that_must_not_be_is_seen() -> None:
    """2 and more, infinity and NaN have a bit that no smaller fp16 has, in both halves."""
    options = (("gather", 2),)
    facts = static_facts(replace(HI_LO, tile_rows=64, cluster=1, options=options))
    assert facts.weight_log2 + facts.rescale_log2 == 1
    bits = torch.arange(0x8000, dtype=torch.int32)
    value = bits.to(torch.int16).view(torch.float16)
    for word in (bits, bits << 16):
        seen = (word & p_fp16.TWO) != 0
        assert torch.equal(seen, ~(value < 2))


def test_a_sum_of_a_pair_tells_before_a_weight_passes_fp16() -> None:
    """Below the sum that moves a row max no weight passes fp16; at it one of 16 weights is high
    enough to move it, so that the next tile does not find the same sum again; behind the move the
    smallest weights are kept down to 2**-30 of the greatest."""
    facts = static_facts(HI_LO)
    assert facts.p_exchange and facts.optimistic
    assert 2**p_fp16.SUM_LOG2 < 65504
    assert facts.weight_log2 + facts.rescale_log2 <= p_fp16.SUM_LOG2 - 4
    assert 16 * 2**facts.weight_log2 < 2**p_fp16.SUM_LOG2
    assert 2.0**-24 / 2**facts.weight_log2 == 2**-30


def test_who_halves_columns() -> None:
    """A pair over e4m3 with a bf16 query; an e4m3 query has none to gain, 656 bytes no room, and
    with features the attend group has no registers."""
    exchange = static_facts(HI_LO)
    plain = static_facts(replace(HI_LO, tile_rows=64, cluster=1))
    assert exchange.p_exchange and not plain.p_exchange
    for config in (EIGHT, KV_656, replace(HI_LO, mask="tree")):
        assert not static_facts(config).p_exchange
    for option in ("features", "scales"):
        assert not static_facts(replace(HI_LO, options=((option, 1),))).p_exchange
    for facts in (exchange, plain):
        # accumulators of a thread, columns of both groups of all CTAs
        assert facts.rows // 2 * facts.slices == 128
        assert facts.slices * 64 * 2 * (facts.rows // 64) == 512
    assert params.P_STAGE == 128 * 64 * 2
    assert p_exchange_2cta.WHOLE_BOX == 2 * p_exchange_2cta.ROWS_OF_BOX


def test_p_stages_alternate() -> None:
    states = [p_exchange_2cta.p_state(tile) for tile in range(8)]
    assert [state.index for state in states] == [0, 1] * 4
    # a barrier's phase flips each time that its stage is used
    for stage in range(2):
        assert [state.phase for state in states if state.index == stage] == [0, 1, 0, 1]


@pytest.mark.parametrize("config", [HI_LO, replace(HI_LO, tile_rows=64, cluster=1), KV_656])
def test_parts_of_the_scores_are_all_products_once(config: KernelConfig) -> None:
    facts = static_facts(config)
    found = [x for part in range(facts.qk_parts) for x in query_hi_lo.mma_steps(facts, part)]
    assert sorted(found) == sorted((term, k) for term in (0, 1) for k in range(facts.steps))
    # small ones first: they would be lost beside a sum of the others
    for part in range(facts.qk_parts):
        order = [term for term, _ in query_hi_lo.mma_steps(facts, part)]
        assert order == sorted(order, reverse=True)
    if facts.p_exchange:
        assert len(query_hi_lo.mma_steps(facts, 0)) >= query_hi_lo.FIRST + query_hi_lo.WORDS


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
            at = query_split.place_in_box(row, q)
            for far in range(2):
                found = [arrived[(at ^ (32 * far)) + 2 * i] for i in range(4)]
                assert found == [(row, 16 * far + 4 * q + i) for i in range(4)]
            # eight rows on, the permutation is the same
            assert query_split.place_in_box(row + 8, q) == at + 512


def test_saturated_weights_are_seen_four_at_once() -> None:
    """Bytes are e4m3 without a sign: 0x7E is the greatest, 0x7F no number."""
    for byte in range(0x80):
        for place in range(4):
            others = 0x7D7D7D7D & ~(0xFF << 8 * place)
            word = others | byte << 8 * place
            assert bool((word + TO_HIGH_BIT) & HIGH_BITS) == (byte >= 0x7E)


def test_parts_of_qk_are_all_of_it() -> None:
    assert 0 < FIRST < FIRST + WORDS <= LATE < static_facts(EIGHT).steps


def test_a_stage_of_656_byte_tokens_is_what_arrives() -> None:
    facts = static_facts(KV_656)
    assert facts.stage_bytes == 64 * FP8_656_BYTES
    # swizzles begin at multiples of this, boxes of P too
    assert facts.stage_bytes % 1024 == 0
    # two boxes of P take the place of the rope
    assert params.ROPE == 2 * BOX


def test_factors_lie_where_a_thread_reads_those_of_its_tokens() -> None:
    """Of scores, tokens 8 j + 2 q and the next, of two j at once; of V, those of a k-step."""
    at = {}
    for lane in range(32):
        for e in range(2):
            at[2 * lane + e] = kv_656.place_of_tokens(lane) + e
    assert sorted(at.values()) == list(range(64))
    for q in range(4):
        for step in range(4):
            tokens = [16 * step + 8 * n + 2 * q + e for n in range(2) for e in range(2)]
            assert [at[t] for t in tokens] == [16 * step + 4 * q + i for i in range(4)]


def test_values_times_their_factors_stay_in_fp16() -> None:
    assert 448 * 2.0**kv_656.UNIT_LOG2 <= 65504
    # and what partials are multiplied by takes no result out of it either
    assert 448 * 2.0**PARTIAL_LOG2 <= 65504


@needs_cxx
@pytest.mark.parametrize(
    "config",
    [
        config
        for config in CUTE
        if config.kernel == EIGHT.kernel
        and config.kv_format in ("e4m3", "fp8_656")
        and not config.option("gather")
        and not config.option("pieces")
    ],
    ids=KernelConfig.name,
)
def test_compiles_without_spills_to_products_of_its_formats(config: KernelConfig) -> None:
    assert kernel_of(config).stack == 0 and kernel_of(config).shared <= 232_448
    products = products_of(config)
    wide = {"e4m3": {"f32.f16.f16"}, "fp8_656": {"f32.f16.f16", "f32.bf16.bf16"}}
    expected = {"f32.e4m3.e4m3"} | (wide[config.kv_format] if config.q_dtype == "bf16" else set())
    assert {product.partition(".")[2] for product in products} == expected
    # only such a pair has products of 128 rows, and sends weights to the other CTA
    exchange = static_facts(config).p_exchange
    assert ("m64n128k16.f32.f16.f16" in products) == exchange
    sends = "cp.async.bulk.shared::cluster.shared::cta"
    assert any(name.startswith(sends) for name in ptx_of(config)) == exchange
