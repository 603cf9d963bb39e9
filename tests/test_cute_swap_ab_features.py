"""cute/swap_ab_sm90 over tokens of eight bits: fetched one by one, and skip-softmax; on a CPU."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from mla_lab import jit
from mla_lab.core.errors import Unsupported
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute.swap_ab_sm90 import params as facts
from mla_lab.cute.swap_ab_sm90.producer_gather import (
    WARP_TOKENS,
    Lane,
    apart,
    chunk_at,
    lanes_of,
    turns,
)

BASE = KernelConfig("cute/swap_ab_sm90", tile_rows=16, cluster=1)
SPARSE = (("features", 1), ("fused_merge", 1), ("gather", 2), ("grid", 1))
PAGED = (("fused_merge", 1), ("gather", 1), ("grid", 1))
#: query, cache, bytes of a token's row in a box, copies of a lane for each of its tokens
FORMATS = [
    ("bf16", "bf16", 128, 9),
    ("bf16", "fp8_656", 128, 6),
    ("bf16", "e4m3", 64, 9),
    ("e4m3", "e4m3", 64, 9),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def config_of(q_dtype: str, kv_format: str, options: tuple[tuple[str, int], ...]) -> KernelConfig:
    return replace(BASE, q_dtype=q_dtype, kv_format=kv_format, options=options)


@pytest.mark.parametrize(("q_dtype", "kv_format", "width", "copies"), FORMATS)
def test_every_chunk_of_a_box_has_its_place(
    q_dtype: str, kv_format: str, width: int, copies: int
) -> None:
    """Lanes of four warps fill 64 rows, each where the swizzle of that width has it."""
    c = facts.shape_of(config_of(q_dtype, kv_format, SPARSE))
    assert c.box * c.bytes == width and apart(c) * turns(c) == WARP_TOKENS
    found = {}
    for warp in range(4):
        for thread in range(32):
            lane = Lane(warp * WARP_TOKENS + thread // lanes_of(c), thread % lanes_of(c))
            for turn in range(turns(c)):
                row = lane.token + apart(c) * turn
                found[row * width + 16 * chunk_at(c, lane, turn)] = row * width + 16 * lane.chunk
    assert sorted(found) == list(range(0, 64 * width, 16))
    mask = width // 16 - 1
    assert all(at == plain ^ ((plain >> 7 & mask) << 4) for at, plain in found.items())


@needs_compiler
@pytest.mark.parametrize(("q_dtype", "kv_format", "width", "copies"), FORMATS[1:])
def test_gathered_tokens_reach_the_matrix_unit_as_they_are(
    q_dtype: str, kv_format: str, width: int, copies: int
) -> None:
    config = config_of(q_dtype, kv_format, SPARSE)
    made = jit.compile(config, "sm_90a")
    (kernel,) = made.resources
    c = facts.shape_of(config)
    assert kernel.stack == 0 and kernel.shared <= facts.SMEM_BYTES
    ptx = made.ptx.read_text()
    # of 656 bytes also the rope, and scales
    assert ptx.count("cp.async.cg.shared.global") == turns(c) * copies
    # of tensor copies only Q is left
    assert len(re.findall(r"cp\.async\.bulk\.tensor", ptx)) == 1
    kinds = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx))
    assert f"m64n{c.width}k32.f32.e4m3.e4m3" in kinds


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
    assert facts.shape_of(replace(config, tile_rows=rows // 2)).gather
    with pytest.raises(Unsupported, match=r"tile_rows|kv_format"):
        facts.shape_of(replace(config, tile_rows=rows))


@pytest.mark.parametrize("rows", facts.TILE_ROWS[:3])
@pytest.mark.parametrize(("q_dtype", "kv_format", "width", "copies"), FORMATS[1:])
def test_registers_of_both_roles_fit(
    rows: int, q_dtype: str, kv_format: str, width: int, copies: int
) -> None:
    c = facts.shape_of(replace(config_of(q_dtype, kv_format, SPARSE), tile_rows=rows))
    producer, consumer = c.registers
    assert 128 * producer + facts.CONSUMERS * consumer <= 384 * 168
    assert c.wide and c.producers == 128 and c.groups == 1 and c.stages >= 3
    assert c.small_bytes + c.q_bytes + c.stages * c.tile_bytes <= facts.SMEM_BYTES


SKIP = replace(
    BASE,
    q_dtype="e4m3",
    kv_format="e4m3",
    mask="tree",
    options=(("fused_merge", 2), ("skip", 1)),
)


@pytest.mark.parametrize(
    "changed",
    [
        {"q_dtype": "bf16"},
        {"q_dtype": "bf16", "kv_format": "bf16"},
        {"tile_rows": 64},
        {"mask": "causal"},
        {"options": (("promote", 0), ("skip", 1))},
        {"options": (*PAGED, ("skip", 1))},
    ],
)
def test_skip_softmax_is_for_e4m3_by_page(changed: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match="skip"):
        facts.shape_of(replace(SKIP, **changed))


@needs_compiler
def test_rows_vote_on_a_tile_and_products_stay_in_flight() -> None:
    made = jit.compile(SKIP, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    ptx = made.ptx.read_text()
    # not for the first tile of a work tile: one place in each warpgroup's loop; 16 rows
    assert re.findall(r"vote\.sync\.all\.pred q, p, (0x\w+)", ptx) == ["0xffff"] * 2
    assert (
        "vote.sync.all.pred q"
        not in jit.compile(replace(SKIP, options=(("fused_merge", 2),)), "sm_90a").ptx.read_text()
    )
