"""Tables of serving engines' steps, of decode context parallel, of a Ray sweep, of FlashInfer's
wrapper tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ..core.resources import data_dir
from .record import Row, read

#: records by the name of the table that is made from them
RECORDS = {
    "engine-steps": "records/h200_engine_steps.jsonl",
    "ranks": "records/h200_ranks.jsonl",
    "ranks-note": "records/h200_ranks.jsonl",
    "ray": "records/h200_ray.jsonl",
    "wrapper": "records/flashinfer_wrapper.jsonl",
}
#: eager steps that the counts of a row without `rounds` are of
ROUNDS = 11
#: forms of a rank's step beside the one in order
FORMS = {"overlapped_us": "weights while outs travel", "halves_us": "the batch in halves"}


def steps_table(rows: Sequence[Row]) -> str:
    """A line for each backend and shape: times a layer, requests to the allocator, errors."""
    lines = [
        "| layers over | batch x tokens | build, us | host a layer, us | graph a layer, us | "
        "graph's host time, us | syncs | device allocations | cached | error | against the first |",
        "|---|---|" + "---:|" * 9,
    ]
    for row in rows:
        shape = f"{row['batch']} x {row['kv_len']:,}"
        asked = row["cache_requests"] / row["layers"] / row.get("rounds", ROUNDS)
        times = ("build_us", "host_us_a_layer", "graph_us_a_layer", "graph_host_us")
        figures = [f"{row[name]:.1f}" for name in times]
        figures += ["yes" if row["synchronised"] else "none", str(row["device_allocations"])]
        figures += [f"{asked:.0f}", f"{row['error']:.1e}"]
        same = row["beside"] == row["backend"]
        figures.append("" if same else f"{row['difference']:.1e}")
        lines.append(f"| {_layers_of(row)} | {shape} | {' | '.join(figures)} |")
    return "\n".join([*lines, "", _where(rows)])


def _layers_of(row: Row) -> str:
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if engine in row:
            return f"{name} {row[engine]}, `{row['backend'].removeprefix('SGLANG_')}`"
    return "our step alone"


def ranks_table(rows: Sequence[Row]) -> str:
    """A line for each case that was timed as CUDA graphs."""
    parts = ("alone_us", "own_call_us", "gather_us", "merge_us", "sum_of_parts_us")
    lines = [
        "| ranks | tokens | batch | one GPU | own call | gather | merge | sum | in order | "
        "weights while outs travel | batch in halves |",
        "|---:|" + "---:|" * 10,
    ]
    for row in _graphs(rows):
        times = [f"{row[name]:.1f}" for name in (*parts, "in_order_us", "overlapped_us")]
        times.append(f"{row['halves_us']:.1f}" if "halves_us" in row else "")
        sizes = f"{row['world']} | {row['kv_len']:,} | {row['batch']}"
        lines.append(f"| {sizes} | {' | '.join(times)} |")
    return "\n".join(lines)


def ranks_note(rows: Sequence[Row]) -> str:
    """What the ranks' cases say: where several GPUs win, and where overlap pays."""
    graphs = _graphs(rows)
    wins = []
    for kv_len in sorted({row["kv_len"] for row in graphs}):
        faster = [r["batch"] for r in graphs if r["kv_len"] == kv_len and _best(r) < r["alone_us"]]
        wins.append(f"{kv_len:,} tokens {f'from batch {min(faster)}' if faster else 'never'}")
    most = max(row["alone_us"] / _best(row) for row in graphs)
    said = [f"Faster than one GPU: {', '.join(wins)}; up to {most:.2f} times."]
    for name, words in FORMS.items():
        saved = [row["in_order_us"] - row[name] for row in graphs if name in row]
        paid = sum(us > 0 for us in saved)
        said.append(
            f"Against the step in order, {words}: {_signed(min(saved))} to {_signed(max(saved))} "
            f"us saved, more than nothing in {paid} of {len(saved)} cases."
        )
    eager = [row for row in rows if row["kind"] == "ranks" and not row["graph"]]
    if eager:
        first = min(eager, key=lambda row: (row["kv_len"], row["batch"]))
        said.append(
            f"Without a CUDA graph the host's launches set the time of short steps: "
            f"{first['in_order_us']:.0f} us in order at {first['kv_len']:,} tokens x "
            f"{first['batch']}."
        )
    return " ".join([*said, _where(rows)])


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
        f"{len(found) - counts['ok']} variants without a build there; a process a case ({on})"
        f"{lost}. {_where(rows)}"
    )


def wrapper_table(rows: Sequence[Row]) -> str:
    """FlashInfer's tests of its wrapper: how many there are, ran, passed, failed, and why."""
    head = rows[0]
    lines = [
        "| test | there | passed | failed | skipped | why not |",
        "|---|---:|---:|---:|---:|---|",
    ]
    every: Counter[str] = Counter()
    for row in (row for row in rows if row["kind"] == "test"):
        counts = {name: row.get(name, 0) for name in ("passed", "failed", "skipped")}
        every.update(counts)
        why = "; ".join(reason.split("mla_lab.core.errors.")[-1] for reason in row["reasons"])
        cells = " | ".join(str(count or "") for count in counts.values())
        lines.append(f"| `{row['test']}` | {row['there']} | {cells} | {why} |")
    total = ", ".join(f"{count} {name}" for name, count in every.items())
    about = (
        f"{total}; FlashInfer {head['flashinfer_commit'][:9]}, {head['draw']} of each test at "
        f"most, seed {head['seed']}; {head['card']}, torch {head['torch']}, {head['date']}, commit "
        f"{head['mla_lab_commit'][:9]}."
    )
    return "\n".join([*lines, "", about])


def _graphs(rows: Sequence[Row]) -> list[Row]:
    found = [row for row in rows if row["kind"] == "ranks" and row["graph"]]
    return sorted(found, key=lambda row: (row["world"], row["kv_len"], row["batch"]))


def _best(row: Row) -> float:
    return min(row[name] for name in ("in_order_us", *FORMS) if name in row)


def _signed(us: float) -> str:
    return f"{us:+.0f}".replace("-", "−")


def _where(rows: Sequence[Row]) -> str:
    """Card, libraries and commits of the rows that have an environment."""
    found = [row["environment"] for row in rows if row.get("environment")]
    cards = ", ".join(dict.fromkeys(e["card"]["name"] if e["card"] else "CPU" for e in found))
    torches = ", ".join(dict.fromkeys(e["libraries"]["torch"] for e in found))
    commits = ", ".join(dict.fromkeys((e["commit"] or "unknown")[:9] for e in found))
    return f"{cards}, torch {torches}, commit {commits}."


def made(name: str) -> str:
    """A table of the record in `data/`."""
    makers: dict[str, Callable[[Sequence[Row]], str]] = {
        "engine-steps": steps_table,
        "ranks": ranks_table,
        "ranks-note": ranks_note,
        "ray": ray_note,
        "wrapper": wrapper_table,
    }
    return makers[name](read(data_dir() / RECORDS[name]))


TABLES: dict[str, Callable[[], str]] = {name: partial(made, name) for name in RECORDS}
