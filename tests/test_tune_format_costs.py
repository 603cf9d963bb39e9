"""Constants of builds for a cache of eight bits: fitted to a sweep over them, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_lab.bench.cases import uniform_case
from mla_lab.bench.tune import fitting, format_costs
from mla_lab.bench.tune.calibrate import Launches, Measured
from mla_lab.bench.tune.fitting import Launch
from mla_lab.bench.tune.format_costs import by_formats, fit_formats, start_of
from mla_lab.bench.tune.sweep import variants
from mla_lab.cli import main
from mla_lab.plan import KernelCosts, kernel_costs
from mla_lab.plan.kernel_costs import recorded_costs, recorded_formats, recorded_of
from mla_lab.plan.launch_modes import mode_of

SIXTEEN = recorded_costs()
SPLIT, EIGHT = ("bf16", "e4m3"), ("e4m3", "e4m3")


def swept(formats: tuple[str, str], factor: float) -> list[Launch]:
    """What a card would measure that takes `factor` times the recorded ones' block times."""
    found = []
    for batch, kv_len in ((1, 1024), (4, 8192), (64, 8192), (128, 1024)):
        case = uniform_case(batch, 1, 16, kv_len, q_dtype=formats[0], kv_format=formats[1])
        for variant in variants(case.problem):
            plan, config = variant.plan(case.problem), variant.config
            taken = replace(
                variant.costs,
                block_ns=variant.costs.block_ns * factor,
                block_row_ns=variant.costs.block_row_ns * factor,
            )
            (us,) = Launches([Measured(plan, 1.0, config.cluster, variant.fused)]).predict(taken)
            measured = Measured(plan, float(us), config.cluster, variant.fused)
            found.append(Launch(case.name, (config.kernel, mode_of(config)), measured))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where constants are looked for."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(kernel_costs, "data_dir", lambda: tmp_path)
    yield tmp_path
    monkeypatch.undo()
    recorded_costs.cache_clear()
    recorded_formats.cache_clear()


def test_each_format_is_fitted_to_its_own_launches() -> None:
    dealt = by_formats([*swept(SPLIT, 1.5), *swept(EIGHT, 0.7)])
    assert set(dealt) == {SPLIT, EIGHT}
    made, said = fit_formats(dealt)
    for formats, found in dealt.items():
        before = fitting.quality(start_of(found), found)
        after = fitting.quality(made[formats], found)
        assert after.error < before.error / 2 and after.close == 1.0
        assert {c.key for c in made[formats]} == {launch.key for launch in found}
    assert len(said) == 2 * 2, "too few cases to hold out parts"


def test_constants_of_formats_are_kept_beside_those_of_others(folder: Path) -> None:
    walk, mail = (
        recorded_of(("cute/swap_ab_sm90", mode)) for mode in ("swap_ab_persistent", "swap_ab_ll")
    )
    path = folder / kernel_costs.FORMATS_RECORD

    def record(made: dict[tuple[str, str], list[KernelCosts]], source: str) -> None:
        recorded_formats.cache_clear()
        format_costs.write(path, made, source)
        recorded_formats.cache_clear()

    record({SPLIT: [replace(walk, tile_ns=7.0), mail], EIGHT: [walk]}, "one run")
    record({SPLIT: [replace(walk, tile_ns=8.0)]}, "another run")
    held = {
        (*formats, c.mode): (c.tile_ns, c.source)
        for formats, own in recorded_formats().items()
        for c in own
    }
    assert held == {
        (*SPLIT, "swap_ab_persistent"): (8.0, "another run"),
        (*SPLIT, "swap_ab_ll"): (mail.tile_ns, "one run"),
        (*EIGHT, "swap_ab_persistent"): (walk.tile_ns, "one run"),
    }
    split: dict[str, Any] = {"q_dtype": "bf16", "kv_format": "e4m3"}
    problem = uniform_case(4, 1, 16, 1024, **split).problem
    assert walk.of(problem).tile_ns == 8.0
    other = replace(problem, kv_format="fp8_656")
    assert walk.of(other) == walk, "formats that are not recorded are priced as 16 bits"


def test_without_a_record_eight_bits_are_priced_as_sixteen(folder: Path) -> None:
    recorded_formats.cache_clear()
    assert recorded_formats() == {} and not list((folder / "runtime").iterdir())
    problem = uniform_case(4, 1, 16, 1024, q_dtype="e4m3", kv_format="e4m3").problem
    assert SIXTEEN and all(costs.of(problem) == costs for costs in SIXTEEN)


def test_the_command_fits_a_sweep_of_eight_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, out = str(tmp_path / "r.jsonl"), tmp_path / "costs.json"
    grid = ["--batch", "1,2", "--heads", "16", "--kv-len", "200", "--formats", "bf16:e4m3,e4m3"]
    more = ["--device", "cpu", "--backend", "torch", "--per-tile", "1", "--rounds", "1"]
    assert main(["bench", "sweep", record, *grid, *more, "--rotation-mb", "0.01"]) == 0
    assert main(["bench", "fit", record, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "bf16:e4m3 fitted" in said and "e4m3:e4m3 before" in said and "4 cases" in said
    rows = json.loads(out.read_text(encoding="utf-8"))["costs"]
    fresh = {(row["formats"], row["mode"]) for row in rows if "4 cases" in row["source"]}
    assert ("bf16:e4m3", "swap_ab_ll") in fresh and ("e4m3:e4m3", "swap_ab_persistent") in fresh
