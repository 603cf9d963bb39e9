"""The table of eight bits: made of the record, line by line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mla_lab.bench.cases import Case, blackwell_twins, uniform_case
from mla_lab.bench.records import describe_case
from mla_lab.core.resources import data_dir
from mla_lab.verify import eight_bits_table as eight_bits
from mla_lab.verify import sparse_table
from mla_lab.verify.eight_bits_table import RECORD, plain_of, table
from mla_lab.verify.record import read
from mla_lab.verify.target_figures import rows_of


def row(case: Case, us: float, kernel: str | None, tile_rows: int) -> dict[str, Any]:
    notes = {"kernel": kernel, "tile_rows": tile_rows, "backend": "torch"}
    result = {"status": "ok", "us": us, "rel_error": us * 1e-4, "notes": notes}
    return {"kind": "result", **describe_case(case), "peer": "mla-lab", "part": 0, **result}


def shape(batch: int, cache: str = "bf16", query: str = "bf16", **more: Any) -> Case:
    return uniform_case(batch, 1, 128, 8192, q_dtype=query, kv_format=cache, **more)


def test_a_line_names_kernel_worst_error_and_times_beside_bf16() -> None:
    keep_ab, swap_ab = "cute_keep_ab_sm90_cluster-2", "cute_swap_ab_sm90_tile_rows-16"
    made = table(
        [
            row(shape(1), 12.0, keep_ab, 64),
            row(shape(64), 200.0, keep_ab, 64),
            row(shape(64, "e4m3"), 400.0, swap_ab, 16),
            row(shape(1, "e4m3"), 10.0, swap_ab, 32),
            row(shape(64, "e4m3", "e4m3", top_k=2048), 50.0, None, 0),
        ]
    )
    assert made.splitlines() == [
        "| formats | heads | kernel, largest batch | error | batch 1 us | batch 64 us |",
        "|---|---:|---|---:|---:|---:|",
        "| bf16 | 128 | keep_ab, 64 rows | 2.0e-02 | 12.0 | 200 |",
        "| bf16 over e4m3 | 128 | swap_ab, 16 rows | 4.0e-02 | 10.0 (1.20x) | 400 (0.50x) |",
        "| e4m3, sparse 2048 | 128 | torch | 5.0e-03 |  | 50.0 |",
    ]


def test_twins_are_told_in_a_sentence() -> None:
    twins = {case.name: case for case in blackwell_twins() if case.problem.batch == 64}
    times = {name: 100.0 * (1 + i) for i, name in enumerate(twins)}
    made = table(
        [row(shape(64), 1.0, None, 0)] + [row(c, times[n], None, 0) for n, c in twins.items()]
    )
    fastest = [times[plain_of(n)] / times[n] for n in twins if n != plain_of(n)]
    assert f"The {len(fastest)} shapes of" in made
    assert f"{min(fastest):.2f} (b64" in made and f"{max(fastest):.2f} (b64" in made


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("b1_q1_h16_kv8192_e4m3", "b1_q1_h16_kv8192"),
        ("b1_q1_h16_kv8192_bf16_fp8_656", "b1_q1_h16_kv8192"),
        ("b1_q4_h128_kv8192_var_e4m3_p32", "b1_q4_h128_kv8192_var_p32"),
        ("b1_q1_h16_kv8192_bf16_e4m3_topk2048", "b1_q1_h16_kv8192_topk2048"),
    ],
)
def test_the_same_shape_in_bf16(case: str, plain: str) -> None:
    assert plain_of(case) == plain


def test_every_format_of_the_record_has_a_name() -> None:
    cases = {row["case"] for row in rows_of(RECORD) if row["kind"] == "result"}
    assert all(plain_of(case) in cases for case in cases if "_p32" in case)
    assert set(eight_bits.FORMATS.values()) <= {
        line.split(" | ")[0].removeprefix("| ") for line in table(rows_of(RECORD)).splitlines()
    }


def sparse_rows(
    heads: int, q_len: int, batch: int, us: dict[str, float], more: float = 0.0
) -> list[dict[str, Any]]:
    """Rows of one sparse case, as a bench record has them; in a step they take `more`."""
    case = uniform_case(batch, q_len, heads, 32768, kv_format="fp8_656", top_k=2048)
    line = {"kind": "result", **describe_case(case), "status": "ok", "part": 0}
    return [
        {**line, "peer": sparse_table.PEERS[name], "us": took}
        | ({"us_in_step": took + more} if more else {})
        for name, took in us.items()
    ]


def test_sparse_calls_beside_flash_mla_name_the_kernel_that_cute_takes() -> None:
    head = {
        "kind": "run",
        "time": "2026-11-23T00:00:00",
        "environment": {"card": {"name": "a card"}, "commit": "c" * 40},
        "method": {"rounds": 7},
        "peers": [{"name": "flashmla", "version": "f"}],
    }
    ahead = {"FlashMLA": 20.0, "swap_ab": 30.0, "keep_ab": 10.0, "plain call": 10.5}
    behind = {"FlashMLA": 20.0, "swap_ab": 5.0, "keep_ab": 10.0, "plain call": 5.0}
    text = sparse_table.table(
        [head, *sparse_rows(128, 2, 4, ahead), *sparse_rows(16, 1, 64, behind, 5.0)]
    )
    assert "| 2048 | 128 | 2 | 4 | 20.0 | 30.0 | **10.0** | 2.00 |  |  |  |  |" in text
    stepped = "25.0 | **10.0** | 15.0 | 2.50"
    assert f"| 2048 | 16 | 1 | 64 | 20.0 | **5.0** | 10.0 | 4.00 | {stepped} |" in text
    assert "2048 tokens, 16 heads 4.00 (least 4.00)" in text
    assert "in a step 2048 tokens, 16 heads 2.50 (least 2.50)" in text


def test_watts_and_joules_stand_beside_flash_mla_s() -> None:
    head = {
        "kind": "run",
        "time": "2026-11-23T00:00:00",
        "environment": {"card": {"name": "a card"}, "commit": "c" * 40},
    }
    seen = {"us": 11.5, "watts": 701.2, "joules": 0.0081, "sm_mhz": 1755.0}
    took = {"FlashMLA": 20.0, "swap_ab": 30.0, "plain call": 10.5}
    rows = [{**row, "power": seen} for row in sparse_rows(128, 2, 4, took)]
    text = sparse_table.power_table([head, *rows])
    assert "| 128 | 4 | the plain call | 10.5 | 11.5 | 701 | 8.1 | 1755 |" in text
    assert "| 128 | 4 | FlashMLA | 20.0 |" in text
    assert "30.0" not in text


def test_two_records_are_told_apart_by_the_call_that_differs_most() -> None:
    """Of the largest batch, by one kernel; calls of another kernel or peer count for nothing."""
    keep_ab, swap_ab = "cute_keep_ab_sm90", "cute_swap_ab_sm90"
    own = {"peer": eight_bits.PLAIN_CALL}

    def record(small: float, bf16: float, e4m3: float, kernel: str) -> list[dict[str, Any]]:
        calls = [
            row(shape(64), small, keep_ab, 64),
            row(shape(128), bf16, keep_ab, 64),
            row(shape(128, "e4m3"), e4m3, keep_ab, 128),
            row(shape(128, "e4m3", "e4m3"), bf16, kernel, 64),
        ]
        facts = {"card": {"name": "A"}, "commit": "c" * 40, "dirty": False}
        head = {"kind": "run", "time": "2026-11-30T00:00:00", "environment": facts}
        return [head, *(call | own for call in calls), calls[1] | {"peer": "other", "us": 1.0}]

    made = eight_bits.apart(record(1, 400, 420, keep_ab), record(9, 440, 415, swap_ab))
    assert made.startswith("128 requests took 400 us for bf16 in the first record, and 440 us in")
    assert made.count("commit") == 1


def test_a_time_in_the_page_s_own_words_has_its_commit() -> None:
    """The records that the page names are measured anew; a time of an older one is not theirs."""
    page = (data_dir() / "notes/eight_bits.md").read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<!-- made.*?/made -->", "", page, flags=re.DOTALL).split())
    told = [s for s in re.split(r"(?<=\.) (?=[A-Z])", text) if "us for" in s]
    assert told and all("commit" in sentence for sentence in told)


@pytest.mark.parametrize("record", [sparse_table.RECORD, sparse_table.BF16])
def test_the_rule_follows_the_record(record: str) -> None:
    """In a step the kernel of the rule loses no case by 2 % and 1.2 us or more: two measurements
    of one kernel there, by its name and as the plain call, are up to 1.1 and 1.3 us apart in these
    records. The plain call takes the rule's kernel, or took the other one, of 32 heads and more, at
    the record's commit."""
    step = sparse_table.STEP
    for problem, us in sparse_table.cases(read(data_dir() / record)):
        own = sparse_table.taken(problem)
        quickest = min(us["keep_ab" + step], us["swap_ab" + step])
        assert us[own + step] < max(1.02 * quickest, quickest + 1.2)
        took = min(abs(us["plain call"] / us[name] - 1) for name in ("keep_ab", "swap_ab"))
        assert took < 0.06


def test_the_page_s_own_words_have_the_figures_of_the_records():
    """Figures in the text between the tables of sparse calls, computed anew."""
    page = (data_dir() / "notes/eight_bits.md").read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<!-- made.*?/made -->", "", page, flags=re.DOTALL).split())
    cases = list(sparse_table.cases(read(data_dir() / sparse_table.RECORD)))
    quicker = max(us["keep_ab"] - us["swap_ab"] for p, us in cases if p.heads > 16)
    assert f"swap_ab with 32 rows is up to {quicker:.1f} us quicker" in text
    step = sparse_table.STEP
    slower = [(p, us) for p, us in cases if sparse_table.speedup(p, us, step) < 1]
    assert {(p.top_k, p.batch) for p, _ in slower} == {(512, 4)}
    *others, last = [str(p.heads) for p, _ in slower]
    heads = f"{('no', 'one', 'two', 'three')[len(slower)]}, of 512 tokens, 4 requests and"
    assert f"but {heads} {', '.join(others)} and {last} heads" in text
    bold = ", ".join(f"{sparse_table.speedup(p, us, step):.2f}" for p, us in slower)
    plain = ", ".join(f"{us['FlashMLA' + step] / us['plain call' + step]:.2f}" for _, us in slower)
    assert f"takes {bold} of the time of the kernel in bold, and {plain} of" in text
    sides = {
        (row["peer"] == sparse_table.PEERS["FlashMLA"], row["problem"]["batch"]): row
        for row in sparse_table.sides(read(data_dir() / sparse_table.POWER))
        if row["problem"]["heads"] == 128
    }
    pairs = [(sides[True, batch], sides[False, batch]) for batch in (64, 128)]
    load = " and ".join(f"{a['power']['us'] / b['power']['us']:.2f}" for a, b in pairs)
    turns = " and ".join(f"{a['us'] / b['us']:.2f}" for a, b in pairs)
    assert f"FlashMLA takes {load} times as long as the plain call at batch 64 and 128" in text
    assert f"in turns with other calls {turns} times" in text
