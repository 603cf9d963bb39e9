"""What a feature costs: calls that differ in the feature alone, figures that follow from times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mla_lab import cli
from mla_lab.bench.rotation import make_rotation
from mla_lab.bench.timers import Launch
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.core.errors import InvalidInput
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.operands import operands
from mla_lab.verify import costs, record, tables
from mla_lab.verify.costs import Comparison

SMALL = (2, 3, 4, 150)


@pytest.fixture(autouse=True)
def one_copy(monkeypatch):
    """A CPU's caches are of no interest."""
    monkeypatch.setattr(costs, "make_rotation", partial(make_rotation, rotation_bytes=1))


class Told:
    """A replay that takes as long as it is told, and remembers how often it ran."""

    runs = 0

    def __init__(self, us: float) -> None:
        self.us = us

    def __call__(self) -> float:
        return self.repeat(1)

    def repeat(self, times: int) -> float:
        self.runs += times
        return self.us * times


class Clock:
    """Replays that run their launches once and then take as long as they are told."""

    name = "fake"

    def __init__(self, us: Sequence[float]) -> None:
        self.us = list(us)
        self.made = 0

    def ready(self, launches: Sequence[Launch], *, cold: bool = False):
        for launch in launches:
            launch()
        mine, self.made = self.us[self.made % len(self.us)], self.made + 1
        return Told(mine * len(launches))

    def host_us(self, call):
        return 0.0

    def lost(self):
        return None


def rows_of(feature: str, us: Sequence[float], distribution: str = "gauss"):
    chosen = [Comparison(feature, *SMALL, distribution)]
    return list(costs.run(chosen, "cpu", backend="torch", rounds=5, timer=Clock(us)))


def test_every_feature_whose_cost_is_promised_is_compared():
    made = costs.comparisons()
    assert len(made) == len(set(made)) >= 40
    named = {c.feature for c in made}
    assert {"ragged", "tree mask", "sparse", "sinks", "device scales", "skip 0"} <= named
    assert all(c.q_len == 8 for c in made if "mask" in c.feature)
    assert {(c.batch, c.kv_len) for c in made if c.feature == "sparse"} == {(64, 32768)}
    skipping = {(c.distribution, c.also) for c in made if c.feature.startswith("skip")}
    assert skipping == {
        ("concentrated", "dense"),
        ("concentrated", "ragged"),
        ("heavy_tailed", "dense"),
        ("gauss", "dense"),
    }


@pytest.mark.parametrize("feature", sorted({c.feature for c in costs.comparisons()}))
def test_a_varied_call_differs_in_its_feature_alone(feature):
    inputs = make_inputs(Comparison("", *SMALL).problem, 1, workspace_bytes=8)
    other = costs.varied(inputs, feature)
    assert other.kv_cache is inputs.kv_cache and other.seq_lens is inputs.seq_lens
    assert torch.equal(other.query.flatten(), inputs.query.flatten())
    plain, changed = (form_of(native_args(**x.contract_args())) for x in (inputs, other))
    found = {k for k, v in vars(changed.features).items() if v != getattr(plain.features, k)}
    mask = {"mask", "causal"}
    words = {
        "ragged": {"ragged"},
        "tree mask": mask,
        "chain mask": mask,
        "sparse": {"sparse", "causal"},
        "sinks": {"sinks"},
        "device scales": {"tensor_scales"},
        "skip 0": set(),
        "dense path": set(),
    }
    assert found == words.get(feature, {"skip_softmax"})


def test_the_dense_path_is_beside_the_same_kernel_without_a_mask():
    compared = [c for c in costs.comparisons() if c.feature == "dense path"]
    masked = 0
    for c in compared:
        bare, plain = costs.plans_of(c)
        assert bare is not None and plain is not None
        assert bare.config is not None and plain.config is not None
        assert bare.config == replace(plain.config, mask="none")
        masked += plain.config.mask == "causal"
        assert (bare.tiles == plain.tiles).all()
    assert masked >= 6, "with query rows on M both are one build"
    assert costs.plans_of(Comparison("sinks", *SMALL)) == (None, None)
    (row,) = costs.run(
        [Comparison("dense path", 2, 1, 4, 150, also="bare")],
        "cpu",
        backend="torch",
        rounds=3,
        timer=Clock([100.0, 100.5, 101.0]),
    )
    assert (row["ratio"], row["control"]) == (1.01, 1.005)
    assert row["control_low"] == row["control_high"] == 1.005
    table = tables.costs_table([{"kind": "run"}, row]).splitlines()
    assert table[2] == "| dense path | gauss | 1 | 1.010 | 1.010 | 1.010 to 1.010 |  |  |"
    assert table[3] == "| bare beside itself | gauss | 1 | 1.005 | 1.005 | 1.005 to 1.005 |  |  |"


def test_calls_of_other_power_are_timed_in_a_while_of_their_own():
    quick, slow = Told(100.0), Told(800.0)
    replays: list[Any] = [slow, quick]
    assert costs._ratios([[100.0, 200.0], [50.0, 300.0]]) == [[0.5, 1.5]]
    times = costs._times(replays, 3, 4000.0)
    assert times == [[800.0] * 3, [100.0] * 3]
    assert (slow.runs, quick.runs) == (1 + 3 * 2 * 5, 1 + 3 * 2 * 40)
    assert all(c.settled == (c.feature == "sparse") for c in costs.comparisons())


def test_a_sparse_call_names_own_tokens_once():
    inputs = make_inputs(Comparison("", *SMALL).problem, 1, workspace_bytes=8)
    for dense, sparse in zip(
        operands(inputs, torch.float32),
        operands(costs.varied(inputs, "sparse"), torch.float32),
        strict=True,
    ):
        for token in sparse.keys:
            assert torch.allclose(token.sum(0), dense.keys[0].sum(0), atol=1e-3)


def test_a_sparse_call_is_timed_in_turns_too():
    chosen = [Comparison("sparse", *SMALL, settled=True)]
    (row,) = costs.run(chosen, "cpu", backend="torch", rounds=3, timer=Clock([200.0, 30.0]))
    assert row["ratio"] == row["turns"] == row["turns_low"] == 0.15 and "control" not in row
    table = tables.costs_table([{"kind": "run"}, row]).splitlines()
    assert table[2].startswith("| sparse | gauss | 1 | 0.150 |")
    assert table[3].startswith("| sparse, in turns | gauss | 1 | 0.150 |")


def test_the_ratio_is_that_of_the_times():
    (row,) = rows_of("sinks", [200.0, 250.0])
    assert (row["us"], row["beside_us"], row["ratio"]) == (250, 200, 1.25)
    assert row["low"] == row["high"] == 1.25 and row["rounds"] == 5
    assert row["shape"] == {"batch": 2, "q_len": 3, "heads": 4, "kv_len": 150}


def test_skipping_is_measured_beside_its_definition():
    (row,) = rows_of("skip 0.01", [100.0, 80.0], "concentrated")
    assert row["ratio"] == 0.8 and 0.0 < row["kept"] < 1.0
    assert row["dropped"] <= 0.01 and row["moved"] < 0.02
    (row,) = rows_of("skip 0", [100.0, 100.0], "concentrated")
    assert (row["kept"], row["dropped"], row["moved"]) == (1.0, 0.0, 0.0)


def test_the_interval_holds_the_median_of_a_known_distribution():
    draw = random.Random(3)
    held = 0
    for _ in range(400):
        found = costs.interval([draw.expovariate(1.0) for _ in range(21)])
        assert found["low"] <= found["ratio"] <= found["high"]
        held += found["low"] <= 0.6931 <= found["high"]
    assert 0.93 < held / 400 <= 1.0


def test_the_interval_is_by_ranks():
    """Of n values, the ranks n / 2 -+ 1.96 sqrt(n) / 2."""
    values = [float(n) for n in range(41)]
    assert costs.interval(values[::-1]) == {"ratio": 20.0, "low": 14.0, "high": 27.0}
    assert costs.interval([3.0]) == {"ratio": 3.0, "low": 3.0, "high": 3.0}


def test_a_refusal_is_a_row():
    chosen = [Comparison("sinks", *SMALL)]
    (row,) = costs.run(chosen, "cpu", backend="cute", rounds=1, timer=Clock([1.0]))
    assert row["status"] == "refused" and "CPU" in row["reason"]


def test_the_table_says_every_feature(tmp_path):
    rows = rows_of("sinks", [200.0, 202.0]) + rows_of("skip 1", [100.0, 70.0], "concentrated")
    refused = {**rows[0], "feature": "ragged", "status": "refused", "reason": "no card"}
    table = tables.costs_table([{"kind": "run"}, *rows, refused]).splitlines()
    assert table[2] == "| sinks | gauss | 1 | 1.010 | 1.010 | 1.010 to 1.010 |  |  |"
    assert table[3].startswith("| skip 1 | concentrated | 1 | 0.700 | 0.700 | 0.700 to 0.700 | ")
    assert table[3].count("%") == 1 and table[3].count("e") >= 1
    assert table[4] == "| ragged | gauss | 1 | no card |  |  |  |  |"


def test_the_command_knows_the_features(tmp_path):
    with pytest.raises(InvalidInput, match="features"):
        next(record.costs_run("cpu", ["nothing"], print))
    path = tmp_path / "r.jsonl"
    assert cli.main(["verify", "costs", str(path), "--features", "nothing", "--device", "cpu"])
    assert not path.exists()
