"""Tables of engines and clusters say what their rows say."""

from __future__ import annotations

from typing import Any

from mla_lab.verify import engine_tables

HERE = {"card": {"name": "H200"}, "libraries": {"torch": "2"}, "commit": "a" * 40}


def ranks_row(batch: int, alone: float, order: float, **more: Any) -> Any:
    times = {"alone_us": alone, "in_order_us": order}
    parts = dict.fromkeys(("own_call_us", "gather_us", "merge_us"), 1.0)
    sizes = {"kind": "ranks", "world": 2, "kv_len": 4096, "batch": batch, "graph": True}
    return sizes | times | parts | {"environment": HERE} | more


def test_ranks_are_judged_by_their_best_form() -> None:
    rows = [
        ranks_row(1, 10.0, 20.0),
        ranks_row(2, 30.0, 20.0, halves_us=50.0),
        ranks_row(4, 60.0, 40.0, halves_us=50.0, peers_us=30.0, exchange_us=5.0),
        ranks_row(1, 10.0, 400.0, graph=False, peers_us=90.0),
    ]
    said = engine_tables.ranks_note(rows)
    assert "4,096 tokens from batch 2; up to 2.00 times" in said
    assert "by peer memory: +10 to +10 us, more than 0 in 1 of 1" in said
    assert "by the batch in halves, by NCCL: −30 to −10 us, more than 0 in 0 of 2" in said
    assert "400 us by NCCL, 90 by peer memory at 4,096 tokens x 1" in said
    assert "H200, torch 2" in said
    lines = engine_tables.ranks_table(rows).splitlines()
    assert len(lines) == 5, "graphs alone"
    assert lines[2].endswith("| 1.0 |  | 20.0 |  |  |")
    assert lines[4].endswith("| 5.0 | 40.0 | 30.0 | 50.0 |")


def test_both_merges_stand_in_a_line_for_each_batch() -> None:
    sizes = [(2, 1), (2, 16), (8, 1), (8, 16)]
    rows: list[Any] = [
        {"kind": "rank_merge", "ranks": n, "heads": 8, "batch": b, "us": n + b / 100}
        for n, b in sizes
    ]
    rows += [{"kind": "rank_mask", "q_len": 4, "batch": b, "us": 1.0} for b in (1, 16, 64)]
    rows = [row | {"kernel": True, "torch_us": 50.0, "environment": HERE} for row in rows]
    rows.append(rows[0] | {"ranks": 33, "kernel": False})
    lines = engine_tables.rank_kernels_table(rows).splitlines()
    assert "33 ranks" not in lines[0] and "merge of 8 ranks, 8 heads, PyTorch, us" in lines[0]
    assert lines[2] == "| 1 | 2.0 | 50.0 | 8.0 | 50.0 | 1.0 | 50.0 |"
    assert lines[3] == "| 16 | 2.2 | 50.0 | 8.2 | 50.0 | 1.0 | 50.0 |"
    assert lines[4] == "| 64 |  |  |  |  | 1.0 | 50.0 |"
    assert lines[-1] == "H200, torch 2, commit aaaaaaaaa."


def result(case: str, process: int, attempt: int, status: str = "ok") -> Any:
    worker = {"host": "h", "process": process, "card": "H200", "gpu": str(process % 2)}
    row = {"kind": "result", "case": case, "status": status, "environment": HERE}
    return row | {"worker": worker | {"attempt": attempt}}


def test_a_sweep_names_cards_and_cases_that_lost_a_worker() -> None:
    rows = [result("a", 1, 1), result("a", 1, 1, "refused"), result("b", 2, 2), result("c", 3, 1)]
    said = engine_tables.ray_note(rows)
    assert said.startswith("3 cases, 3 results, 1 variants without a build there; one process a ca")
    assert "(1 on H200 0, 2 on H200 1); b ran again after its worker was killed" in said


def test_a_step_s_requests_are_a_layer_s_in_one_step() -> None:
    row: Any = {"backend": "SGLANG_MLA_LAB", "sglang": "0.5", "batch": 1, "kv_len": 8000}
    row |= {"layers": 61, "rounds": 10, "cache_requests": 61 * 10 * 4, "device_allocations": 0}
    row |= dict.fromkeys(("build_us", "host_us_a_layer", "graph_us_a_layer", "graph_host_us"), 1.0)
    row |= {"synchronised": False, "error": 1e-3, "beside": "X", "difference": 2e-3}
    line = engine_tables.steps_table([row]).splitlines()[2]
    assert line.startswith("| SGLang 0.5, `MLA_LAB` | 1 x 8,000 |")
    assert line.endswith("| none | 0 | 4 | 1.0e-03 | 2.0e-03 |")
