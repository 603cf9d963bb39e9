"""Soak test: serving-like steps on two streams, every result checked.

A `Session` is a batch on a stream with a workspace of its own. In each step its requests have new
queries and lengths, which are written in place, and the call is repeated: by a CUDA graph that was
captured at other lengths where a kernel runs the call, otherwise by a new call. Requests grow, end
and begin anew. The steps of two sessions are enqueued together, then both results are compared with
the oracle. After `STEPS` steps two new sessions follow, of the next format and of random shapes and
features. A record holds one run after the other, each with its commit, seed and seconds.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.contract import trtllm_batch_decode_with_kv_cache_mla as decode
from ..core import files
from ..core import kv_cache as formats
from ..core.errors import MlaLabError, invalid
from ..core.problem import Problem
from ..core.revision import Revision
from ..reference.inputs import make_inputs
from .cases import CARD_WORKSPACE_BYTES, FORMATS
from .check import Outcome, judge, taken
from .record import Progress, Row, cases_of, head_row, not_ok, read, write

STREAMS = 2
#: steps of a session
STEPS = {"cpu": 5, "cuda": 12}
#: probability that a request ends in a step, and that a session is batch invariant
ENDS, INVARIANT = 0.15, 0.25
#: bytes of a workspace, and bound on the growth of tensors after the first quarter of a run
WORKSPACE_BYTES = {"cpu": 64 << 20, "cuda": CARD_WORKSPACE_BYTES}
FLAT_BYTES = 64 << 20
#: seconds after its end within which a run may finish its sessions
GRACE = 20.0
#: drawn batches, heads, tokens and page sizes
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "cpu": ((1, 2, 3), (2, 16), (90, 260), (2, 16, 64)),
    "cuda": ((1, 2, 7, 16, 40), (1, 16, 24, 64, 128), (300, 2000, 9000), (1, 16, 32, 64, 128)),
}
COUNTS = ("calls", "checked", "wrong", "refused", "graphs", "replays")
#: keys of a run's two rows that are read again
KEYS: tuple[files.Keys, files.Keys] = (
    {"environment": dict},
    dict.fromkeys(("seconds", "sessions", *COUNTS), (int, float))
    | {"status": str, "backends": dict, "memory_before": dict, "memory_after": dict},
)
OPTIONAL = ("lse", "sinks", "device_scales", "page_gap", "cache_4d")


class Session:
    """One batch of requests, on its own stream on a GPU."""

    def __init__(self, draw: random.Random, form: str, workspace: Tensor, stream: Any) -> None:
        self.draw, self.form, self.stream = draw, form, stream
        self.problem, features = drawn(draw, form, workspace.device.type)
        seed = draw.randrange(1 << 30)
        made = make_inputs(self.problem, seed, features, device=workspace.device, workspace_bytes=0)
        self.inputs = replace(made, workspace_buffer=workspace)
        shape = (*made.query.shape[:-1], self.problem.latent_dim)
        dtype = formats.DTYPES[self.problem.out_dtype]
        self.out = torch.empty(shape, dtype=dtype, device=workspace.device)
        self.lse: Tensor | None = None
        self.given = self.inputs.contract_args() | {"out": self.out}
        if made.return_lse:
            rows = (self.problem.total_q, self.problem.heads)
            self.lse = torch.empty(rows, dtype=torch.float32, device=workspace.device)
            self.given["lse"] = self.lse
        self.given["batch_invariant"] = draw.random() < INVARIANT
        self.lengths = [draw.randint(0, n) for n in self.problem.kv_lens]
        self.backend = taken(self.given)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """New lengths and queries, then the call, enqueued on the session's stream."""
        with on(self.stream):
            self._grow()
            for result in (self.out, *([] if self.lse is None else [self.lse])):
                result.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
            if self.graph is not None:
                self.graph.replay()
                return
            decode(**self.given)
            if self.stream is not None and self.backend != "torch":
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    decode(**self.given)

    def _grow(self) -> None:
        """Each request grows by its new tokens or ends; an ended one begins anew."""
        for b, (q_len, most) in enumerate(
            zip(self.problem.q_lens, self.problem.kv_lens, strict=True)
        ):
            grown = self.lengths[b] + max(1, q_len)
            ends = grown > most or (self.lengths[b] > 0 and self.draw.random() < ENDS)
            begins = self.lengths[b] == 0
            self.lengths[b] = 0 if ends else self.draw.randint(0, most) if begins else grown
        self.inputs.seq_lens.copy_(torch.tensor(self.lengths, dtype=torch.int32))
        stored = self.inputs.query.view(torch.uint8)
        stored.copy_(stored.roll(1, dims=0).roll(1, dims=-2))

    def outcome(self) -> Outcome:
        """Check of the last step against the oracle."""
        if self.stream is not None:
            self.stream.synchronize()
        return judge(self.inputs, self.out, self.lse, self.backend, None)


def on(stream: Any) -> Any:
    """The context of a stream; of none on a CPU."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def drawn(draw: random.Random, form: str, kind: str) -> tuple[Problem, list[str]]:
    """Random shapes and features of a session; lengths are the largest ones."""
    batches, heads, tokens, page_sizes = SIZES[kind]
    batch, q_len = draw.choice(batches), draw.choice((1, 1, 1, 2, 4))
    ragged = draw.random() < 0.4
    q_lens = [draw.randint(0, q_len) if ragged else q_len for _ in range(batch)]
    q_lens[0] = q_len
    longest = draw.choice(tokens)
    q_dtype, kv_format, out_dtype = FORMATS[form]
    problem = Problem(
        q_lens=tuple(q_lens),
        kv_lens=tuple(draw.randint(longest // 2, longest) for _ in range(batch)),
        heads=draw.choice(heads),
        q_dtype=q_dtype,
        kv_format=kv_format,
        out_dtype=out_dtype,
        page_size=draw.choice(page_sizes),
        top_k=draw.choice((0, 0, 0, 70)),
    )
    features = [name for name in OPTIONAL if draw.random() < 0.3]
    features += ["max_q_len"] if ragged else []
    features += ["tree_mask"] if not problem.top_k and draw.random() < 0.2 else []
    return problem, features


def added(
    path: Path, device: str, seconds: float, progress: Progress, seed: int | None = None
) -> list[Row]:
    """Rows of a record after one more run, which is written to it; a new file if there is none.

    seed: by default the number of runs that the record then has. Raises InvalidInput for a file
    that is no record of a soak.
    """
    rows = read(path) if path.exists() else []
    if any(row.get("what", "soak") != "soak" for row in rows):
        raise invalid("record", f"{path} of another command", "one that `verify soak` wrote")
    for row in rows:
        files.check(row, KEYS[row["kind"] == "case"], f"record {path}, {row['kind']}")
    runs = len(cases_of(rows))
    rows += run(device, seconds, progress, runs + 1 if seed is None else seed)
    write(path, rows)
    return rows


def summary(rows: Sequence[Row]) -> str:
    """One paragraph: device time, calls, results checked, wrong ones, memory."""
    found, heads = cases_of(rows), [row["environment"] for row in rows if row["kind"] == "run"]
    count = {name: sum(row[name] for row in found) for name in COUNTS}
    seconds, sessions = (sum(row[name] for row in found) for name in ("seconds", "sessions"))
    backends: Counter[str] = Counter()
    for row in found:
        backends.update(row["backends"])
    names = (head["card"]["name"] if head["card"] else "a CPU" for head in heads)
    cards = ", ".join(dict.fromkeys(names))
    commits = ", ".join(dict.fromkeys((row["commit"] or "unknown")[:9] for row in found))
    dates = ", ".join(dict.fromkeys(head["date"] for head in heads))
    grown = max(row["memory_after"]["tensors"] - row["memory_before"]["tensors"] for row in found)
    return (
        f"{seconds:,.0f} seconds in {len(found)} runs on {cards} (commits {commits}; {dates}): "
        f"{sessions:,} batches on {STREAMS} streams, {count['calls']:,} calls, of which "
        f"{count['replays']:,} were replays of {count['graphs']:,} graphs over growing requests; "
        f"{count['checked']:,} results checked, {count['wrong']:,} wrong, {count['refused']:,} "
        f"calls refused. {', '.join(f'{n:,} by {name}' for name, n in backends.most_common())}. "
        f"After the first quarter of a run the memory of tensors grew by {grown:,} bytes at most."
    )


failed = not_ok


def run(device: str, seconds: float, progress: Progress, seed: int = 1) -> Iterator[Row]:
    """The rows of a run: its head, then its counts."""
    yield head_row("soak", device, 1)
    soak = Soak(device, seed, progress)
    begin, visits = time.monotonic(), 0
    while visits * STREAMS < len(FORMATS) or time.monotonic() < begin + seconds:
        soak.visit(visits, begin + seconds + GRACE)
        visits += 1
        if soak.memory_before is None and time.monotonic() >= begin + seconds / 4:
            soak.memory_before = soak.memory()
    about = {"commit": Revision.here().commit, "seed": seed}
    yield about | soak.row(visits, time.monotonic() - begin)


class Memory(NamedTuple):
    """Bytes of tensors on the GPU, and resident bytes of this process."""

    tensors: int
    resident: int


class Soak:
    """Counters of a run, and the workspaces of its streams."""

    def __init__(self, device: str, seed: int, progress: Progress) -> None:
        self.kind, self.progress = torch.device(device).type, progress
        self.draw = random.Random(seed)
        size = WORKSPACE_BYTES[self.kind]
        self.workspaces = [
            torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(STREAMS)
        ]
        self.streams = [torch.cuda.Stream(device) if self.on_gpu else None for _ in range(STREAMS)]
        if self.on_gpu:
            torch.cuda.synchronize()
        self.counts: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {"formats": Counter(), "backends": Counter()}
        self.reasons: Counter[str] = Counter()
        self.memory_before: Memory | None = None

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    def visit(self, index: int, until: float) -> None:
        """`STEPS` steps of two new sessions, fewer where `until` (time.monotonic) has passed; a
        refusal ends a session.
        """
        names = list(FORMATS)
        chosen = [names[(STREAMS * index + i) % len(names)] for i in range(STREAMS)]
        sessions = [
            Session(self.draw, form, workspace, stream)
            for form, workspace, stream in zip(chosen, self.workspaces, self.streams, strict=True)
        ]
        if self.on_gpu:
            torch.cuda.synchronize()
        for step in range(STEPS[self.kind]):
            if step and time.monotonic() > until:
                break
            sessions = [session for session in sessions if self._made(session)]
            for session in sessions:
                self._judge(session)
        self.counts["graphs"] += sum(session.graph is not None for session in sessions)

    def _made(self, session: Session) -> bool:
        replayed = session.graph is not None
        try:
            session.step()
        except MlaLabError as error:
            self.counts["refused"] += 1
            self._say(session, str(error))
            return False
        self.counts["calls"] += 1
        self.counts["replays"] += replayed
        return True

    def _judge(self, session: Session) -> None:
        outcome = session.outcome()
        self.counts["checked"] += 1
        self.by["formats"][session.form] += 1
        self.by["backends"][session.backend] += 1
        if outcome.status != "ok":
            self.counts["wrong"] += 1
            self._say(session, outcome.reason)

    def _say(self, session: Session, reason: str) -> None:
        words = f"{session.form}, {session.backend}, {session.problem}: {reason}"
        self.reasons[words[:400]] += 1
        self.progress(words)

    def memory(self) -> Memory:
        """Memory that is in use now."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return Memory(torch.cuda.memory_allocated() if self.on_gpu else 0, pages * 4096)

    def row(self, visits: int, seconds: float) -> Row:
        """Counts of the run; status "ok" if calls ran, all results are right and memory does not
        grow.
        """
        after = self.memory()
        before = after if self.memory_before is None else self.memory_before
        counts = {name: self.counts[name] for name in COUNTS}
        flat = after.tensors <= before.tensors + FLAT_BYTES
        fine = flat and not counts["wrong"] and 0 < counts["checked"] == counts["calls"]
        return {
            "kind": "case",
            "status": "ok" if fine else "wrong",
            "seconds": round(seconds, 1),
            "sessions": visits * STREAMS,
            **counts,
            **{name: dict(counter) for name, counter in self.by.items()},
            "memory_before": before._asdict(),
            "memory_after": after._asdict(),
            "flat": flat,
            "reasons": dict(self.reasons.most_common(10)),
        }
