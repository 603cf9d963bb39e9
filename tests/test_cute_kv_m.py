"""cute/kv_m on a machine without a GPU: its facts, what it refuses, what it compiles to."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from mla_lab import jit
from mla_lab.errors import Unsupported
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute.kv_m import config as facts
from mla_lab.cute.kv_m.fp8 import ORDERS

BASE = KernelConfig("cute/kv_m", tile_rows=16, cluster=8)


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
def test_shared_memory_fits_with_two_stages(rows: int, cluster: int) -> None:
    c = facts.shape_of(replace(BASE, tile_rows=rows, cluster=cluster))
    used = c.small_bytes + c.q_bytes + c.stages * c.tile_bytes
    used += 0 if c.aliased else c.exchange_bytes
    assert c.stages >= 2
    assert used <= facts.SMEM_BYTES
    # partials on the ring's bytes must not reach beyond it
    assert not c.aliased or c.exchange_bytes <= c.stages * c.tile_bytes


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS[1:])
def test_every_unit_of_the_exchange_has_one_owner(rows: int, cluster: int) -> None:
    c = facts.shape_of(replace(BASE, tile_rows=rows, cluster=cluster))
    # units of 2 columns x 2 rows: all shares together are the whole row tile
    assert c.units * cluster == rows // 2 * 256
    assert c.pairs * cluster == rows // 2 * c.parts


def test_three_stages_at_eight_rows() -> None:
    assert facts.shape_of(replace(BASE, tile_rows=8, cluster=1)).stages == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("tile_rows", 128), ("cluster", 3), ("page_size", 8), ("kv_format", "fp16")],
)
def test_refusals_name_the_field(field: str, value: object) -> None:
    with pytest.raises(Unsupported, match=field):
        facts.shape_of(replace(BASE, **{field: value}))


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
def test_shares_of_a_merge_cover_the_units_and_its_tables_fit(rows: int, cluster: int) -> None:
    c = facts.shape_of(replace(BASE, tile_rows=rows, cluster=cluster))
    for splits in range(2, facts.MAX_SPLITS + 1):
        share = facts.share_units(c.units, splits)
        assert share % 8 == 0
        assert (splits - 1) * share < c.units + splits * 8
        assert splits * share >= c.units
    # weights of every pair and split, and the 256 columns' sums, on the idle ring
    assert (c.pairs + 1) * facts.MAX_SPLITS * 8 + 256 * 16 <= c.stages * c.tile_bytes


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
def test_every_note_of_a_row_pair_has_its_own_place(rows: int) -> None:
    options = (("grid", 1), ("fused_merge", 3))
    c = facts.shape_of(replace(BASE, tile_rows=rows, cluster=1, options=options))
    for splits in range(2, facts.MAX_SPLITS + 1):
        share = facts.share_units(c.units, splits)
        spans = [(d, d * share, min((d + 1) * share, c.units)) for d in range(splits)]
        # share d and row pair p meet: the pair's lse goes there as note d + p
        places = [
            d + p
            for d, begin, end in spans
            for p in range(c.pairs)
            if begin < (p + 1) * 256 and end > p * 256
        ]
        assert len(set(places)) == len(places)
        assert max(places) < splits + c.pairs


def test_merge_without_counters_is_for_one_cta_in_grid_mode() -> None:
    for cluster, grid in ((2, 1), (1, 0)):
        options = (("grid", grid), ("fused_merge", 3))
        with pytest.raises(Unsupported, match="fused_merge"):
            facts.shape_of(replace(BASE, cluster=cluster, options=options))


def test_pairs_of_row_tiles_are_for_one_cta_in_grid_mode() -> None:
    for cluster, merge in ((2, 2), (1, 1)):
        options = (("fused_merge", merge), ("grid", 1), ("pair", 2))
        with pytest.raises(Unsupported, match="pair"):
            facts.shape_of(replace(BASE, cluster=cluster, options=options))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_pair_shares_its_loads_and_its_releases() -> None:
    options = (("fused_merge", 3), ("grid", 1), ("pair", 2))
    made = jit.compile(replace(BASE, tile_rows=32, cluster=1, options=options), "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    # 9 column boxes at two places: the first tile and the rest
    assert len(re.findall(r"cp\.async\.bulk\.tensor.*multicast::cluster", ptx)) == 18
    # rounds of warpgroup 0: 2 values-first + 1 first + 1 tail; of 1: 2 + 1 early + 1 own + 1 tail
    assert ptx.count("mbarrier.arrive.shared::cluster.b64") >= 8


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_orders_are_of_a_kind_that_sanitizers_know() -> None:
    """racecheck takes an mbarrier for an order between those who arrive and those who wait
    themselves, and no bar.arrive; synccheck wants all of a named barrier at one place."""
    options = (("grid", 1), ("fused_merge", 3))
    ptx = jit.compile(replace(BASE, cluster=1, options=options), "sm_90a").ptx.read_text()
    assert "bar.arrive" not in ptx
    # all 256 meet at one place: behind the columns of a merge
    assert len(re.findall(r"bar\.sync\s+1, 256", ptx)) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_merge_without_counters_has_neither_fence_nor_atomic() -> None:
    options = (("grid", 1), ("fused_merge", 3))
    made = jit.compile(replace(BASE, cluster=1, options=options), "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    assert "ld.relaxed.gpu.global.v4.b32" in ptx
    assert re.findall(r"\b(?:red|atom|membar|fence\.acq_rel)\.", ptx) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiles_without_spills_to_the_expected_instructions() -> None:
    made = jit.compile(BASE, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    assert tuple(kernel.block or ()) == (288, 1, 1)
    assert 0 < kernel.shared <= facts.SMEM_BYTES
    ptx = made.ptx.read_text()
    assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in ptx
    # one push a fragment and one for the maxima: rows / 8 x 4 slices, one code for both warpgroups
    assert ptx.count("st.async") == 2 * 4 + 1
    assert "cp.async.bulk.tensor.4d" in ptx


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_grid_mode_reads_no_plan_and_merges_without_an_answer() -> None:
    options = (("grid", 1), ("fused_merge", 2))
    made = jit.compile(replace(BASE, cluster=1, options=options), "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    # arrival, and having seen all arrivals; one code for both warpgroups
    assert ptx.count("red.release.gpu.global.inc.u32") == 1
    assert ptx.count("red.relaxed.gpu.global.inc.u32") == 1
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
        facts.shape_of(replace(BASE, **{"cluster": 1, "options": GATHER, field: value}))


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("gather", [0, 1])
def test_registers_of_both_roles_fit(rows: int, gather: int) -> None:
    options = (("fused_merge", 1), ("grid", 1), ("gather", gather))
    c = facts.shape_of(replace(BASE, tile_rows=rows, cluster=1, page_size=64, options=options))
    producer, consumer = c.registers
    if c.wide:
        # a thread that asks for more than the launch has given waits for ever
        assert 128 * producer + facts.CONSUMERS * consumer <= 384 * 168
        assert producer % 8 == consumer % 8 == 0
    assert c.threads == facts.CONSUMERS + (128 if c.wide else 32)
    assert c.producers <= c.threads - facts.CONSUMERS


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_gathered_tile_is_copied_by_16_bytes_and_counted_by_its_barrier() -> None:
    made = jit.compile(replace(BASE, cluster=1, options=GATHER), "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    # four tokens a lane, nine boxes each, at one place
    assert ptx.count("cp.async.cg.shared.global") == 36
    assert ptx.count("cp.async.mbarrier.arrive.noinc") == 1
    # of tensor copies only Q is left
    assert len(re.findall(r"cp\.async\.bulk\.tensor", ptx)) == 1


WIDENED = tuple(facts.RAW_BYTES)


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
@pytest.mark.parametrize("kv_format", WIDENED)
def test_raw_copies_lie_beside_two_stages(rows: int, cluster: int, kv_format: str) -> None:
    c = facts.shape_of(replace(BASE, tile_rows=rows, cluster=cluster, kv_format=kv_format))
    used = c.small_bytes + c.q_bytes + c.stages * c.tile_bytes
    used += 0 if c.aliased else c.exchange_bytes
    used += facts.RAW_WARPS * c.raw_ahead * c.raw_bytes
    assert c.stages == 2
    # a warp turns one copy while the other is on its way
    assert c.raw_ahead >= 2
    assert used <= facts.SMEM_BYTES
    assert not c.aliased or c.exchange_bytes <= c.stages * c.tile_bytes
    producer, consumer = c.registers
    # what 384 threads have at the launch, or 512
    most = 384 * 168 if c.raw_groups == 1 else 512 * 128
    assert 128 * c.raw_groups * producer + facts.CONSUMERS * consumer <= most
    assert c.threads == facts.CONSUMERS + c.producers == facts.CONSUMERS + 128 * c.raw_groups


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tile_rows": 64}, "64 rows"),
        ({"tile_rows": 32, "options": (("raw_groups", 2),)}, "raw_groups 2"),
        ({"options": (("fused_merge", 1), ("gather", 1), ("grid", 1))}, "gather 1"),
        ({"options": (("fused_merge", 3), ("grid", 1), ("pair", 2))}, "pair 2"),
        ({"q_dtype": "fp16"}, "kv_format"),
    ],
)
def test_what_a_cache_of_eight_bits_lacks(changed: dict[str, object], named: str) -> None:
    config = replace(BASE, cluster=1, kv_format="fp8_656")
    with pytest.raises(Unsupported, match=named):
        facts.shape_of(replace(config, **changed))


def banks(places: list[int]) -> list[int]:
    """How often each 16-byte column of shared memory is met."""
    return [sum(place // 16 % 8 == column for place in places) for column in range(8)]


@pytest.mark.parametrize("kv_format", WIDENED)
def test_eight_lanes_meet_all_banks(kv_format: str) -> None:
    """The layout of the docstring of `widen`, for each quarter of a warp."""
    width, packed = facts.RAW_BYTES[kv_format], kv_format == "fp8_656"
    for quarter in range(4):
        reads, first, second, values = [], [], [], set()
        for lane in range(8 * quarter, 8 * quarter + 8):
            order, chunk = lane // 4, lane % 4
            row = (order >> 1) + 4 * (order & 1) if packed else order
            swap = row >> 2 if packed else 0
            reads.append(row * width + 16 * chunk)
            first.append(row * 128 + ((2 * chunk + swap ^ row) << 4))
            second.append(row * 128 + ((2 * chunk + 1 - swap ^ row) << 4))
            values |= {(row, 2 * chunk), (row, 2 * chunk + 1)}
        assert banks(reads) == banks(first) == banks(second) == [1] * 8
        assert len(values) == len({*first, *second}) == 16


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kv_format", WIDENED)
def test_a_cache_of_eight_bits_is_widened_in_registers(kv_format: str) -> None:
    options = (("fused_merge", 3), ("grid", 1))
    config = replace(BASE, cluster=1, kv_format=kv_format, mask="causal", options=options)
    made = jit.compile(config, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    assert tuple(kernel.block or ()) == (512, 1, 1)
    assert kernel.shared <= facts.SMEM_BYTES
    ptx = made.ptx.read_text()
    # two copies of eight tokens a tile; a lane has 16 values of each box of e4m3
    boxes = 9 if kv_format == "e4m3" else 8
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == 2 * boxes * 8
    # raw bytes come by bulk copies; of tensor copies only Q is left
    assert len(re.findall(r"cp\.async\.bulk\.shared::cluster\.global", ptx)) >= 2
    assert len(re.findall(r"cp\.async\.bulk\.tensor", ptx)) == 1
    # the products are those of a bf16 cache
    assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in ptx


EIGHT = replace(BASE, q_dtype="e4m3", kv_format="e4m3", mask="causal")
MAIL = (("fused_merge", 3), ("grid", 1))


@pytest.mark.parametrize("rows", facts.TILE_ROWS)
@pytest.mark.parametrize("cluster", facts.CLUSTERS)
def test_tiles_of_eight_bits_fit_four_times(rows: int, cluster: int) -> None:
    c = facts.shape_of(replace(EIGHT, tile_rows=rows, cluster=cluster))
    used = c.small_bytes + c.q_bytes + c.stages * c.tile_bytes
    used += 0 if c.aliased else c.exchange_bytes
    assert c.stages >= (4 if cluster == 1 else 2)
    assert used <= facts.SMEM_BYTES
    assert not c.aliased or c.exchange_bytes <= c.stages * c.tile_bytes
    assert (c.pairs + 1) * facts.MAX_SPLITS * 8 + 256 * 16 <= c.stages * c.tile_bytes
    producer, consumer = c.registers
    assert 128 * producer + facts.CONSUMERS * consumer <= 384 * 168


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
        {"options": (("fused_merge", 1), ("gather", 1), ("grid", 1))},
    ],
)
def test_what_eight_bits_do_not_go_with(changed: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=r"kv_format|out_dtype|gather"):
        facts.shape_of(replace(EIGHT, **{"cluster": 1, **changed}))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("out_dtype", ["bf16", "e4m3"])
def test_eight_bits_reach_the_matrix_unit_as_they_are(out_dtype: str) -> None:
    config = replace(EIGHT, cluster=1, out_dtype=out_dtype, options=MAIL)
    made = jit.compile(config, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    assert set(products) == {"m64n16k32.f32.e4m3.e4m3"}
    # 18 steps of scores in three rounds of code; 8 of a tile's values, of which a lane loads 4 x 16
    # bytes each: rounds of one tile (the first), of two, twice, and the other's last, twice
    assert len(products) == 3 * 18 + 7 * 8
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans") == 7 * 8
    assert ptx.count("stmatrix.sync.aligned.m8n8.x2.trans") == 3
