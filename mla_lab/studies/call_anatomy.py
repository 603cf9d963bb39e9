"""Anatomy of calls on a GPU: `python -m mla_lab.studies.call_anatomy OUT`.

Appends rows of `data/runtime/anatomy.schema.json`: for our kernels the phases of a call and spans
of its CTAs from stamped builds, for `cute/keep_ab_sm90` the KV tiles of one CTA, and for peers'
kernels their times by a profiler. Stamped builds are not in a bundle; `--builds` lists those
to compile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import backends
from ..api import decode
from ..backends.cute.launch import Launch as OwnLaunch
from ..bench import stamps
from ..bench.cases import Case, uniform_case
from ..bench.checks import compare
from ..bench.kernel_times import kernel_spans
from ..bench.peers import select
from ..bench.peers.ours import prepared_launch
from ..bench.rotation import Rotation, make_rotation
from ..bench.timers import CudaGraphTimer, Launch, Replay
from ..call.decode_args import native_args
from ..core.errors import MlaLabError, unsupported
from ..core.gpu import H200, Gpu
from ..core.revision import Revision, check_record
from ..plan import KernelConfig, Plan, choose
from ..reference.inputs import DecodeInputs

SCHEMA = "anatomy/1"
#: (batch, heads, cached tokens): one short request, one long request, medium batches, compute-bound
SHAPES = (
    (1, 16, 1024),
    (1, 16, 8192),
    (1, 128, 8192),
    (1, 128, 65536),
    (4, 16, 8192),
    (16, 128, 4096),
    (64, 128, 8192),
    (128, 128, 8192),
)
#: cases whose KV tiles are recorded, and whose CTAs
ROLES_OF, CTAS_OF = "b128_q1_h128_kv8192", ("b1_q1_h128_kv8192", "b64_q1_h128_kv8192")
PEERS = ("flashmla",)
#: replays for the plain time and for stamps, and calls of a replay whose stamps are read
ROUNDS, REPLAYS, CALLS = 9, 9, 24
METHOD = (
    "global timer in the kernel, means over CTAs and over the middle half of the calls of a CUDA "
    "graph; a call begins when the last CTA of the one before it has ended"
)


def cases() -> list[Case]:
    """Calls whose phases are measured."""
    return [uniform_case(batch, 1, heads, kv_len, "anchor") for batch, heads, kv_len in SHAPES]


def plan_of(case: Case, gpu: Gpu) -> Plan:
    """The plan of a step with known lengths."""
    from ..backends.cute.families import costs

    return choose(case.problem, gpu, costs=costs()).plan(case.problem)


def stamped_build(config: KernelConfig, kind: int) -> KernelConfig:
    """`config` with profiling stamps; kind 2 also records the KV tiles of CTA 0."""
    return replace(config, options=(*config.options, ("stamps", kind)))


def builds() -> list[KernelConfig]:
    """Every configuration that a record needs: plain, stamped, and that of a call without a plan,
    which the backend selects before it reads a plan."""
    from ..backends.cute.families import complete, costs
    from ..call.form import Features

    found: dict[KernelConfig, None] = {}
    for case in cases():
        alone = choose(case.problem, H200, costs=costs(), on_device=True).config
        planned = plan_of(case, H200).config or alone
        alone, config = (complete(c, case.problem, None, Features()) for c in (alone, planned))
        kinds = (1, 2) if case.name == ROLES_OF else (1,)
        found |= dict.fromkeys([alone, config, *(stamped_build(config, kind) for kind in kinds)])
    return list(found)


class Stamped:
    """Stamped launches of one case; each launch of the graph has its own stamps."""

    def __init__(self, rotation: Rotation, plan: Plan, kind: int) -> None:
        self.launches: list[Launch] = []
        self.words: list[Tensor] = []
        for i in rotation.order():
            self._add(rotation.copies[i], plan, kind)
        pairs = zip(self.launches, (rotation.expected[i] for i in rotation.order()), strict=True)
        objection = compare((run(), expected) for run, expected in pairs).objection(rotation.case)
        if objection:
            raise unsupported(f"{rotation.case.name}, stamped", objection, "a right result")
        self.replay = CudaGraphTimer().ready(self.launches)

    def _add(self, inputs: DecodeInputs, plan: Plan, kind: int) -> None:
        arguments = inputs.contract_args()
        shape = (*inputs.query.shape[:-1], inputs.kv_lora_rank)
        out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=inputs.query.device)
        call, backend = decode.prepare(native_args(**arguments, out=out, plan=plan, backend="cute"))
        gpu = backends.gpu_of(out.device) or H200
        workspace = decode.allocate(call, decode.make_plan(call, backend))
        launch = OwnLaunch.of(call, plan, workspace, gpu)
        self.config = launch.config
        self.marks = stamps.MARKS[launch.config.kernel]
        #: the KV tiles of CTA 0 follow the CTAs' rows
        self.ctas = plan.num_workers * launch.config.cluster
        rows = self.ctas + stamps.ROUNDS
        words = torch.zeros(rows, self.marks.words, dtype=torch.int64, device=out.device)
        stamped = launch.stamped(stamped_build(launch.config, kind), words)

        def run() -> Tensor:
            stamped(call.args, call.out, call.lse)
            return out

        self.launches.append(run)
        self.words.append(words)

    def take(self) -> list[np.ndarray]:
        """Stamps [CTAs, words] of the first launches of a replay."""
        self.replay()
        return [words[: self.ctas].cpu().numpy() for words in self.words[:CALLS]]

    def take_rounds(self) -> np.ndarray:
        """Stamps of CTA 0's KV tiles in a replay's last launch."""
        self.replay()
        return self.words[-1][self.ctas :].cpu().numpy()


def us_of(launches: Sequence[Launch], order: Sequence[int]) -> tuple[float, Replay]:
    """Microseconds a call as `bench run` times it, median of rounds of one graph; the graph."""
    for launch in launches:  # kernels must be loaded before a capture
        launch()
    replay = CudaGraphTimer().ready([launches[i] for i in order])
    for _ in range(2):
        replay()
    return median(replay() / len(order) for _ in range(ROUNDS)), replay


def own_rows(rotation: Rotation) -> list[dict[str, Any]]:
    """Phases of our call; where recorded, spans of its CTAs and the KV tiles of one CTA."""
    case = rotation.case
    plan = plan_of(case, backends.gpu_of(rotation.device) or H200)
    plain = [prepared_launch(copy, case, plan, "cute") for copy in rotation.copies]
    plain_us, _ = us_of(plain, rotation.order())
    run = Stamped(rotation, plan, 1)
    run.take()
    taken = [run.take() for _ in range(REPLAYS)]
    means = sorted((stamps.mean_phases(calls, run.marks) for calls in taken), key=lambda m: m[0])
    call_ns, phases = means[len(means) // 2]
    head = {"case": case.name, "peer": "mla-lab", "kernel": run.config.name()}
    rows: list[dict[str, Any]] = [
        {
            **head,
            "kind": "phases",
            "call_us": round(call_ns / 1e3, 3),
            "plain_us": round(plain_us, 3),
            "phases": [[name, round(ns)] for name, ns in phases.items()],
            "method": METHOD,
        }
    ]
    if case.name in CTAS_OF:
        ns = stamps.cta_spans(taken[-1][1], run.marks)
        rows.append({**head, "kind": "spans", "lanes": "CTA", "ns": ns})
    if case.name == ROLES_OF:
        ghz, ns = stamps.role_spans(Stamped(rotation, plan, 2).take_rounds())
        more = {"lanes": "role", "clock_ghz": round(ghz, 4), "ns": ns}
        rows.append({**head, "kind": "spans", **more})
    return rows


def peer_row(rotation: Rotation, peer: str) -> dict[str, Any]:
    """Phases of a peer's call by a profiler: its kernels and the gaps between them."""
    launches = select([peer])[0].prepare(rotation).launches
    call_us, replay = us_of(launches, rotation.order())
    spans = kernel_spans(replay, len(rotation.order()))
    return {
        "case": rotation.case.name,
        "peer": peer,
        "kernel": " + ".join(_short(name) for name in spans.names),
        "kind": "phases",
        "call_us": round(call_us, 3),
        "kernels_us": [round(us, 2) for us in spans.kernels_us],
        "phases": outside_phases(call_us, spans.kernels_us, spans.gaps_us),
        "method": "kernels by the profiler, mean over the calls of a CUDA graph; where one starts "
        "under the one before it, the later counts for what is left of the call, else launch does",
    }


def _short(name: str) -> str:
    """A kernel's name without its return type, namespaces, template and arguments."""
    return name.split("<")[0].split("(")[0].split("::")[-1].split(" ")[-1]


def outside_phases(
    call_us: float, kernels_us: Sequence[float], gaps_us: Sequence[float]
) -> list[list[Any]]:
    """[phase, ns] of a call: the first kernel is the loop, later ones are the merge.

    In a graph a kernel may overlap with its predecessor, so that the sum of all kernels may exceed
    the call (as may a single one, which the profiler slows down). Then there is no gap, and the
    excess is subtracted from the last kernels, which waited.
    """
    loop = min(kernels_us[0], call_us)
    merge = min(sum(kernels_us[1:]), call_us - loop)
    gap = min(sum(gaps_us), call_us - loop - merge)
    launch = call_us - loop - gap - merge
    found = [("launch", launch), ("loop", loop), ("gap", gap), ("merge", merge)]
    return [[name, round(1e3 * us)] for name, us in found if us > 0]


def main(arguments: Sequence[str]) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.studies.call_anatomy")
    parser.add_argument("out", type=Path, nargs="?", help="JSON lines, appended to")
    parser.add_argument("--only", nargs="*", default=(), help="names of cases")
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--builds", action="store_true", help="name the builds, measure nothing")
    args = parser.parse_args(arguments)
    if args.builds:
        sys.stdout.write("".join(f"{config.name()}\n" for config in builds()))
        return 0
    if Gpu.here() is None or args.out is None:
        raise unsupported("anatomy", "no GPU, or no file to write", "OUT, on an NVIDIA H200")
    check_record(args.out)
    common = {
        "schema": SCHEMA,
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": Revision.here().commit or "unknown",
    }
    for case in cases():
        if not args.only or case.name in args.only:
            for row in rows_of(case, args.peers):
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**common, **row}) + "\n")
    return 0


def rows_of(case: Case, peers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of one case, with a printed line each; a peer that cannot run prints its reason."""
    rotation = make_rotation(case, device="cuda")
    for who in ("mla-lab", *peers):
        try:
            rows = own_rows(rotation) if who == "mla-lab" else [peer_row(rotation, who)]
        except (MlaLabError, RuntimeError, ImportError) as error:
            sys.stdout.write(f"{case.name}, {who}: {type(error).__name__}: {error}\n")
            continue
        sys.stdout.write("".join(_line(row) + "\n" for row in rows if row["kind"] == "phases"))
        sys.stdout.flush()
        yield from rows


def _line(row: dict[str, Any]) -> str:
    plain = f" ({row['plain_us']:.2f} without stamps)" if "plain_us" in row else ""
    phases = ", ".join(f"{name} {ns / 1e3:.2f}" for name, ns in row["phases"])
    return f"{row['case']}, {row['peer']}: {row['call_us']:.2f} us{plain}: {phases}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
