"""Tables of serving engines' steps, of decode context parallel, of a Ray sweep, of FlashInfer's
wrapper tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ..core.markdown import markdown_table
from .record import Row, table_of

#: the form of a rank's step beside the one in order, from two requests on
HALVES = "halves_us"


def steps_table(rows: Sequence[Row]) -> str:
    """A line for each backend and shape: times a layer, requests to the allocator, errors."""
    lines = []
    for row in rows:
        shape = f"{row['batch']} x {row['kv_len']:,}"
        asked = row["cache_requests"] / row["layers"] / row["rounds"]
        timed = ("build_us", "host_us_a_layer", "graph_us_a_layer", "graph_host_us")
        figures = [f"{row[name]:.1f}" for name in timed]
        figures += ["yes" if row["synchronised"] else "none", str(row["device_allocations"])]
        figures += [f"{asked:.0f}", f"{row['error']:.1e}"]
        same = row["beside"] == row["backend"]
        figures.append("" if same else f"{row['difference']:.1e}")
        lines.append((_layers_of(row), shape, *figures))
    times = ("build, us:", "host a layer, us:", "graph a layer, us:", "host time of a replay, us:")
    counts = ("syncs:", "device allocations:", "cached:", "error:", "against the first:")
    table = markdown_table(("layers over", "batch x tokens", *times, *counts), lines)
    return f"{table}\n\n{_where(rows)}"


def _layers_of(row: Row) -> str:
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if engine in row:
            return f"{name} {row[engine]}, `{row['backend'].removeprefix('SGLANG_')}`"
    return "our step alone"


def ranks_table(rows: Sequence[Row]) -> str:
    """A line for each case that was timed as CUDA graphs."""
    parts = ("alone_us", "own_call_us", "gather_us", "merge_us", "exchange_us")
    steps = ("in_order_us", "peers_us", HALVES)
    lines = []
    for row in _graphs(rows):
        times = (f"{row[name]:.1f}" if name in row else "" for name in (*parts, *steps))
        lines.append((row["world"], f"{row['kv_len']:,}", row["batch"], *times))
    names = (
        "ranks:", "tokens:", "batch:", "one GPU:", "own call:", "NCCL's gather:", "merge:",
        "both by peer memory:", "step by NCCL:", "step by peer memory:", "batch in halves:",
    )  # fmt: skip
    return markdown_table(names, lines)


def ranks_note(rows: Sequence[Row]) -> str:
    """What the ranks' cases say: where several GPUs win, and what other forms save."""
    graphs = _graphs(rows)
    wins = []
    for kv_len in sorted({row["kv_len"] for row in graphs}):
        faster = [r["batch"] for r in graphs if r["kv_len"] == kv_len and _best(r) < r["alone_us"]]
        wins.append(f"{kv_len:,} tokens {f'from batch {min(faster)}' if faster else 'never'}")
    most = max(row["alone_us"] / _best(row) for row in graphs)
    said = [f"Faster than one GPU: {', '.join(wins)}; up to {most:.2f} times."]
    for name, form in (("peers_us", "peer memory"), (HALVES, "the batch in halves, by NCCL")):
        saved = [row["in_order_us"] - row[name] for row in graphs if name in row]
        if saved:
            said.append(
                f"Saved against NCCL's step by {form}: {_signed(min(saved))} to "
                f"{_signed(max(saved))} us, more than 0 in {sum(us > 0 for us in saved)} of "
                f"{len(saved)} cases."
            )
    eager = [row for row in rows if row["kind"] == "ranks" and not row["graph"]]
    if eager:
        first = min(eager, key=lambda row: (row["kv_len"], row["batch"]))
        by_peers = f", {first['peers_us']:.0f} by peer memory" if "peers_us" in first else ""
        said.append(
            f"Without a CUDA graph, launches by the host bound short steps: "
            f"{first['in_order_us']:.0f} us by NCCL{by_peers} at {first['kv_len']:,} tokens x "
            f"{first['batch']}."
        )
    return " ".join([*said, _where(rows)])


def _rank_case(row: Row) -> str:
    if row["kind"] == "rank_mask":
        return f"mask of {row['q_len']} tokens"
    return f"merge of {row['ranks']} ranks, {row['heads']} heads"


def rank_kernels_table(rows: Sequence[Row]) -> str:
    """A line for each batch size: times of both merges for each number of ranks, and of a mask,
    where our kernel ran."""
    found = {(_rank_case(row), row["batch"]): row for row in rows if row["kernel"]}
    cases = list(dict.fromkeys(case for case, _ in found))
    lines = []
    for batch in dict.fromkeys(batch for _, batch in found):
        of_batch = [found.get((case, batch)) for case in cases]
        both = [(row, name) for row in of_batch for name in ("us", "torch_us")]
        lines.append((batch, *(f"{row[name]:.1f}" if row else "" for row, name in both)))
    names = [f"{case}, {side}:" for case in cases for side in ("us", "PyTorch, us")]
    table = markdown_table(("batch:", *names), lines)
    return f"{table}\n\n{_where(rows[:1])}"


def ray_note(rows: Sequence[Row]) -> str:
    """Cases, results, workers and the attempts that lost theirs."""
    found = [row for row in rows if row["kind"] == "result"]
    counts = Counter(row["status"] for row in found)
    cases = {row["case"] for row in found}
    workers = {(w["host"], w["process"]): w for w in (row["worker"] for row in found)}
    gpus = Counter(f"{w['card']} {w['gpu']}" for w in workers.values())
    again = {row["case"] for row in found if row["worker"].get("attempt", 1) > 1}
    lost = f"; {', '.join(sorted(again))} ran again after its worker was killed" if again else ""
    on = ", ".join(f"{count} on {gpu}" for gpu, count in sorted(gpus.items()))
    return (
        f"{len(cases)} cases, {counts['ok']} results, "
        f"{len(found) - counts['ok']} variants without a build there; one process a case ({on})"
        f"{lost}. {_where(rows)}"
    )


def wrapper_table(rows: Sequence[Row]) -> str:
    """FlashInfer's tests of its wrapper: how many there are, ran, passed, failed, and why."""
    head = rows[0]
    lines = []
    every: Counter[str] = Counter()
    for row in (row for row in rows if row["kind"] == "test"):
        counts = {name: row.get(name, 0) for name in ("passed", "failed", "skipped")}
        every.update(counts)
        why = "; ".join(reason.split("mla_lab.core.errors.")[-1] for reason in row["reasons"])
        cells = (count or "" for count in counts.values())
        lines.append((f"`{row['test']}`", row["there"], *cells, why))
    total = ", ".join(f"{count} {name}" for name, count in every.items())
    about = (
        f"{total}; FlashInfer {head['flashinfer_commit'][:9]}, {head['draw']} of each test at "
        f"most, seed {head['seed']}; {head['card']}, torch {head['torch']}, {head['date']}, commit "
        f"{head['mla_lab_commit'][:9]}."
    )
    names = ("test", "parametrisations:", "passed:", "failed:", "skipped:", "why not")
    return f"{markdown_table(names, lines)}\n\n{about}"


def _graphs(rows: Sequence[Row]) -> list[Row]:
    found = [row for row in rows if row["kind"] == "ranks" and row["graph"]]
    return sorted(found, key=lambda row: (row["world"], row["kv_len"], row["batch"]))


def _best(row: Row) -> float:
    return min(row[name] for name in ("in_order_us", "peers_us", HALVES) if name in row)


def _signed(us: float) -> str:
    return f"{us:+.0f}".replace("-", "−")


def _where(rows: Sequence[Row]) -> str:
    """Card, libraries and commits of the rows that have an environment."""
    found = [row["environment"] for row in rows if row.get("environment")]
    cards = ", ".join(dict.fromkeys(e["card"]["name"] if e["card"] else "CPU" for e in found))
    torches = ", ".join(dict.fromkeys(e["libraries"]["torch"] for e in found))
    commits = ", ".join(dict.fromkeys((e["commit"] or "unknown")[:9] for e in found))
    return f"{cards}, torch {torches}, commit {commits}."


TABLES: dict[str, Callable[[], str]] = {
    "engine-steps": partial(table_of, "records/h200_engine_steps.jsonl", steps_table),
    "ranks": partial(table_of, "records/h200_ranks.jsonl", ranks_table),
    "ranks-note": partial(table_of, "records/h200_ranks.jsonl", ranks_note),
    "rank-kernels": partial(table_of, "records/h200_rank_kernels.jsonl", rank_kernels_table),
    "ray": partial(table_of, "records/h200_ray.jsonl", ray_note),
    "wrapper": partial(table_of, "records/flashinfer_wrapper.jsonl", wrapper_table),
}
