"""cute/swap_ab_sm90 on a machine without a GPU: its facts, what it refuses, what it compiles to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_lab import jit
from mla_lab.core.errors import Unsupported
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import NAMES, make_call, problem_for
from mla_lab.jit.shipped import CUTE
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.formula import MAX_SPLITS

pytest.importorskip("cutlass")
from mla_lab.cute.common.fp8 import ORDERS
from mla_lab.cute.split_merge.swap_ab_fragments import (
    fragments_per_row_pair,
    fragments_per_split,
)
from mla_lab.cute.swap_ab_sm90 import params as facts
from mla_lab.cute.swap_ab_sm90.query_hi_lo import LOW, query_place
from mla_lab.cute.swap_ab_sm90.shared_storage import PLAN_WORDS, barrier_table

from .built import kernel_of, products_of, ptx_of, tensor_copies_of
from .needs import needs_cxx
from .shared_builds import SWAP_AB_CLUSTER, SWAP_AB_LL

BASE = KernelConfig("cute/swap_ab_sm90", tile_rows=16, cluster=8)
#: options of the LL merge
LL = (("fused_merge", 3), ("grid", 1))
#: 8-bit caches of a bf16 query
TOKENS = tuple(facts.TOKEN_BYTES)


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
def test_shared_memory_fits_with_two_stages(rows: int, cluster: int) -> None:
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=cluster))
    used = c.small_bytes + c.q_bytes + c.stages * c.stage_bytes
    used += 0 if c.partials_on_ring else c.peer_partial_bytes
    assert c.stages >= 2
    assert used <= facts.SMEM_BYTES
    # partials on the ring's bytes must not reach beyond it
    assert not c.partials_on_ring or c.peer_partial_bytes <= c.stages * c.stage_bytes


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS[1:])
def test_every_unit_of_the_exchange_has_one_owner(rows: int, cluster: int) -> None:
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=cluster))
    # units of 2 columns x 2 rows: all shares together are the whole row tile
    assert c.fragments * cluster == rows // 2 * 256
    assert c.row_pairs * cluster == rows // 2 * c.column_parts


def test_three_stages_at_eight_rows() -> None:
    assert facts.traits_of(replace(BASE, tile_rows=8, cluster=1)).stages == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("tile_rows", 128), ("cluster", 3), ("page_size", 8), ("kv_format", "fp16")],
)
def test_refusals_name_the_field(field: str, value: object) -> None:
    with pytest.raises(Unsupported, match=field):
        facts.traits_of(replace(BASE, **{field: value}))


@pytest.mark.parametrize("option", [("prefetch", 1), ("fused_merge", 4), ("gather", 3)])
def test_unknown_options_are_refused(option: tuple[str, int]) -> None:
    with pytest.raises(Unsupported, match=option[0]):
        facts.traits_of(replace(BASE, options=(option,)))


def test_barriers_fit_their_share_of_shared_memory() -> None:
    for kv_format in ("bf16", *TOKENS):
        c = facts.traits_of(replace(BASE, cluster=1, kv_format=kv_format))
        table = barrier_table(c)
        assert 8 * sum(number for number, _ in table.values()) + 144 <= c.small_bytes
        assert table["kv_full"] == (c.stages * c.barriers_per_stage, 1)
        assert all(arrivals > 0 for _, arrivals in table.values())


@pytest.mark.parametrize(
    ("options", "kept"),
    [((), False), ((("fused_merge", 2),), True), ((("fused_merge", 2), ("grid", 1)), False)],
)
def test_a_plan_that_is_read_again_has_a_barrier_at_which_each_writer_arrives(
    options: tuple[tuple[str, int], ...], kept: bool
) -> None:
    c = facts.traits_of(replace(BASE, cluster=1, options=options))
    table = barrier_table(c)
    assert table.get("plan_full") == ((1, PLAN_WORDS) if kept else None)
    pieces = barrier_table(replace(c, pieces=True))
    assert pieces["kept_full"] == (2, 1)
    assert "plan_full" not in pieces
    assert 8 * sum(number for number, _ in table.values()) + 144 <= c.small_bytes


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize(
    ("cluster", "options"), [*((cluster, ()) for cluster in facts.CLUSTERS), (1, LL)]
)
def test_shares_of_a_merge_cover_the_units_and_its_tables_fit(
    rows: int, cluster: int, options: tuple[tuple[str, int], ...]
) -> None:
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=cluster, options=options))
    for splits in range(2, MAX_SPLITS + 1):
        share = fragments_per_split(c.fragments, splits)
        assert share % 8 == 0
        assert (splits - 1) * share < c.fragments + splits * 8
        assert splits * share >= c.fragments
    # weights of every pair and split, and the sums of 256 threads, on the idle ring
    sums = 256 * 4 * c.fragment_values
    assert (c.row_pairs + 1) * MAX_SPLITS * 8 + sums <= c.stages * c.stage_bytes


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
def test_every_note_of_a_row_pair_has_its_own_place(rows: int) -> None:
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=1, options=LL))
    pair = fragments_per_row_pair(c)
    assert pair * c.fragment_values == 2 * 512
    for splits in range(2, MAX_SPLITS + 1):
        share = fragments_per_split(c.fragments, splits)
        spans = [(d, d * share, min((d + 1) * share, c.fragments)) for d in range(splits)]
        # share d and row pair p meet: the pair's lse goes there as note d + p
        places = [
            d + p
            for d, begin, end in spans
            for p in range(c.row_pairs)
            if begin < (p + 1) * pair and end > p * pair
        ]
        assert len(set(places)) == len(places)
        assert max(places) < splits + c.row_pairs


def test_merge_without_counters_is_for_one_cta_in_grid_mode() -> None:
    for cluster, grid in ((2, 1), (1, 0)):
        options = (("grid", grid), ("fused_merge", 3))
        with pytest.raises(Unsupported, match="fused_merge"):
            facts.traits_of(replace(BASE, cluster=cluster, options=options))


def test_pairs_of_row_tiles_are_for_one_cta_in_grid_mode() -> None:
    for cluster, merge in ((2, 2), (1, 1)):
        options = (("fused_merge", merge), ("grid", 1), ("pair", 2))
        with pytest.raises(Unsupported, match="pair"):
            facts.traits_of(replace(BASE, cluster=cluster, options=options))


PAIRS, GATHERS = (
    [c for c in CUTE if c.kernel == BASE.kernel and c.option(option)]
    for option in ("pair", "gather")
)


@needs_cxx
@pytest.mark.parametrize("config", PAIRS, ids=KernelConfig.name)
def test_a_pair_shares_its_loads(config: KernelConfig) -> None:
    """All of KV by multicast; Q is each CTA's own."""
    copies = {name: n for name, n in ptx_of(config).items() if name.startswith("cp.async.bulk.ten")}
    shared = sum(n for name, n in copies.items() if "multicast::cluster" in name)
    assert shared > 0 and sum(copies.values()) - shared == 1


@needs_cxx
def test_orders_are_of_a_kind_that_sanitizers_know() -> None:
    """racecheck takes an mbarrier for an order between those who arrive and those who wait
    themselves, and no bar.arrive; synccheck wants all of a named barrier at one place."""
    ptx = jit.compile(SWAP_AB_LL, "sm_90a").ptx.read_text()
    assert "bar.arrive" not in ptx
    # all 256 meet at one place: behind the columns of a merge
    assert len(re.findall(r"bar\.sync\s+1, 256", ptx)) == 1


@needs_cxx
def test_merge_without_counters_has_neither_fence_nor_atomic() -> None:
    made = jit.compile(SWAP_AB_LL, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    assert "ld.relaxed.gpu.global.v4.b32" in ptx
    assert re.findall(r"\b(?:red|atom|membar|fence\.acq_rel)\.", ptx) == []


@needs_cxx
def test_compiles_without_spills_to_the_expected_instructions() -> None:
    made = jit.compile(SWAP_AB_CLUSTER, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    assert tuple(kernel.block or ()) == (288, 1, 1)
    assert 0 < kernel.shared <= facts.SMEM_BYTES
    ptx = made.ptx.read_text()
    assert "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16" in ptx
    assert "st.async" in ptx
    assert "cp.async.bulk.tensor.4d" in ptx


@needs_cxx
def test_grid_mode_reads_no_plan_and_merges_without_an_answer() -> None:
    made = jit.compile(SWAP_AB_CLUSTER, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    assert "red.release.gpu.global.inc.u32" in ptx
    assert "atom." not in ptx
    # nothing of an earlier kernel's memory is touched before its end is known
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert "ld.global" not in before
    assert "cp.async.bulk.tensor" not in before


GATHER = (("fused_merge", 1), ("grid", 1), ("gather", 2), ("features", 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("cluster", 2), ("mask", "tree"), ("options", (("fused_merge", 1), ("gather", 1)))],
)
def test_tokens_are_gathered_by_one_cta_in_grid_mode(field: str, value: object) -> None:
    with pytest.raises(Unsupported, match="gather"):
        facts.traits_of(replace(BASE, **{"cluster": 1, "options": GATHER, field: value}))


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("gather", [0, 1])
def test_registers_of_both_roles_fit(rows: int, gather: int) -> None:
    options = (("fused_merge", 1), ("grid", 1), ("gather", gather))
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=1, page_size=64, options=options))
    producer, consumer = c.registers
    if c.producer_group:
        # a thread that asks for more than the launch has given waits for ever
        assert 128 * producer + facts.CONSUMER_THREADS * consumer <= 384 * 168
        assert producer % 8 == consumer % 8 == 0
    assert c.threads == facts.CONSUMER_THREADS + (128 if c.producer_group else 32)
    assert c.full_arrivals <= c.threads - facts.CONSUMER_THREADS


@needs_cxx
@pytest.mark.parametrize("config", GATHERS, ids=KernelConfig.name)
def test_a_gathered_tile_is_copied_by_16_bytes_and_counted_by_its_barrier(
    config: KernelConfig,
) -> None:
    names = ptx_of(config)
    assert any(name.startswith("cp.async.cg.shared.global") for name in names)
    assert any(name.startswith("cp.async.mbarrier.arrive.noinc") for name in names)
    # of tensor copies only Q is left
    assert tensor_copies_of(config) == 1


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
@pytest.mark.parametrize("kv_format", TOKENS)
def test_two_terms_lie_where_the_query_arrived(rows: int, cluster: int, kv_format: str) -> None:
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=cluster, kv_format=kv_format))
    used = c.small_bytes + c.q_bytes + c.stages * c.stage_bytes
    used += 0 if c.partials_on_ring else c.peer_partial_bytes
    assert c.stages >= (3 if cluster == 1 else 2)
    assert used <= facts.SMEM_BYTES
    assert c.mma_n == 2 * rows
    # two terms of one byte, or two bytes
    assert c.q_bytes == rows * facts.HEAD_DIM * 2
    # the weights of a tile lie on its rope: of 656 bytes those of four groups, two terms each
    weights = c.mma_n * facts.TILE_KV
    assert 4 * weights <= c.rope_bytes if c.kv_656 else weights <= facts.TILE_KV * facts.BOX
    producer, consumer = c.registers
    # what 384 threads have at the launch, 288 with one producer warp
    assert not c.producer_group or 128 * producer + facts.CONSUMER_THREADS * consumer <= 384 * 168


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tile_rows": 64}, "64 rows"),
        ({"options": (("fused_merge", 3), ("grid", 1), ("pair", 2))}, "pair 2"),
        ({"q_dtype": "fp16"}, "kv_format"),
    ],
)
def test_what_a_cache_of_eight_bits_lacks(changed: dict[str, object], named: str) -> None:
    config = replace(BASE, cluster=1, kv_format="fp8_656")
    with pytest.raises(Unsupported, match=named):
        facts.traits_of(replace(config, **changed))


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("kv_format", TOKENS)
def test_every_byte_of_a_split_query_has_its_place(rows: int, kv_format: str) -> None:
    """The swizzle of the matrix unit's K-major rows, of 64 or 128 bytes."""
    c = facts.traits_of(replace(BASE, tile_rows=rows, cluster=1, kv_format=kv_format))
    mask = 7 if c.kv_656 else 3
    bank = {}
    for column in range(0, c.columns, 8):
        box, chunk = column // 64, column % 64 // 8
        for row in range(rows):
            at = query_place(c, 0, row, box, chunk)
            plain = column // c.box * (c.mma_n * c.box) + row * c.box + column % c.box
            assert at == plain ^ ((plain >> 7 & mask) << 4)
            bank[at] = bank[at + rows * c.box] = (row, column)
    assert sorted(bank) == list(range(0, c.mma_n * c.columns, 8))


@given(values=st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=40))
def test_two_terms_hold_a_number_of_bf16(values: list[float]) -> None:
    row = torch.tensor([1.0, *values]).bfloat16().double()
    scaled = row * 2.0**7
    hi = e4m3(scaled)
    lo = e4m3((scaled - hi) / LOW)
    left = (hi + lo * LOW - scaled).abs() / 2.0**7
    normal = row.abs() >= 2.0**-13
    assert (left[normal] == 0).all()
    assert (left <= 2.0**-21).all()
    assert max(hi.abs().max(), lo.abs().max()) <= 448


def e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.float().to(torch.float8_e4m3fn).double()


@needs_cxx
@pytest.mark.parametrize("kv_format", TOKENS)
def test_a_cache_of_eight_bits_reaches_the_matrix_unit_as_it_is(kv_format: str) -> None:
    options = (("fused_merge", 3), ("grid", 1), ("shaped", 1))
    config = replace(BASE, cluster=1, kv_format=kv_format, mask="causal", options=options)
    assert kernel_of(config).stack == 0
    assert kernel_of(config).shared <= facts.SMEM_BYTES
    # 16 rows of two terms, and the rope of 656 bytes as it is
    rope = {"m64n16k16.f32.bf16.bf16"} if kv_format == "fp8_656" else set()
    assert products_of(config) == {"m64n32k32.f32.e4m3.e4m3", *rope}


EIGHT = replace(BASE, q_dtype="e4m3", kv_format="e4m3", mask="causal")
MAIL = (("fused_merge", 3), ("grid", 1))


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
def test_tiles_of_eight_bits_fit_four_times(rows: int, cluster: int) -> None:
    c = facts.traits_of(replace(EIGHT, tile_rows=rows, cluster=cluster))
    used = c.small_bytes + c.q_bytes + c.stages * c.stage_bytes
    used += 0 if c.partials_on_ring else c.peer_partial_bytes
    assert c.stages >= (4 if cluster == 1 else 2)
    assert used <= facts.SMEM_BYTES
    assert not c.partials_on_ring or c.peer_partial_bytes <= c.stages * c.stage_bytes
    assert (c.row_pairs + 1) * MAX_SPLITS * 8 + 256 * 16 <= c.stages * c.stage_bytes
    producer, consumer = c.registers
    assert 128 * producer + facts.CONSUMER_THREADS * consumer <= 384 * 168


def test_who_has_which_column_and_token_of_eight_bits() -> None:
    """The picture in the docstring of `fp8`, by what ldmatrix, stmatrix and prmt do to a tile whose
    byte at (token, column) is told by its place."""
    tile = [[(token, column) for column in range(16)] for token in range(32)]

    def transposed(first: int, lane: int) -> list[tuple[int, int]]:
        g, q = lane // 4, lane % 4
        # of 8 x 8 elements of two bytes a lane gets (2q, g) and (2q + 1, g)
        return [tile[first + 2 * q + i][2 * g + b] for i in range(2) for b in range(2)]

    def permuted(x: list, y: list, order: int) -> list:
        return [(x + y)[order >> 4 * i & 7] for i in range(4)]

    for lane in range(32):
        g, q = lane // 4, lane % 4
        m = [transposed(8 * i, lane) for i in range(4)]
        words = [permuted(m[a], m[a + 1], order) for a in (0, 2) for order in ORDERS]
        for number, word in enumerate(words):
            # operand A of the matrix unit: row g or g + 8, positions 4q .. 4q + 3 of 16 or 16 + 16
            place = [16 * (number // 2) + 4 * q + i for i in range(4)]
            token = [p // 16 * 16 + p % 16 // 2 + 8 * (p % 2) for p in place]
            assert word == [(t, 2 * g + number % 2) for t in token]
        # the scores of tokens g and g + 8 leave as one element for place g of their row's sixteen
        assert [2 * g + h for h in range(2)] == [POSITIONS.index(g + 8 * h) for h in range(2)]


#: tokens of sixteen in the order of P's bytes
POSITIONS = [t for g in range(8) for t in (g, g + 8)]


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_format": "bf16"},
        {"q_dtype": "bf16", "kv_format": "bf16", "out_dtype": "e4m3"},
        {"tile_rows": 64, "options": (("fused_merge", 1), ("gather", 1), ("grid", 1))},
    ],
)
def test_what_eight_bits_do_not_go_with(changed: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=r"kv_format|out_dtype|tile_rows"):
        facts.traits_of(replace(EIGHT, **{"cluster": 1, **changed}))


@needs_cxx
@pytest.mark.parametrize("out_dtype", ["bf16", "e4m3"])
def test_eight_bits_reach_the_matrix_unit_as_they_are(out_dtype: str) -> None:
    config = replace(EIGHT, cluster=1, out_dtype=out_dtype, options=(*MAIL, ("shaped", 1)))
    assert kernel_of(config).stack == 0
    assert products_of(config) == {"m64n16k32.f32.e4m3.e4m3"}
    names = ptx_of(config)
    assert any(name.startswith("ldmatrix.sync.aligned.m8n8.x4.trans") for name in names)
    assert any(name.startswith("stmatrix.sync.aligned.m8n8.x2.trans") for name in names)


@needs_cxx
@pytest.mark.parametrize("length", [-1, -64, -(2**31)])
@pytest.mark.parametrize("config", [SWAP_AB_LL, SWAP_AB_CLUSTER], ids=KernelConfig.name)
def test_a_length_below_0_counts_as_none(config: KernelConfig, length: int) -> None:
    """As where workers walk. The request's rows are written, and no CTA of a cluster waits for
    another one that has ended."""
    call = make_call(config, problem_for(config, (200, 200)), 3)
    call.args[NAMES.index("seq_lens")][1] = length
    kernel = EmulatedKernel.of(jit.compile(config), Options(check=True))
    kernel(*call.args)
    assert kernel.run.findings == []
    (out, none), (lse, no_lse) = call.out.view(2, -1), call.lse.view(2, -1)
    assert out.isfinite().all() and lse.isfinite().all()
    assert none.eq(0).all() and no_lse.isneginf().all()
