"""Choices for a cache of eight bits: what bounds a way, and that they follow what was recorded."""

from __future__ import annotations

from typing import Any

import pytest

from mla_lab.gpu import H200
from mla_lab.plan import choose
from mla_lab.plan.kernel_costs import Q_M, recorded_costs
from mla_lab.plan.pricing import price_formula
from mla_lab.plan.ways import PAIR, WALK, rows_tiles, way_of
from mla_lab.problem import Problem


def test_waves_are_priced_by_a_wave_and_launched_whole() -> None:
    eight: dict[str, Any] = {"q_dtype": "e4m3", "kv_format": "e4m3"}
    pairs = tuple(family for family in recorded_costs() if family.way == PAIR.name)
    one, four = (
        choose(Problem.uniform(64 * n, 1, 8192, 128, **eight), H200, costs=pairs) for n in (1, 4)
    )
    assert one.config.option("pair") == four.config.option("pair") == 2
    assert 3.6 < four.predicted_us / one.predicted_us < 4.1
    # the tallest request counts for the launch, wherever it stands; one without queries for none
    q_lens = tuple(0 if b % 4 == 0 else 2 if b == 1 else 1 for b in range(300))
    ragged = Problem(q_lens, (4096,) * 300, 128, **eight)
    family = next(f for f in recorded_costs() if f.key == (PAIR.kernel, PAIR.name)).of(ragged)
    (priced,) = price_formula(ragged, H200, family, 64, 1)
    assert priced.num_workers == 300 * 4
    assert priced.predicted_us > one.predicted_us


@pytest.mark.parametrize(
    ("batch", "kv_len", "kernel"), [(64, 8192, "q_m"), (16, 65536, "q_m"), (64, 65536, "kv_m")]
)
def test_the_matrix_unit_alone_adds_up_no_long_piece_of_e4m3(
    batch: int, kv_len: int, kernel: str
) -> None:
    """Where each tile's product is added in fp32 instead, a piece may have any length."""
    eight: dict[str, Any] = {"q_dtype": "e4m3", "kv_format": "e4m3", "out_dtype": "bf16"}
    choice = choose(Problem((1,) * batch, (kv_len,) * batch, heads=128, **eight))
    assert choice.config.kernel == f"cute/{kernel}"


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_small_pages_of_e4m3_are_read_by_no_pair(batch: int, page_size: int) -> None:
    """Of pages of less than a tile a pair's loading warp has too few registers."""
    eight: dict[str, Any] = {"q_dtype": "e4m3", "kv_format": "e4m3", "page_size": page_size}
    choice = choose(Problem.uniform(batch, 1, 8192, 128, **eight))
    rows = choice.config.tile_rows, choice.config.cluster
    if choice.config.kernel == Q_M.kernel:
        assert rows in rows_tiles("e4m3", "e4m3", page_size)
    small = page_size < 64
    assert rows_tiles("e4m3", "e4m3", page_size) == ((64, 1),) + ((128, 2),) * (not small)
    assert rows_tiles("bf16", "bf16", page_size) == ((64, 1), (128, 2))


@pytest.mark.parametrize(
    ("query", "cache"), [("e4m3", "e4m3"), ("bf16", "e4m3"), ("bf16", "fp8_656")]
)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_batch_invariance_of_eight_bits_keeps_the_walk(query: str, cache: str, heads: int) -> None:
    """Its builds have every feature, so that a call's features do not change a request's kernel."""
    problem = Problem.uniform(64, 1, 8192, heads, q_dtype=query, kv_format=cache)
    choice = choose(problem, batch_invariant=True)
    assert way_of(choice.config) == WALK.name
    assert (choice.config.tile_rows, 1) in WALK.tiles_for(query, cache)
