"""What the CuTe backend makes of a caller's plan, and which it refuses; nothing is launched."""

from __future__ import annotations

import pytest
import torch

from mla_lab.backends.cute import launch
from mla_lab.backends.cute.device_plan import Formula, on_device
from mla_lab.core.errors import Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.plan import KernelConfig, make_plan


def test_a_plan_without_a_tile_is_walked_too() -> None:
    """No row of tiles means that a launch finds its own, in the memory of `worker_begin`."""
    plan = make_plan(Problem((0,), (100,), 128))
    words = on_device(plan, torch.device("cpu"), 132)
    assert words.tiles.shape == (1, 8) and len(words.worker_begin) >= 2
    assert not words.worker_begin.any()


def test_pieces_beyond_the_weight_tables_of_swap_ab_are_refused() -> None:
    problem = Problem((1,), (131_072,), 16)
    plans = [
        make_plan(problem, tile_rows=rows, policy="fixed", num_splits=splits)
        for rows, splits in ((16, 161), (16, 160), (64, 161))
    ]
    with pytest.raises(Unsupported, match="plan: got 161 splits of a row tile with 16 rows"):
        launch.config_of(plans[0])
    assert [launch.config_of(plan).tile_rows for plan in plans[1:]] == [16, 64]


def test_a_grid_of_e4m3_in_waves_has_whole_requests() -> None:
    """Its launch is not cooperative, so that no CTA may wait for another one."""
    problem = Problem((1,) * 2, (4096,) * 2, 128, q_dtype="e4m3", kv_format="e4m3")
    config = KernelConfig(
        "cute/swap_ab_sm90",
        *("e4m3", "e4m3", "bf16"),
        tile_rows=64,
        mask="causal",
        options=(("fused_merge", 3), ("grid", 1), ("pair", 2)),
    )
    assert Formula.of(config, 1, problem, H200).slots == 0
    with pytest.raises(Unsupported, match="2 splits a request in e4m3 with 64 rows a CTA"):
        Formula.of(config, 2, problem, H200)
