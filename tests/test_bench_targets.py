"""Targets: every figure is computed from the records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mla_lab.cli import main
from mla_lab.core.errors import InvalidInput
from mla_lab.verify import plain_tables, target_figures, targets
from mla_lab.verify.target_figures import FIGURES, Figure
from mla_lab.verify.targets import Target, Verdict, judge, load, table

TARGETS = load()
HEAD = {"schema": 1, "time": "2026-11-20T12:00:00+00:00"}
RUN = {
    **HEAD,
    "kind": "run",
    "environment": {},
    "method": {},
    "peers": [],
    "ceilings": {"read_tbps": 5.0},
}


@pytest.fixture(scope="module")
def verdicts():
    return judge(TARGETS)


def test_targets_have_names_of_their_own():
    assert len({t.name for t in TARGETS}) == len(TARGETS) >= 20


def test_a_met_line_is_met_and_a_missed_one_missed(verdicts):
    rows = [line for line in table(verdicts).splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(verdicts)
    for verdict, row in zip(verdicts, rows, strict=True):
        target, figure = verdict.target, verdict.figure
        holds = figure.value <= target.asked if target.most else figure.value >= target.asked
        assert (" | yes | " in row) == holds == verdict.met
        assert (" | no | " in row) != holds


def test_a_missed_bound_is_told_from_the_figure():
    assert str(targets.finer(Figure(1.328), 1.33)) == "1.328"
    assert str(targets.finer(Figure(0.9796, form=".1%"), 0.98)) == "97.96%"
    assert str(targets.finer(Figure(1.2), 1.33)) == "1.20"


def test_a_bound_is_from_below_or_above():
    least = Target("a", "speedup", {}, asked=1.1)
    assert least.met(Figure(1.1)) and not least.met(Figure(1.09))
    most = replace(least, most=True)
    assert most.met(Figure(1.1)) and not most.met(Figure(1.11))


def test_a_miss_shows_its_reason_and_a_met_target_none():
    met, missed = (Target(n, "speedup", {}, asked=1.1, reason=f"why {n}") for n in ("a", "b"))
    other = Target("c", "speedup", {}, asked=1.1)
    verdicts = [Verdict(t, Figure(v)) for t, v in ((met, 2.0), (missed, 1.0), (other, 1.0))]
    assert table(verdicts).splitlines()[-2:] == ["- b: why b", "- c: no reason on record"]
    assert "- " not in table(verdicts[:1]).splitlines()[-1], "all met is good news"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A `data/` with one attempt, and what a test puts into it."""
    attempt = {"kernel": "k", "change": "c"}
    (tmp_path / "notes").mkdir()
    (tmp_path / "records").mkdir()
    (tmp_path / targets.ATTEMPTS).write_text(json.dumps(attempt) + "\n")
    for module in (targets, target_figures, plain_tables):
        monkeypatch.setattr(module, "data_dir", lambda: tmp_path)
    target_figures.rows_of.cache_clear()
    yield tmp_path
    target_figures.rows_of.cache_clear()


def put(folder, **changes):
    row = {"name": "n", "figure": "speedup", "of": {}, "asked": 1.0, **changes}
    (folder / targets.FILE).write_text(json.dumps(row) + "\n")


def test_a_target_names_what_there_is(folder):
    put(folder, attempts=["k: c"])
    assert load()[0].attempts == ("k: c",)
    for wrong in ({"attempts": ["k: d"]}, {"figure": "none"}, {"other": 1}):
        put(folder, **wrong)
        with pytest.raises(InvalidInput):
            load()
    put(folder)
    with pytest.raises(InvalidInput, match="h200_anchor"):
        judge(load())


def a_row(case, peer, us, part=0, **more):
    batch, q_len, heads, kv = (int(word.lstrip("bqhkv")) for word in case.split("_")[:4])
    problem = {
        "batch": batch,
        "q_lens": q_len,
        "kv_lens": kv,
        "heads": heads,
        "q_dtype": "bf16",
        "kv_format": "bf16",
        "page_size": 64,
        "top_k": 0,
    }
    base = {
        **HEAD,
        "kind": "result",
        "status": "ok",
        "case": case,
        "peer": peer,
        "us": us,
        "rounds": {"us": [us]},
        "part": part,
    }
    return {**base, "problem": problem, "rel_error": 1e-3, "tbps": 4.0, **more}


def test_figures_by_hand(folder):
    rows = [RUN]
    for part, us in enumerate((9.0, 10.0, 30.0)):
        rows.append(a_row("b1_q1_h16_kv1024", "mla-lab", us, part))
    rows += [
        a_row("b1_q1_h16_kv1024", "fa3-qv", 25.0),
        a_row("b1_q1_h16_kv1024", "fa3-qv-32", 20.0, rel_error=8e-4),
        a_row("b1_q1_h16_kv1024", "triton-split-kv", 5.0, rel_error=1e-5),
        a_row("b4_q2_h16_kv8192", "mla-lab", 10.0),
        a_row("b4_q2_h16_kv8192", "flashmla", 5.0),
        a_row("b4_q2_h16_kv8192_fp16", "mla-lab", 11.0),
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / target_figures.ANCHOR).write_text(lines)
    record = {"record": target_figures.ANCHOR}
    assert FIGURES["speedup"]().value == pytest.approx(1.0), "2.0 and 0.5"
    assert FIGURES["speedup"](batch=(4, 9)).value == FIGURES["least_speedup"]().value == 0.5
    assert FIGURES["speedup"](rows=(1, 16)).value == FIGURES["speedup"](keys=(1, 1024)).value == 2
    with pytest.raises(InvalidInput, match="got none"):
        FIGURES["speedup"](batch=(5, 9))
    assert FIGURES["read_share"](keys=(8192, 8192)).value == pytest.approx(0.8)
    assert FIGURES["error_over_peers"]().value == pytest.approx(1.25)
    assert FIGURES["beside"](**record, suffixes=["_fp16"]).value == pytest.approx(1.1)
    inverse = FIGURES["beside"](**record, suffixes=["_fp16"], inverse=True)
    assert inverse.value == pytest.approx(1 / 1.1)


def test_traces_by_hand(folder):
    name = "trace_azure_llm_2023_conv_deepseek-v3_n128_s"

    def sample(number, peer, us, tbps):
        row = a_row("b2_q1_h16_kv100", peer, us, tbps=tbps)
        row["problem"]["kv_lens"] = [50, 150]
        return {**row, "case": f"{name}{number}"}

    rows = [
        RUN,
        sample(0, "mla-lab", 10.0, 4.9),  # 98 % of the read
        sample(0, "flashmla", 10.0, 1.0),
        sample(1, "mla-lab", 10.0, 3.0),
        sample(1, "flashmla", 11.0, 1.0),
        a_row("b2_q1_h16_kv100", "mla-lab", 8.0),
        a_row("b2_q1_h16_kv900", "mla-lab", 1.0),
        a_row("b2_q1_h128_kv100", "mla-lab", 1.0),
    ]
    (folder / target_figures.TRACES).write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = FIGURES["trace_speedup"](heads=16)
    assert found.value == pytest.approx(1.05 * 0.98 / 0.97)
    assert "azure s0: 1.00 of the best peer, 98.0% of read" in str(found)
    assert FIGURES["trace_over_uniform"](heads=16).value == pytest.approx(10 / 8)


AZURE, MOONCAKE = "azure_llm_2023_conv_deepseek-v3", "mooncake_conversation_deepseek-v3"


def a_step(name, us, uniform_us, lengths=(150, 50), heads=16):
    """Rows of a trace step and of its uniform twin."""
    rows = []
    for end, time, kv_lens in (("", us, lengths), ("_uniform", uniform_us, (100, 100))):
        row = a_row(f"b2_q1_h{heads}_kv100", "mla-lab-plain", time)
        row["problem"]["kv_lens"] = list(kv_lens)
        rows.append({**row, "case": f"trace_{name}{end}"})
    return rows


def write_uniform(folder, *rows, record=plain_tables.UNIFORM):
    environment = {"card": {"name": "a card"}, "commit": "c" * 40, "dirty": False}
    lines = [{**RUN, "environment": environment}, *rows]
    (folder / record).write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_steps_over_uniform_batches_by_hand(folder):
    write_uniform(
        folder,
        *a_step(f"{AZURE}_n2_s0", 10.0, 8.0),
        *a_step(f"{AZURE}_n2_s1", 8.0, 10.0),
        *a_step(f"{MOONCAKE}_n2_s4", 9.0, 10.0),
        *a_step(f"{MOONCAKE}_n2_s3", 30.0, 10.0, heads=128),
        a_step(f"{MOONCAKE}_n2_s0", 90.0, 10.0)[0],
        a_row("b2_q1_h16_kv900", "mla-lab-plain", 1.0),
    )
    found = FIGURES["step_over_uniform"](heads=16)
    assert found.value == pytest.approx(1.25)
    assert "azure n2 s0; mean 0.965 of 3" in str(found), "a step without a twin does not count"
    assert FIGURES["step_over_uniform"](heads=128).value == pytest.approx(3)
    with pytest.raises(InvalidInput, match="got none"):
        FIGURES["step_over_uniform"](heads=64)
    assert plain_tables.uniform().splitlines() == [
        "a card, 2026-11-20, commit ccccccccc.",
        "",
        "| trace | heads | steps | step / uniform, mean | worst | worst step |",
        "|---|---:|---:|---:|---:|---|",
        "| azure_llm_2023_conv | 16 | 2 | 1.000 | 1.250 | n2 s0 |",
        "| mooncake_conversation | 16 | 1 | 0.900 | 0.900 | n2 s4 |",
        "| mooncake_conversation | 128 | 1 | 3.000 | 3.000 | n2 s3 |",
    ]


def test_drawn_shapes_by_batch_with_peers_and_without(folder):
    rows = []
    for case, ours, peers in (("b2", 10.0, (15.0, 20.0)), ("b100", 30.0, (33.0, 30.0))):
        for peer, us in zip(("mla-lab-plain", "flashmla", "fa3-qv"), (ours, *peers), strict=True):
            row = a_row(f"{case}_q1_h16_kv100", peer, us)
            rows.append({**row, "family": "heldout", "us_in_step": us + 2.0})
    write_uniform(folder, *rows, record=plain_tables.HELD_OUT)
    origin, _, *lines = plain_tables.held_out().splitlines()
    assert origin == "a card, 2026-11-20, commit ccccccccc."
    assert lines[2:5] == [
        "| 1 to 4 | 1 | 1.50 | 1.50 | 1.42 | 1.42 | b2_q1_h16_kv100 |",
        "| 65 to 256 | 1 | 1.00 | 1.00 | 1.00 | 1.00 | b100_q1_h16_kv100 |",
        "",
    ]
    assert lines[-1].startswith("| b100_q1_h16_kv100 | 30.0 |")
    alone = [row for row in rows if row["peer"] == "mla-lab-plain"]
    write_uniform(folder, *alone, record=plain_tables.HELD_OUT)
    origin, _, *lines = plain_tables.held_out().splitlines()
    assert len(lines) == 4 and lines[-1].startswith("| b100_q1_h16_kv100 | 30.0 |")


def test_page_sizes_are_compared_with_pages_of_64(folder):
    rows = []
    for size, us in ((1, 12.0), (16, 11.0), (64, 10.0)):
        row = a_row(f"b2_q1_h16_kv100_p{size}", "mla-lab-plain", us)
        rows.append({**row, "problem": row["problem"] | {"page_size": size}})
    write_uniform(folder, *rows, record=plain_tables.PAGES)
    assert plain_tables.pages().splitlines()[-1] == (
        "| bf16 | bf16 | 16 | 2 | 100 | 10.0 | 11.0 | 12.0 | 1.10 | 1.20 |"
    )
    write_uniform(folder, *rows[1:], record=plain_tables.PAGES)
    with pytest.raises(InvalidInput, match="page sizes: got"):
        plain_tables.pages()


def test_a_uniform_twin_has_as_many_tokens(folder):
    write_uniform(folder, *a_step(f"{AZURE}_n2_s0", 10.0, 8.0, lengths=(150, 51)))
    with pytest.raises(InvalidInput, match="other requests or tokens"):
        plain_tables.uniform()
    write_uniform(folder, a_step(f"{AZURE}_n2_s0", 10.0, 8.0)[0])
    with pytest.raises(InvalidInput, match="got none"):
        plain_tables.uniform()


def test_a_target_over_a_uniform_batch(folder):
    put(folder, figure="step_over_uniform", of={"heads": 16}, asked=1.1, most=True)
    write_uniform(folder, *a_step(f"{AZURE}_n2_s0", 10.0, 8.0))
    (verdict,) = judge(load())
    assert not verdict.met and verdict.figure.value == pytest.approx(1.25)
    line = (
        "| n | at most 1.100 | 1.250 (azure n2 s0; mean 1.250 of 1) | h200_plain_uniform | no | 0 |"
    )
    made = targets.made().splitlines()
    assert line in made
    assert made[-1] == f"- `data/{plain_tables.UNIFORM}`: a card, 2026-11-20, commit ccccccccc"


def test_the_targets_over_uniform_batches_are_measured(verdicts):
    bounds = {t.of["heads"]: t for t in TARGETS if t.figure == "step_over_uniform"}
    assert set(bounds) == {16, 128}
    assert all(t.most and t.asked == 1.1 for t in bounds.values())
    assert all(target in [v.target for v in verdicts] for target in bounds.values())


def test_the_command_shows_every_target(capsys):
    assert not main(["bench", "targets"])
    said = capsys.readouterr().out
    assert all(t.name in said for t in TARGETS)


def test_the_plain_call_over_the_planned_one_by_hand(folder):
    for record, ours, times in (
        (target_figures.ANCHOR, "mla-lab", {"b1": (10.0, 20.0), "b4": (10.0, 20.0)}),
        (target_figures.PLAIN, "mla-lab-plain", {"b1": (12.0, 24.0), "b4": (9.0, 20.0)}),
    ):
        rows = [RUN]
        for batch, (us, peer_us) in times.items():
            case = f"{batch}_q1_h16_kv1024"
            rows += [a_row(case, ours, us), a_row(case, "flashmla", peer_us)]
        (folder / record).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert FIGURES["over_planned"]().value == pytest.approx((1.2 * 0.9) ** 0.5)
    found = FIGURES["over_planned"](worst=True)
    assert str(found) == "1.200 (b1_q1_h16_kv1024, a public peer's 1.200)"


def test_groups_do_not_overlap():
    """Groups of the anchor cases by batch and rows hold each case once, all 54 together."""
    whole = target_figures.ALL
    found = []
    for of in (t.of for t in TARGETS if t.figure == "speedup" and t.of and "record" not in t.of):
        batch, rows, keys = (of.get(name, whole) for name in ("batch", "rows", "keys"))
        found.append(set(target_figures.speedups(target_figures.ANCHOR, batch, rows, keys, whole)))
    assert sum(map(len, found)) == len(set().union(*found)) == 54


def test_host_time_is_of_the_newest_line_with_the_plain_call(folder):
    plain, add = target_figures.PLAIN_CALL, target_figures.ADD
    lines = [
        {"commit": "a" * 40, "host_us": {add: 4.0, plain: 10.0}},
        {"commit": "b" * 40, "host_us": {add: 5.0, plain: 9.0}},
        {"commit": "c" * 40, "host_us": {add: 5.0, "native call, no plan": 1.0}},
        {"commit": "d" * 40, "host_us": {plain: 9.5}},
    ]
    path = folder / target_figures.HOST
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = FIGURES["host_time"]()
    assert figure.value == pytest.approx(1.8) and "bbbbbbbbb" in str(figure)
    for line in lines[2:]:
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(InvalidInput, match=r"a line of .* with .*no plan"):
            FIGURES["host_time"]()


def test_error_of_lse_is_of_calls_that_return_it_right_or_wrong(folder):
    base = {"kind": "case", "backend": "cute", "status": "ok", "lse_error": 1e-7}
    plain = base | {"case": {"format": "bf16", "lse": "natural"}}
    rows = [
        plain,
        base | {"case": {"format": "bf16", "lse": "none"}, "lse_error": 0.0},
        plain | {"status": "wrong", "lse_error": 3e-3},
        plain | {"backend": "torch", "lse_error": 1.0},
        base | {"case": {"format": "e4m3", "lse": "natural"}, "lse_error": 1.0},
        {"kind": "run"},
    ]
    path = folder / "records/pairwise.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = FIGURES["lse_error"]()
    assert figure.value == 3e-3 and figure.note == "2 calls"
