"""cute/swap_ab_sm90 over tokens of eight bits: fetched one by one, and skip-softmax; on a CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mla_lab import jit
from mla_lab.core.errors import Unsupported
from mla_lab.jit.shipped import CUTE
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute.swap_ab_sm90 import params as facts
from mla_lab.cute.swap_ab_sm90.producer_gather import (
    WARP_TOKENS,
    Lane,
    lanes_per_token,
    swizzled_chunk,
    tokens_at_once,
    tokens_per_lane,
)

from .built import kernel_of, products_of, ptx_of, tensor_copies_of
from .needs import needs_cxx
from .shared_builds import SWAP_AB_LL_E4M3, SWAP_AB_SKIP

BASE = KernelConfig("cute/swap_ab_sm90", tile_rows=16, cluster=1)
SPARSE = (("features", 1), ("fused_merge", 1), ("gather", 2), ("grid", 1))
PAGED = (("fused_merge", 1), ("gather", 1), ("grid", 1))
#: query, cache, bytes of a token's row in a box
FORMATS = [
    ("bf16", "bf16", 128),
    ("bf16", "fp8_656", 128),
    ("bf16", "e4m3", 64),
    ("e4m3", "e4m3", 64),
]


def config_of(q_dtype: str, kv_format: str, options: tuple[tuple[str, int], ...]) -> KernelConfig:
    return replace(BASE, q_dtype=q_dtype, kv_format=kv_format, options=options)


@pytest.mark.parametrize(("q_dtype", "kv_format", "width"), FORMATS)
def test_every_chunk_of_a_box_has_its_place(q_dtype: str, kv_format: str, width: int) -> None:
    """Lanes of four warps fill 64 rows, each where the swizzle of that width has it."""
    c = facts.traits_of(config_of(q_dtype, kv_format, SPARSE))
    assert c.box * c.bytes == width and tokens_at_once(c) * tokens_per_lane(c) == WARP_TOKENS
    found = {}
    for warp in range(4):
        for thread in range(32):
            lane = Lane(
                warp * WARP_TOKENS + thread // lanes_per_token(c), thread % lanes_per_token(c)
            )
            for turn in range(tokens_per_lane(c)):
                row = lane.token + tokens_at_once(c) * turn
                found[row * width + 16 * swizzled_chunk(c, lane, turn)] = (
                    row * width + 16 * lane.chunk
                )
    assert sorted(found) == list(range(0, 64 * width, 16))
    mask = width // 16 - 1
    assert all(at == plain ^ ((plain >> 7 & mask) << 4) for at, plain in found.items())


@needs_cxx
@pytest.mark.parametrize(("q_dtype", "kv_format", "width"), FORMATS[1:])
@pytest.mark.parametrize("rows", [16, 32])
def test_gathered_tokens_reach_the_matrix_unit_as_they_are(
    rows: int, q_dtype: str, kv_format: str, width: int
) -> None:
    config = config_of(q_dtype, kv_format, (*SPARSE, ("shaped", 1)))
    config = replace(config, tile_rows=rows)
    if config not in CUTE:
        pytest.skip("not shipped")
    assert kernel_of(config).stack == 0 and kernel_of(config).shared <= facts.SMEM_BYTES
    assert any(name.startswith("cp.async.cg.shared.global") for name in ptx_of(config))
    # of tensor copies only Q is left
    assert tensor_copies_of(config) == 1
    c = facts.traits_of(config)
    assert f"m64n{c.mma_n}k32.f32.e4m3.e4m3" in products_of(config)


@pytest.mark.parametrize(
    ("q_dtype", "kv_format", "options", "rows"),
    [
        ("e4m3", "e4m3", SPARSE, 64),
        ("e4m3", "e4m3", PAGED, 64),
        ("bf16", "e4m3", SPARSE, 64),
        ("bf16", "fp8_656", PAGED, 32),
    ],
)
def test_tiles_without_registers_for_it_are_refused(
    q_dtype: str, kv_format: str, options: tuple[tuple[str, int], ...], rows: int
) -> None:
    config = config_of(q_dtype, kv_format, options)
    assert facts.traits_of(replace(config, tile_rows=rows // 2)).gathered
    with pytest.raises(Unsupported, match=r"tile_rows|kv_format"):
        facts.traits_of(replace(config, tile_rows=rows))


@pytest.mark.parametrize("rows", facts.TILE_ROWS[:3])
@pytest.mark.parametrize(("q_dtype", "kv_format", "width"), FORMATS[1:])
def test_registers_of_both_roles_fit(rows: int, q_dtype: str, kv_format: str, width: int) -> None:
    c = facts.traits_of(replace(config_of(q_dtype, kv_format, SPARSE), tile_rows=rows))
    producer, consumer = c.registers
    assert 128 * producer + facts.CONSUMER_THREADS * consumer <= 384 * 168
    assert (
        c.producer_group and c.full_arrivals == 128 and c.barriers_per_stage == 1 and c.stages >= 3
    )
    assert c.small_bytes + c.q_bytes + c.stages * c.stage_bytes <= facts.SMEM_BYTES


SKIP = replace(
    BASE,
    q_dtype="e4m3",
    kv_format="e4m3",
    mask="tree",
    options=(("fused_merge", 2), ("shaped", 1), ("skip", 1)),
)


@pytest.mark.parametrize(
    "changed",
    [
        {"q_dtype": "bf16", "kv_format": "bf16"},
        {"tile_rows": 64},
        {"mask": "causal"},
        {"options": (*PAGED, ("skip", 1))},
        {"q_dtype": "bf16", "options": (*PAGED, ("skip", 1))},
    ],
)
def test_skip_softmax_is_for_eight_bits_by_page(changed: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match="skip"):
        facts.traits_of(replace(SKIP, **changed))


@needs_cxx
@pytest.mark.parametrize(
    "config", [config for config in CUTE if config.option("skip") and "swap" in config.kernel],
    ids=KernelConfig.name,
)  # fmt: skip
def test_rows_vote_on_a_tile_and_take_no_register_more_than_there_is(config: KernelConfig) -> None:
    assert kernel_of(config).stack == 0
    plain = replace(config, options=tuple(o for o in config.options if o[0] != "skip"))
    votes, others = (ptx_of(c).get("vote.sync.all.pred", 0) for c in (config, plain))
    assert votes > others


@needs_cxx
def test_the_threads_of_all_rows_vote() -> None:
    ptx = jit.compile(SWAP_AB_SKIP, "sm_90a").ptx.read_text()
    assert set(re.findall(r"vote\.sync\.all\.pred q, p, (0x\w+)", ptx)) == {"0xffffffff"}
    plain = jit.compile(SWAP_AB_LL_E4M3, "sm_90a").ptx.read_text()
    assert "vote.sync.all.pred q" not in plain
