"""`mla-lab plan`: the table, its numbers, and each way of asking wrongly."""

from __future__ import annotations

import json
import time

import pytest

from mla_lab import cli
from mla_lab.cli.commands.plan import MOST_ROW_TILES, MOST_SIMULATED
from mla_lab.core.gpu import Gpu
from mla_lab.core.problem import Problem
from mla_lab.plan import POLICIES, RULES, make_plan, plan_without

SHAPE = ["--kv-len", "8000,300,700", "--model", "kimi-k2", "--tp", "2"]
PROBLEM = Problem((1, 1, 1), (8000, 300, 700), heads=32)


def table(capsys, *options):
    assert cli.main(["plan", *SHAPE, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_line_for_each_policy(capsys):
    rows = table(capsys)["policies"]
    assert [row["policy"] for row in rows] == [*POLICIES, *RULES]
    for row in rows:
        make = plan_without if row["policy"] in RULES else make_plan
        plan = make(PROBLEM, **{"rule" if row["policy"] in RULES else "policy": row["policy"]})
        assert row["tiles"] == plan.num_tiles
        assert row["partials"] == plan.num_partials
        assert row["workspace_bytes"] == plan.workspace.nbytes
        assert row["splits"] == [plan.splits().min(), plan.splits().max()]
        assert row["simulated_us"] > 0


@pytest.mark.parametrize(("tile_rows", "blocks"), [(16, 50), (64, 100)])
def test_pieces_of_a_batch_invariant_call_follow_the_tile(tile_rows, blocks):
    """Of 200 blocks and 128 heads: quarters where a row tile is short, else halves."""
    plan = plan_without(Problem((1,), (64 * 200,), 128), RULES[1], tile_rows)
    assert set((plan.tiles[:, 3] - plan.tiles[:, 2]).tolist()) == {blocks}


def test_columns_stay_apart_where_times_are_long(capsys):
    """A request of 300 million keys without splits takes seconds."""
    assert cli.main(["plan", "--batch", "1", "--kv-len", "300000000", "--policy", "none"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("none")]
    policy, tiles, splits, partials, size, unit, us, *_ = line.split()
    assert (policy, tiles, splits, partials, size, unit) == ("none", "2", "1", "0", "0.0", "MB")
    assert float(us) > 1e6


def test_splitting_pays_and_the_roofline_is_below(capsys):
    result = table(capsys)
    times = {row["policy"]: row["simulated_us"] for row in result["policies"]}
    assert times["cost"] < times["none"] / 2
    assert result["floor_us"] == pytest.approx(Gpu.preset("H200").roofline_time(PROBLEM) * 1e6)
    assert result["floor_us"] < min(times.values())


def test_a_card_reads_by_its_datasheet(capsys):
    """Recorded on an H100: 399.6 us (h100_plain, b128_q1_h16_kv8192), at 3.1 TB/s."""
    options = ["--kv-len", "8192", "--batch", "128", "--heads", "16", "--policy", "plain call"]
    assert cli.main(["plan", *options, "--gpu", "H100", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["policies"]
    assert row["simulated_us"] == pytest.approx(399.6, rel=0.05)


def test_options_reach_the_plan(capsys):
    options = ["--policy", "greedy", "--cluster", "2", "--tile-rows", "128", "--tile-kv", "128"]
    (row,) = table(capsys, *options, "--schedule", "grid")["policies"]
    plan = make_plan(
        PROBLEM, policy="greedy", tile_rows=128, tile_kv=128, num_workers=66, schedule="grid"
    )
    assert (row["policy"], row["tiles"]) == ("greedy", plan.num_tiles)


def test_a_call_without_a_plan_has_no_other_tiles(capsys):
    rows = table(capsys, "--schedule", "grid")["policies"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert cli.main(["plan", *SHAPE, "--policy", RULES[0], "--tile-kv", "128"]) == 2
    assert "got 'plain call' with persistent tiles of 128 tokens" in capsys.readouterr().err


def test_the_printed_table(capsys):
    assert cli.main(["plan", *SHAPE, "--policy", "fa3", "--tiles"]) == 0
    printed = capsys.readouterr().out
    assert "Kimi K2, 32 heads a rank, batch 3" in printed
    assert "kv 300 to 8000 (9000 tokens)" in printed
    assert str(make_plan(PROBLEM, policy="fa3")) in printed


@pytest.mark.parametrize(("card", "rates"), [("H200", "it sustains"), ("H100", "its datasheet")])
def test_a_roofline_says_whose_rates_it_has(card, rates, capsys):
    assert cli.main(["plan", *SHAPE, "--policy", "fa3", "--gpu", card]) == 0
    assert f"{rates}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--batch", "0"], "--batch: got 0"),
        (["--heads", "0"], "heads: got 0"),
        (["--q-len", "-1"], "--q-len: got -1"),
        (["--q-len", "0"], "--q-len: got 0"),
        (["--batch", "0"], "--batch: got 0; supported: 1 to 1048576"),
        (["--trace", "synthetic", "--batch", "0"], "--batch: got 0"),
        (
            ["--trace", "synthetic", "--mode", "replay", "--step-ms", "0"],
            "--step-ms: got 0.0; supported: milliseconds above 0",
        ),
        (["--model", "gpt-2"], "model: got 'gpt-2'"),
        (["--model", "kimi-k2", "--tp", "3"], "tensor_parallel: got 3"),
        (["--model", "kimi-k2", "--heads", "16"], "--heads: got 16 beside --model"),
        (["--tp", "2"], "--tp: got 2"),
        (["--kv-len", "1,2", "--batch", "3"], "--kv-len: got 2 lengths"),
        (["--policy", "best"], "--policy: got 'best'"),
        (["--schedule", "best"], "schedule: got 'best'"),
        (["--tile-kv", "0"], "tile_kv: got 0"),
        (["--batch", "100000"], "plan: got 200000 row tiles (100000 requests of 128 heads)"),
        (["--heads", "100000000"], "plan: got 12500000 row tiles"),
        (["--heads", "9" * 30], "--heads: got 999"),
        (["--q-len", "2000000000"], "plan: got 32000000000 row tiles"),
        (["--batch", "2000000000"], "--batch: got 2000000000; supported: 1 to 1048576"),
        (["--kv-len", "1,99999999999"], "--kv-len: got 99999999999; supported: up to 214748"),
        (["--trace", "synthetic", "--batch", "2000000000"], "--batch: got 2000000000"),
        (["--mode", "replay"], "--mode: got replay; supported: a mode with --trace"),
        (["--at", "5"], "--at: got 5.0; supported: a time with --mode replay"),
        (["--trace", "synthetic", "--step-ms", "-1"], "--step-ms: got -1.0; supported: a time"),
        (["--seed", "9" * 30], "--seed: got 999"),
        (["--gpu", "TPU"], "gpu: got 'TPU'"),
        (["--gpu", "B200"], "--gpu: got B200; supported: Hopper"),
        (["--gpu", "B300"], "gpu: got 'B300'; supported: ('H100 SXM', 'H800', 'H200')"),
    ],
)
def test_what_is_refused(options, named, capsys):
    assert cli.main(["plan", *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"mla-lab plan: {named}")
    assert printed.count("\n") == 1


def test_a_large_plan_is_made_and_not_simulated(capsys):
    """At the most row tiles, and the longest lengths, in seconds."""
    start = time.perf_counter()
    size = ["--batch", str(MOST_ROW_TILES), "--heads", "64", "--kv-len", str(2**31 - 1)]
    assert cli.main(["plan", *size, "--policy", "fa3", "--policy", "cost"]) == 0
    assert time.perf_counter() - start < 20
    printed = capsys.readouterr().out
    assert f"-  not simulated: more than {MOST_SIMULATED} tiles" in printed


def test_what_is_no_length(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--kv-len", "4k"])
    assert stop.value.code == 2
    assert "got '4k'; supported: 4096 or 512,4096" in capsys.readouterr().err
