"""Decode context parallel by torch.distributed: correctness against one device, and times.

Each rank holds the tokens rank, rank + world, ... of each request. A step is our call with lse on
them, an all-gather of lses and outs, and the merge in rank order, so that all ranks have the same
bits. NCCL with a GPU a rank, gloo on a CPU. A row holds one device's whole call, the forms of the
step (`_steps`), and its parts alone; each time is that of the slowest rank. The forms take turns in
every round, so that a drift of the clocks meets all.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ..api import contract
from ..api.context_parallel import Done, Gathering, gather_and_merge, shard_of, start_gather
from ..api.peer_memory import PeerMemory
from ..core import files
from ..core.errors import InvalidInput, Unsupported, invalid
from ..core.problem import Problem
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.tolerance import lse_error, rel_error
from .environment import environment

#: relative to one device's result: bf16 outs of the ranks, and fp32 lses
OUT_LIMIT, LSE_LIMIT = 1e-2, 1e-4
WARMUPS, ROUNDS = 3, 21
#: calls between two events, over as many copies of the cache as exceed the L2
REPEATS = 8
COLD_BYTES = 240_000_000

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RankCases:
    """What to run: every batch size with every length."""

    world: int
    device: str
    batches: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 128
    rounds: int = ROUNDS
    #: times are of CUDA graphs
    graph: bool = False

    def problems(self) -> list[Problem]:
        """The cases in order: by length, then by batch size."""
        return [
            Problem((1,) * batch, (kv_len,) * batch, self.heads, page_size=64)
            for kv_len in self.kv_lens
            for batch in self.batches
        ]


def measure(
    cases: RankCases, out: Path, count: Callable[[int, int], None] = lambda done, total: None
) -> list[dict[str, Any]]:
    """Run all cases in `world` processes; rank 0 appends a row each to `out`. Returns the rows.

    count: called with (cases done, all cases) about once a second.
    Raises InvalidInput where there are fewer GPUs than ranks, and for what cannot be timed.
    """
    if cases.world < 2:
        raise invalid("world", cases.world, "2 or more ranks")
    if cases.device == "cuda" and torch.cuda.device_count() < cases.world:
        raise invalid("world", cases.world, f"up to {torch.cuda.device_count()} GPUs")
    if cases.rounds < 1:
        raise invalid("rounds", cases.rounds, "1 or more")
    if cases.graph and cases.device != "cuda":
        raise invalid("graph", f"True with device {cases.device}", "device cuda")
    check_record(out, "ranks")
    known, total = _lines(out), len(cases.problems())
    with tempfile.TemporaryDirectory() as folder:
        where = (cases, f"file://{folder}/ranks", str(out))
        ranks = spawn(_rank, where, cases.world, join=False)
        while not ranks.join(timeout=1):
            count(_lines(out) - known, total)
    count(_lines(out) - known, total)
    return [json.loads(line) for line in out.read_text().splitlines()[known:]]


def check_record(path: Path, *kinds: str) -> None:
    """Raises for a file that is no record of rows of these kinds, or that cannot be written, before
    the first case.
    """
    if path.exists() and path.stat().st_size:
        try:
            _, first = next(files.lines_of(path, "record"))
            row = files.check(files.parse_json(first, "record"), {"kind": str}, "record")
        except InvalidInput:
            row = {"kind": None}
        if row["kind"] not in kinds:
            got = f"{path}, which holds something else"
            raise invalid("record", got, f"a record of {' and '.join(kinds)}, or none")
    with path.open("ab"):
        pass


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _rank(rank: int, cases: RankCases, where: str, out: str) -> None:
    on_gpu = cases.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1 if not on_gpu else torch.get_num_threads())
    backend = "nccl" if on_gpu else "gloo"
    of_rank: dict[str, Any] = {"rank": rank, "world_size": cases.world}
    if on_gpu:
        of_rank["device_id"] = device
    dist.init_process_group(backend, init_method=where, **of_rank)
    try:
        peers = _peers(cases)
        for problem in cases.problems():
            row = _case(problem, cases, rank, device, peers)
            if rank == 0:
                with Path(out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
    finally:
        dist.destroy_process_group()


def _peers(cases: RankCases) -> PeerMemory | str:
    """Memory for the greatest case, or why there is none."""
    try:
        return PeerMemory(max(cases.batches), cases.heads)
    except Unsupported as error:
        return str(error)


def _case(
    problem: Problem, cases: RankCases, rank: int, device: torch.device, peers: PeerMemory | str
) -> dict[str, Any]:
    """One case: rank 0's whole call, then the steps of all ranks, compared and timed."""
    clock = Clock(device, cases.rounds, cases.graph)
    part, whole, alone_us = _prepare(problem, cases, rank, clock)
    dist.barrier()
    parts = _copies(part, device)
    times, results = clock.medians_us(_steps(parts, peers))
    own = call(part)
    gathered = _waited(start_gather(*own))
    times["own_call_us"], _ = clock.median_us(lambda i: call(parts[i % len(parts)]))
    times["gather_us"], _ = clock.median_us(lambda i: _waited(start_gather(*own)))
    times["merge_us"], _ = clock.median_us(lambda i: gathered.merged())
    if isinstance(peers, PeerMemory):
        exchange = peers
        times["exchange_us"], _ = clock.median_us(lambda i: gather_and_merge(*own, peers=exchange))
    times = _slowest(times, cases.world)
    row: dict[str, Any] = {"kind": "ranks", "time": datetime.now(UTC).isoformat(timespec="seconds")}
    row |= {"world": cases.world, "batch": len(problem.kv_lens)}
    row |= {"kv_len": problem.kv_lens[0], "heads": problem.heads, "graph": cases.graph}
    row |= {"alone_us": alone_us, **times}
    row["same_bits"] = all(_same(result, cases.world) for result in results.values())
    if isinstance(peers, str):
        row["no_peers"] = peers
    row["environment"] = environment(device)
    row["cards"] = _cards(device, cases.world)
    if whole is not None:
        row |= _errors(results, whole)
        row["ok"] = (
            row["out_error"] < OUT_LIMIT and row["lse_error"] < LSE_LIMIT and row["same_bits"]
        )
    return row


def _prepare(
    problem: Problem, cases: RankCases, rank: int, clock: Clock
) -> tuple[DecodeInputs, Result | None, float]:
    """The rank's part; on rank 0 also the whole call's result and time, us."""
    inputs = make_inputs(problem, 0, ["lse"], device=clock.device, workspace_bytes=128 << 20)
    whole, alone_us = None, 0.0
    if rank == 0:
        whole = call(inputs)
        every = _copies(inputs, clock.device)
        alone_us, _ = clock.median_us(lambda i: call(every[i % len(every)]))
    return shard_of(inputs, cases.world, rank), whole, alone_us


def _copies(inputs: DecodeInputs, device: torch.device) -> list[DecodeInputs]:
    """The call and others over copies of its cache: together more than the L2 can hold."""
    count = min(REPEATS, -(-COLD_BYTES // inputs.kv_cache.nbytes)) if device.type == "cuda" else 1
    others = [replace(inputs, kv_cache=inputs.kv_cache.clone()) for _ in range(count - 1)]
    return [inputs, *others]


def call(inputs: DecodeInputs) -> Result:
    """out and lse of one rank's own call, or of the whole one."""
    result: Any = contract.trtllm_batch_decode_with_kv_cache_mla(**inputs.contract_args())
    return result


def _waited(gathering: Gathering) -> Gathering:
    """Its results, after the current stream's wait."""
    for work in gathering.works:
        work.wait()
    return replace(gathering, works=(Done(), Done()))


def _steps(
    parts: list[DecodeInputs], peers: PeerMemory | str
) -> dict[str, Callable[[int], Result]]:
    """The forms of a step: `gather_and_merge` after the call; the same through peer memory, where
    there is any; and, from two requests on, the second half of the batch attended while the first
    half's results travel.
    """

    def in_order(i: int) -> Result:
        return gather_and_merge(*call(parts[i % len(parts)]))

    forms: dict[str, Callable[[int], Result]] = {"in_order_us": in_order}
    if isinstance(peers, PeerMemory):
        memory = peers
        forms["peers_us"] = lambda i: gather_and_merge(*call(parts[i % len(parts)]), peers=memory)
    if parts[0].problem.batch < 2:
        return forms
    cut = parts[0].problem.batch // 2
    halves = [(_requests(part, 0, cut), _requests(part, cut, None)) for part in parts]

    def in_halves(i: int) -> Result:
        first, second = (start_gather(*call(half)) for half in halves[i % len(halves)])
        ends = zip(first.merged(), second.merged(), strict=True)
        out, lse = (torch.cat(end) for end in ends)
        return out, lse

    return forms | {"halves_us": in_halves}


def _requests(inputs: DecodeInputs, begin: int, end: int | None) -> DecodeInputs:
    """The call of the requests begin to end, over the same cache."""
    some, problem = slice(begin, end), inputs.problem
    of_all = inputs.causal_seqlens_kv_global
    return replace(
        inputs,
        problem=replace(problem, q_lens=problem.q_lens[some], kv_lens=problem.kv_lens[some]),
        query=inputs.query[some],
        block_tables=inputs.block_tables[some],
        seq_lens=inputs.seq_lens[some],
        causal_seqlens_kv_global=None if of_all is None else of_all[some],
    )


def _slowest(times: dict[str, float], world: int) -> dict[str, float]:
    """Of each time the greatest of all ranks."""
    every = _of_all(times, world)
    return {name: max(of_rank[name] for of_rank in every) for name in times}


def _of_all(own: Any, world: int) -> list[Any]:
    """Each rank's `own`, in the order of ranks."""
    every: list[Any] = [None] * world
    dist.all_gather_object(every, own)
    return every


def _same(result: Result, world: int) -> bool:
    """Whether all ranks have the same bits."""
    raw = b"".join(
        tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in result
    )
    return len(set(_of_all(hashlib.sha256(raw).hexdigest(), world))) == 1


def _cards(device: torch.device, world: int) -> list[str]:
    """Name and UUID of each rank's card."""
    own = "CPU"
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        own = f"{found.name}, GPU-{found.uuid}"
    return _of_all(own, world)


def _errors(results: dict[str, Result], whole: Result) -> dict[str, float]:
    """The greatest errors of all forms, against one device's result."""
    found = list(results.values())
    expected, expected_lse = whole[0].double(), whole[1].double()
    return {
        "out_error": max(rel_error(out.view(expected.shape), expected) for out, _ in found),
        "lse_error": max(lse_error(lse.view(expected_lse.shape), expected_lse) for _, lse in found),
    }


@dataclass(frozen=True)
class Clock:
    """Times of calls that every rank makes equally often."""

    device: torch.device
    rounds: int
    graph: bool

    def median_us(self, step: Callable[[int], Any]) -> tuple[float, Any]:
        """Median time of a call, us, and the last result."""
        times, results = self.medians_us({"": step})
        return times[""], results[""]

    def medians_us(
        self, steps: dict[str, Callable[[int], Any]]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Of each step the median time of a call, us, and the last result; steps take turns.

        On a GPU `REPEATS` calls, numbered from 0, lie between two events, as launches or as one
        graph.
        """
        ready = {name: self._ready(step) for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARMUPS + self.rounds):
            for name, (replay, _) in ready.items():
                times[name].append(self._one_us(replay))
        medians = {name: statistics.median(each[WARMUPS:]) for name, each in times.items()}
        results = {name: _kept(last) for name, (_, last) in ready.items()}
        return {name: round(median, 2) for name, median in medians.items()}, results

    def _ready(self, step: Callable[[int], Any]) -> tuple[Callable[[], Any], Any]:
        """What a round repeats, and the result that it leaves."""
        if self.device.type != "cuda":
            return lambda: step(0), step(0)

        def run() -> Any:
            return [step(i) for i in range(REPEATS)][-1]

        last = run()
        if not self.graph:
            return run, last
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            last = run()
        return graph.replay, last

    def _one_us(self, replay: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            replay()
            return 1e6 * (time.perf_counter() - begin)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / REPEATS


def _kept(last: Any) -> Any:
    """A copy of a result that later calls write over."""
    return tuple(tensor.clone() for tensor in last) if isinstance(last, tuple) else None
