"""The method under a fake clock: order, medians, refusals, failures, resuming, interruption."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations

import jsonschema
import pytest
import torch

from mla_lab.bench import power
from mla_lab.bench.cases import uniform_case
from mla_lab.bench.harness import Bench
from mla_lab.bench.measure import Method
from mla_lab.bench.peers.base import Prepared
from mla_lab.bench.records import Record, read, results, schema
from mla_lab.bench.rotation import make_rotation
from mla_lab.bench.telemetry import Sample, Telemetry
from mla_lab.bench.timers import HostTimer
from mla_lab.core.errors import DeviceLost, unsupported

CASES = [uniform_case(1, 1, 4, 20), uniform_case(2, 1, 4, 20)]
METHOD = Method(
    rounds=3, warmups=2, rotation_bytes=100_000, workspace_bytes=1 << 16, ceilings=False
)


class FakeReplay:
    """Takes what its peer's clock says; each call is written down."""

    def __init__(self, timer, launches, cold):
        self.timer, self.launches, self.cold = timer, launches, cold
        self.last_output = launches[-1]()
        self.peer = self.timer.peer_of(launches[0])

    def __call__(self):
        self.timer.calls.append((self.peer, "cold" if self.cold else len(self.launches)))
        clock = self.timer.clocks[self.peer]
        return len(self.launches) * (clock.pop(0) if len(clock) > 1 else clock[0])

    def repeat(self, times, leads=0):
        assert not self.cold, "a repeat does not evict the L2"
        return sum([self() for _ in range(leads + times)][leads:])


class FakeTimer:
    """A clock that says for each peer how long a launch takes, call by call."""

    name = "fake"

    def __init__(self, **clocks):
        self.clocks = {peer: list(values) for peer, values in clocks.items()}
        self.calls = []
        self.replays = []

    def peer_of(self, launch):
        return launch.peer

    def ready(self, launches, *, cold=False):
        self.replays.append(launches)
        return FakeReplay(self, launches, cold)

    def host_us(self, call):
        call()
        return 50.0

    def lost(self):
        return None


class FakeLaunch:
    def __init__(self, peer, give, other=False):
        self.peer, self.give, self.other = peer, give, other

    def __call__(self):
        return self.give()


class FakePeer:
    """Answers with the expected result, or with what `spoil` makes of it."""

    def __init__(
        self, name, spoil=None, missing=None, refuses=None, error=None, planned=False, other=False
    ):
        self.name, self.spoil, self.missing = name, spoil, missing
        self.refusal, self.error, self.planned, self.other = refuses, error, planned, other
        self.prepared = 0

    def available(self, device):
        return self.missing

    def refuses(self, case):
        return self.refusal

    def version(self):
        return "1.0"

    def prepare(self, rotation):
        self.prepared += 1
        if self.error:
            raise self.error
        launches = tuple(
            FakeLaunch(self.name, lambda e=e: self.spoil(e) if self.spoil else e)
            for e in rotation.expected
        )
        return Prepared(
            launches,
            plan=(lambda: None) if self.planned else None,
            planned_launches=None if self.planned else launches,
            other_lengths=tuple(FakeLaunch(self.name, launch.give, True) for launch in launches)
            if self.other
            else None,
        )


def run(path, peers, timer=None, cases=CASES, method=METHOD, **kwargs):
    record = Record(path)
    timer = timer or FakeTimer(**{p.name: [10.0] for p in peers})
    try:
        Bench(record, peers, "cpu", method, timer=timer, **kwargs).run(cases)
    finally:
        record.close()
    return record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def validate(path):
    validator = jsonschema.Draft202012Validator(schema())
    rows = list(read(path))
    for row in rows:
        validator.validate(row)
    return rows


def by_peer(record, case=CASES[0]):
    return {r["peer"]: r for r in results(record.rows) if r["case"] == case.name}


def test_the_schema_is_one_and_refuses(path):
    jsonschema.Draft202012Validator.check_schema(schema())
    run(path, [FakePeer("a")])
    row = results(read(path))[0]
    for change in ({"us": -1.0}, {"status": "ok", "reason": "why"}, {"kind": "other"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**row, **change}, schema())


def test_figures_are_medians_of_raw_rounds(path):
    method = replace(METHOD, isolated=False, planned=False)
    # two warm-ups, then three rounds: 12, 30, 13
    timer = FakeTimer(a=[99.0, 98.0, 12.0, 30.0, 13.0])
    record = run(path, [FakePeer("a")], timer, CASES[:1], method)
    row = by_peer(record)["a"]
    assert row["us"] == 13.0
    assert row["rounds"] == {"us": [12.0, 30.0, 13.0]}
    assert row["tflops"] == pytest.approx(row["flop"] / 13.0 / 1e6, rel=1e-4)
    assert row["tbps"] == pytest.approx(row["bytes"] / 13.0 / 1e6, rel=1e-4)
    assert row["kv_copies"] * 20 * 1152 == row["kv_rotation_bytes"]
    assert row["launches_per_replay"] >= 8
    validate(path)


def test_peers_take_turns_and_none_always_follows_the_same(path):
    method = replace(METHOD, isolated=False, planned=False, rounds=40)
    peers = [FakePeer("a"), FakePeer("b"), FakePeer("c")]
    timer = FakeTimer(a=[1.0], b=[1.0], c=[1.0])
    run(path, peers, timer, CASES[:1], method)
    order = "".join(peer for peer, _ in timer.calls)
    assert order.startswith("aabbcc"), "two warm-ups each"
    rounds = [order[i : i + 3] for i in range(6, len(order), 3)]
    assert len(rounds) == 40 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) == 6, "every order occurs"
    before = Counter(pairwise(order[6:]))
    assert all(before[pair] > 5 for pair in permutations("abc", 2)), "behind each of the others"


def test_isolated_and_planned_times_stand_beside(path):
    peers = [FakePeer("graph"), FakePeer("host", planned=True)]
    timer = FakeTimer(graph=[10.0], host=[10.0])
    rows = by_peer(run(path, peers, timer))
    assert rows["graph"]["isolated_us"] == 10.0
    assert rows["graph"]["us_with_plan"] == 10.0, "plan and launch in one replay"
    assert "plan_us" not in rows["graph"]
    assert rows["host"]["plan_us"] == 50.0
    assert rows["host"]["us_with_plan"] == 60.0, "the host's plan is added"
    assert ("graph", "cold") in timer.calls
    validate(path)


def test_leads_do_not_warm_up_isolated_launches(path):
    timer = FakeTimer(a=[10.0])
    run(path, [FakePeer("a")], timer, CASES[:1], replace(METHOD, leads=1))
    assert timer.calls.count(("a", "cold")) == METHOD.warmups + METHOD.rounds


def test_a_first_layer_has_other_lengths_than_the_launch_before(path):
    timer = FakeTimer(kept=[10.0])
    rows = by_peer(run(path, [FakePeer("kept", other=True)], timer, CASES[:1]))
    assert rows["kept"]["us_first_layer"] == 10.0
    same, other = [[launch.other for launch in replay] for replay in timer.replays[:2]]
    assert not any(same) and len(other) == len(same)
    assert all(a != b for a, b in pairwise(other))
    validate(path)


def test_whatever_cannot_be_timed_keeps_its_reason(path):
    peers = [
        FakePeer("good"),
        FakePeer("absent", missing="import x: no module"),
        FakePeer("says_no", refuses="page_size: got 64, supported: 32"),
        FakePeer("raises", error=unsupported("heads", 4, "128")),
        FakePeer("breaks", error=RuntimeError("CUDA error: an illegal address")),
        FakePeer("lies", spoil=lambda out: out * 1.5),
        FakePeer("nan", spoil=lambda out: out / 0 * 0),
    ]
    record = run(path, peers)
    rows = by_peer(record)
    status = {name: row["status"] for name, row in rows.items()}
    assert status == {
        "good": "ok",
        "says_no": "refused",
        "raises": "refused",
        "breaks": "failed",
        "lies": "wrong",
        "nan": "wrong",
    }
    assert rows["raises"]["reason"] == "heads: got 4; supported: 128"
    assert "illegal address" in rows["breaks"]["reason"]
    assert "prepare" in rows["breaks"]["reason"], "the place is named"
    assert "relative error 5.0e-01" in rows["lies"]["reason"]
    assert record.rows[0]["peers"][1] == {
        "name": "absent",
        "version": None,
        "unavailable": "import x: no module",
    }
    assert peers[1].prepared == 0
    validate(path)


def test_what_the_timed_replay_wrote_is_checked_too(path):
    class Stale(FakePeer):
        """Right when checked, wrong in its replay: nothing is computed there."""

        def prepare(self, rotation):
            calls = iter([*rotation.expected])
            give = lambda: next(calls, torch.zeros_like(rotation.expected[0]))  # noqa: E731
            return Prepared(tuple(FakeLaunch("stale", give) for _ in rotation.expected))

    row = by_peer(run(path, [Stale("stale")]))["stale"]
    assert row["status"] == "wrong"
    assert row["reason"].startswith("in the timed replay")


class SharesOutput(FakePeer):
    """Every launch writes its copy's result into the one output that all of them return."""

    def prepare(self, rotation):
        out = torch.empty_like(rotation.expected[0])
        return Prepared(
            tuple(FakeLaunch(self.name, lambda e=e: out.copy_(e)) for e in rotation.expected)
        )


def test_a_shared_output_is_checked_before_the_isolated_launch_overwrites_it(path):
    record = run(path, [SharesOutput("shares")], HostTimer(), CASES[:1])
    row = by_peer(record)["shares"]
    assert row["kv_copies"] > 1, "the isolated launch is of the first, the replay ends on the last"
    assert (row["status"], row["reason"]) == ("ok", None)
    assert row["isolated_us"] > 0


def test_a_right_isolated_launch_does_not_hide_a_wrong_replay(path):
    class SpoilsReplay(HostTimer):
        def ready(self, launches, *, cold=False):
            spoilt = [lambda launch=launch: launch().zero_() for launch in launches]
            return super().ready(launches if cold else spoilt, cold=cold)

    one_copy = replace(METHOD, rotation_bytes=1)
    record = run(path, [SharesOutput("shares")], SpoilsReplay(), CASES[:1], one_copy)
    row = by_peer(record)["shares"]
    assert row["kv_copies"] == 1, "one copy, so that the isolated launch leaves the right output"
    assert row["status"] == "wrong"
    assert row["reason"].startswith("in the timed replay")


def test_a_failure_in_a_round_leaves_the_others(path):
    class Breaks(FakeReplay):
        def __call__(self):
            if self.timer.calls.count((self.peer, self.launches)) == 2:
                raise RuntimeError("launch failed")
            self.timer.calls.append((self.peer, self.launches))
            return 1.0

    class Timer(FakeTimer):
        def ready(self, launches, *, cold=False):
            kind = Breaks if launches[0].peer == "a" else FakeReplay
            return kind(self, launches, cold)

    rows = by_peer(run(path, [FakePeer("a"), FakePeer("b")], Timer(b=[7.0])))
    assert rows["a"]["status"] == "failed"
    assert rows["b"]["us"] == 7.0


def test_a_finished_record_is_not_measured_again(path):
    peers = [FakePeer("a"), FakePeer("b", error=RuntimeError("flaky"))]
    run(path, peers)
    again = [FakePeer("a"), FakePeer("b"), FakePeer("late")]
    record = run(path, again)
    assert [p.prepared for p in again] == [0, 2, 2], "failures are tried again, newcomers added"
    assert {r["status"] for r in results(record.rows)} == {"ok"}
    assert [r["kind"] for r in record.rows].count("run") == 2
    validate(path)


def test_ctrl_c_leaves_a_valid_record_that_can_be_resumed(path):
    def progress(text):
        if text.startswith("2/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, [FakePeer("a")], progress=progress)
    rows = validate(path)
    assert [r["kind"] for r in rows] == ["run", "result", "end"]
    assert rows[-1]["status"] == "interrupted"
    peer = FakePeer("a")
    record = run(path, [peer])
    assert peer.prepared == 1, "only the second case"
    assert len(results(record.rows, "ok")) == 2
    assert validate(path)[-1]["status"] == "complete"


def test_parts_repeat_the_list_and_state_the_spread(path):
    method = replace(METHOD, parts=2, isolated=False, planned=False, rounds=1, warmups=0)
    timer = FakeTimer(a=[100.0, 200.0, 101.0, 210.0])
    record = run(path, [FakePeer("a")], timer, method=method)
    spread = record.rows[-1]["rerun_spread"]
    assert spread["pairs"] == 2
    assert spread["worst"] == pytest.approx(10 / 205, rel=1e-4)
    assert [r["part"] for r in results(record.rows)] == [0, 0, 1, 1]


class LosingTimer(FakeTimer):
    """The device is gone for good once a peer has raised this error."""

    dead = False

    def lost(self):
        return "an illegal address" if self.dead else None


def test_a_lost_device_ends_the_run_and_names_the_culprit(path):
    timer = LosingTimer(a=[1.0], b=[1.0], c=[1.0])

    class Kills(FakePeer):
        def prepare(self, rotation):
            timer.dead = True
            raise RuntimeError("CUDA error")

    with pytest.raises(DeviceLost, match="b on b1_q1_h4_kv20: an illegal address"):
        run(path, [FakePeer("a"), Kills("b"), FakePeer("c")], timer)
    rows = validate(path)
    assert [(r["kind"], r.get("peer")) for r in rows[1:]] == [("result", "b"), ("end", None)]
    assert rows[1]["status"] == "failed"
    assert rows[-1]["status"] == "interrupted"
    # the next process keeps that row, and measures the rest
    record = Record(path)
    again = FakeTimer(a=[1.0], b=[1.0], c=[1.0])
    peers = [FakePeer("a"), FakePeer("b"), FakePeer("c")]
    Bench(record, peers, "cpu", METHOD, timer=again).run(CASES[:1], keep_failed=True)
    assert {r["peer"]: r["status"] for r in results(record.rows)} == {
        "a": "ok",
        "b": "failed",
        "c": "ok",
    }


def test_a_peer_that_died_in_the_preflight_has_rows_and_is_not_run(path):
    seen: list[str] = []

    def preflight(peers, device):
        seen.extend(peer.name for peer in peers)
        return {"b": "preflight: exit code -6: aborted"}

    peers = [FakePeer("a"), FakePeer("b"), FakePeer("absent", missing="no module")]
    record = run(path, peers, preflight=preflight)
    assert seen == ["a", "b"]
    assert peers[1].prepared == 0
    rows = validate(path)
    assert [r["peer"] for r in rows if r["kind"] == "result"] == ["b", "a", "b", "a"]
    row = by_peer(record)["b"]
    assert (row["status"], row["reason"]) == ("failed", "preflight: exit code -6: aborted")


def test_a_finished_record_needs_no_preflight(path):
    run(path, [FakePeer("a")])
    run(path, [FakePeer("a")], preflight=lambda peers, device: pytest.fail("nothing to do"))


def test_twice_the_error_of_torch_is_the_limit(path):
    def noisy(share):
        """A result off by this share of torch's own error."""

        def spoil(expected):
            random = torch.Generator().manual_seed(0)
            noise = torch.randn(expected.shape, generator=random)
            return expected + share * sdpa * noise / noise.norm() * expected.norm()

        return spoil

    sdpa = make_rotation(CASES[0], rotation_bytes=1, workspace_bytes=1).sdpa_error
    peers = [FakePeer("near", noisy(1.8)), FakePeer("far", noisy(2.3))]
    rows = by_peer(run(path, peers, cases=CASES[:1]))
    assert {name: row["status"] for name, row in rows.items()} == {"near": "ok", "far": "wrong"}
    assert rows["near"]["sdpa_error"] == pytest.approx(sdpa, rel=1e-3)
    assert rows["far"]["rel_error"] < 5e-3, "the fixed limit would have let it pass"


def test_parts_after_the_first_repeat_the_figure_alone(path):
    method = replace(METHOD, parts=3)
    rows = results(run(path, [FakePeer("a")], FakeTimer(a=[1000.0]), method=method).rows)
    assert {row["part"] for row in rows} == {0, 1, 2}
    for row in rows:
        assert ("isolated_us" in row["rounds"]) == (row["part"] == 0)
        assert len(row["rounds"]["us"]) == method.rounds


class Sensor(Telemetry):
    """Reads 600 W whenever it is asked."""

    running = True

    def between(self, begin, end):
        self.began = begin
        self.samples = [Sample(begin, ()), Sample(end, ()), Sample(end + 1, ())]
        return {"watts": 600.0, "sm_mhz": 1500.0}


def test_power_is_read_under_load_where_it_limits(monkeypatch, path):
    clocks = {"a": [1000.0], "b": [2000.0]}
    method = replace(METHOD, power=True, isolated=False, planned=False)
    case = uniform_case(64, 1, 128, 4096)
    assert power.worthwhile(case.problem)
    assert not power.worthwhile(uniform_case(1, 1, 128, 1024).problem), "latency"
    assert not power.worthwhile(uniform_case(128, 1, 16, 8192).problem), "memory"
    timer = FakeTimer(**clocks)
    replay = FakeReplay(timer, [FakeLaunch("a", lambda: None)] * 8, False)
    assert power.sustained(replay, 8, Telemetry()) is None, "no sensor"
    assert len(timer.calls) == 0
    sensor, clock = Sensor(), iter((100.0, 110.0))
    with monkeypatch.context() as patch:
        patch.setattr("mla_lab.bench.power.time.monotonic", lambda: next(clock))
        row = power.sustained(replay, 8, sensor)
    assert sensor.began == 103.0, "the first 30 % of ten seconds are not read"
    assert row is not None
    assert (row["watts"], row["us"], row["readings"]) == (600.0, 1000.0, 2)
    assert row["joules"] == pytest.approx(0.6)
    assert row["seconds"] == pytest.approx(power.WINDOW_SECONDS)
    monkeypatch.setattr("mla_lab.bench.measure.worthwhile", lambda problem: True)
    monkeypatch.setattr("mla_lab.bench.harness.Telemetry", Sensor)
    peers = [FakePeer(name) for name in ("a", "b", "far")]
    clocks["far"] = [3000.0]
    rows = by_peer(run(path, peers, FakeTimer(**clocks), method=method))
    assert rows["b"]["power"]["joules"] == pytest.approx(1.2)
    assert "power" not in rows["far"]
    validate(path)


def test_a_plan_that_the_device_refuses_leaves_the_rest(path):
    class Peer(FakePeer):
        def prepare(self, rotation):
            def refuse():
                raise unsupported("plan", "too many tiles", "fewer")

            prepared = super().prepare(rotation)
            return replace(prepared, planned_launches=(FakeLaunch("a", refuse),))

    row = by_peer(run(path, [Peer("a")]))["a"]
    assert row["us"] == 10.0
    assert "us_with_plan" not in row
    assert row["notes"]["planned"] == "plan: got too many tiles; supported: fewer"


def test_the_run_row_tells_where_and_how(path):
    record = run(path, [FakePeer("a")])
    opening = record.rows[0]
    assert opening["method"]["timer"] == "fake"
    assert opening["method"]["rounds"] == 3
    assert opening["environment"]["libraries"]["torch"] == torch.__version__
    assert opening["cases"] == 2
