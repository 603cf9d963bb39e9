"""Timing of one case: interleaved peers, every output checked on the timed inputs.

For each peer: prepare, check the output of every copy, capture the launches as one replay, warm up;
then rounds in which each peer runs once, in another order each. The figure is the median time of a
replay divided by its launches. The output of the last timed replay is copied before anything else
runs, and checked.

Behind another peer's kernels a replay took up to 24 us more than behind its own (H200, 2026-11-26,
commit 27dbeed, 16 requests of 8,192 tokens and 64 heads), as its first launch fetches the kernel's
code: in a fixed order, a peer that follows itself would be spared that. `us_in_step` is what a call
adds to a step in which that happens in every layer (`step_rest`).
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from ..core.errors import DeviceLost, MlaLabError
from .cases import Case
from .checks import compare
from .kernel_times import kernel_times
from .peers import Peer, Prepared
from .power import sustained, worthwhile
from .records import Row, describe_case
from .rotation import MIN_LAUNCHES, WORKSPACE_BYTES, Rotation, make_rotation
from .step_rest import KERNELS, LAYERS, StepRest
from .telemetry import Telemetry
from .timers import Launch, Replay, Timer

#: a peer's power is measured up to this many times the time of the fastest
FAR = 2.5
#: figures of one launch or one plan a round; of the others a round is a whole replay
ISOLATED = "isolated_us"
PER_ROUND = (ISOLATED, "plan_us")
#: what the call adds to a layer of a step, and its rounds at most
IN_STEP, STEP_ROUNDS = "us_in_step", 5


@dataclass(frozen=True)
class Method:
    """Settings of a measurement, part of every record."""

    rounds: int = 9
    warmups: int = 2
    #: untimed replays directly before each timed one, so that caches are in the state of its own
    #: launches, not of another peer's, and the host is ahead of the device
    leads: int = 0
    #: KV bytes in rotation; None: what `rotation_bytes_on` says of the device
    rotation_bytes: int | None = None
    min_launches: int = MIN_LAUNCHES
    workspace_bytes: int = WORKSPACE_BYTES
    #: repetitions of the whole list in one process
    parts: int = 1
    seed: int = 0
    #: in the first part, also time single launches with a cold L2, and calls including their plan
    isolated: bool = True
    planned: bool = True
    #: in the first part, also time the call between other kernels of a step, on a GPU, and which
    in_step: bool = True
    rest: str = KERNELS
    #: time each kernel with the profiler, in a separate run
    kernels: bool = False
    #: measure watts and joules of compute-bound cases under sustained load, for each peer of
    #: similar speed to the fastest
    power: bool = False
    #: measure the ceilings (GEMM, read) before and after
    ceilings: bool = True

    def of_part(self, part: int) -> Method:
        """Settings of one part: parts after the first repeat the headline time alone."""
        if part == 0:
            return self
        return replace(
            self, isolated=False, planned=False, kernels=False, power=False, in_step=False
        )


@dataclass
class Entry:
    """State of one peer in one case; it runs until its row has a status."""

    peer: Peer
    row: Row
    prepared: Prepared | None = None
    replays: dict[str, Replay] = field(default_factory=dict)
    #: microseconds of whole replays by figure
    rounds: dict[str, list[float]] = field(default_factory=dict)
    #: output of the last launch of the last timed replay of "us"
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return "status" not in self.row

    def give_up(self, error: Exception) -> None:
        """End this peer: a refusal with its message, other errors as a failure with their place."""
        self.replays, self.prepared, self.outputs = {}, None, {}
        if isinstance(error, MlaLabError | NotImplementedError):
            self.row.update(status="refused", reason=str(error))
            return
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {str(error)[:500]} ({place.name}, line {place.lineno})"
        self.row.update(status="failed", reason=reason)


class CaseRun:
    """One case against some peers, on one device with one timer."""

    def __init__(
        self,
        case: Case,
        method: Method,
        timer: Timer,
        device: torch.device,
        telemetry: Telemetry | None = None,
        rest: Callable[[int, torch.device], Launch] = StepRest,
    ) -> None:
        self.case = case
        self.method = method
        self.timer = timer
        self.device = device
        self.telemetry = telemetry or Telemetry()
        #: the rest of a layer, and a replay of it alone with its rounds, where that is measured
        self._make_rest = rest
        self._rest: Launch | None = None
        self._alone: Replay | None = None
        self._alone_us: list[float] = []
        #: the row of the peer that lost the device
        self.culprit: Row | None = None

    def rows(self, peers: Sequence[Peer]) -> list[Row]:
        """A result row for each peer, in order. Raises DeviceLost and stores the peer that caused
        it.
        """
        entries = [Entry(peer, self._row(peer)) for peer in peers]
        if any(entry.running for entry in entries):
            self._measure(entries)
        for entry in entries:
            if entry.running:
                entry.row.update(_figures(entry, self.case, self._alone_us))
        return [entry.row for entry in entries]

    def _row(self, peer: Peer) -> Row:
        row = {"kind": "result", **describe_case(self.case), "peer": peer.name}
        reason = peer.refuses(self.case)
        return {**row, "status": "refused", "reason": reason} if reason else row

    def _measure(self, entries: list[Entry]) -> None:
        rotation: Rotation | None = None
        if self.method.in_step and (self.device.type == "cuda" or self._make_rest is not StepRest):
            self._prepare_rest(entries)
        for entry in (e for e in entries if e.running):
            try:
                rotation = rotation or make_rotation(
                    self.case,
                    seed=self.method.seed,
                    device=self.device,
                    rotation_bytes=self.method.rotation_bytes,
                    workspace_bytes=self.method.workspace_bytes,
                )
                self._enter(entry, rotation)
            except Exception as error:
                self._give_up(entry, error)
        order, turn = list(entries), random.Random(self.method.seed)
        # the rest of a step warms the card up, so that its rounds come behind the others
        for in_step in (False, True) if self._alone else (False,):
            for _ in range(min(STEP_ROUNDS, self.method.rounds) if in_step else self.method.rounds):
                turn.shuffle(order)
                if in_step and self._alone is not None:
                    self._alone_us.append(self._alone.repeat(1, 1))
                for entry in order:
                    self._run_round(entry, in_step)
        if rotation is not None:
            for entry in (e for e in entries if e.running):
                self._finish(entry, rotation)
            if self.method.power and worthwhile(self.case.problem):
                self._load([e for e in entries if e.running])

    def _prepare_rest(self, entries: Sequence[Entry]) -> None:
        """The rest of a layer, and its replay; where they have no room, the reason in all notes."""
        try:
            self._rest = self._make_rest(self.case.problem.total_q, self.device)
            self._rest()  # its library must be loaded before a capture
            self._alone = self.timer.ready([self._rest] * LAYERS)
        except torch.OutOfMemoryError as error:
            self._rest = None
            for entry in entries:
                entry.row["notes"] = {"in_step": str(error).splitlines()[0]}

    def _enter(self, entry: Entry, rotation: Rotation) -> None:
        """Prepare a peer, check every copy, capture its replays and warm them up."""
        prepared = entry.peer.prepare(rotation)
        pairs = zip(prepared.launches, rotation.expected, strict=True)
        accuracy = compare((launch(), expected) for launch, expected in pairs)
        entry.row.update(
            asdict(accuracy),
            sdpa_error=rotation.sdpa_error,
            notes=entry.row.get("notes", {}) | dict(prepared.notes),
        )
        objection = accuracy.objection(self.case, rotation.sdpa_error, prepared.allowance)
        if objection:
            entry.row.update(status="wrong", reason=objection)
            return
        order = rotation.order(self.method.min_launches)
        entry.row.update(
            kv_copies=len(rotation.copies),
            kv_rotation_bytes=rotation.kv_bytes,
            launches_per_replay=len(order),
        )
        entry.prepared = prepared
        entry.replays = self._replays(entry, prepared, order)
        for _ in range(self.method.warmups):
            for name, replay in entry.replays.items():
                if name != IN_STEP:
                    replay()

    def _replays(self, entry: Entry, prepared: Prepared, order: list[int]) -> dict[str, Replay]:
        with prepared.captured():
            replays = {"us": self.timer.ready([prepared.launches[i] for i in order])}
            if prepared.other_lengths:
                turns = (prepared.other_lengths, prepared.launches)
                launches = [turns[n % 2][i] for n, i in enumerate(order)]
                replays["us_first_layer"] = self.timer.ready(launches)
            if self._rest is not None:
                layers = [order[n % len(order)] for n in range(LAYERS)]
                step = [f for i in layers for f in (prepared.launches[i], self._rest)]
                replays[IN_STEP] = self.timer.ready(step)
            if self.method.isolated:
                replays[ISOLATED] = self.timer.ready(prepared.launches[:1], cold=True)
        if self.method.planned and prepared.planned_launches:
            first = prepared.planned_launches[0]
            try:
                first()  # kernels must be compiled and loaded before a capture
            except MlaLabError as refusal:
                entry.row["notes"]["planned"] = str(refusal)
                return replays
            launches = [prepared.planned_launches[i] for i in order]
            replays["us_with_plan"] = self.timer.ready(launches)
        return replays

    def _finish(self, entry: Entry, rotation: Rotation) -> None:
        """Check the output of the replay; time the plan where the host makes it."""
        try:
            accuracy = compare([(entry.outputs["us"], rotation.expected[-1])])
            prepared = entry.prepared
            allowance = prepared.allowance if prepared else 0.0
            objection = accuracy.objection(self.case, rotation.sdpa_error, allowance)
            if objection:
                entry.row.update(status="wrong", reason=f"in the timed replay: {objection}")
                return
            if prepared and prepared.plan and self.method.planned:
                rounds = [self.timer.host_us(prepared.plan) for _ in range(self.method.rounds)]
                entry.rounds["plan_us"] = rounds
            if prepared and self.method.kernels:
                entry.row["kernels_us"] = kernel_times(prepared.launches, self.device)
        except Exception as error:
            self._give_up(entry, error)

    def _load(self, entries: Sequence[Entry]) -> None:
        """Measure the power of each peer under sustained load, one after the other."""
        took = {e.peer.name: median(e.rounds["us"]) / e.row["launches_per_replay"] for e in entries}
        within = FAR * min(took.values(), default=0.0)
        for entry in (e for e in entries if took[e.peer.name] <= within):
            replay, launches = entry.replays["us"], entry.row["launches_per_replay"]
            try:
                entry.row["power"] = sustained(replay, launches, self.telemetry)
            except Exception as error:
                self._give_up(entry, error)

    def _run_round(self, entry: Entry, in_step: bool) -> None:
        """One run of each of the peer's replays: of the one `in_step`, or of all the others."""
        try:
            for name, replay in entry.replays.items():
                if in_step != (name == IN_STEP):
                    continue
                rounds = entry.rounds.setdefault(name, [])
                # a replay that evicts the L2 does so itself, directly before its launch
                leads = 0 if name == ISOLATED else 1 if name == IN_STEP else self.method.leads
                rounds.append(replay.repeat(1, leads) if leads else replay())
                if name == "us" and len(rounds) == self.method.rounds:
                    # launches may share one output, which the next replay overwrites
                    entry.outputs[name] = replay.last_output.clone()
        except Exception as error:
            self._give_up(entry, error)

    def _give_up(self, entry: Entry, error: Exception) -> None:
        """End a peer with a reason. Every peer waits for its own work, so an error is its own."""
        entry.give_up(error)
        lost = self.timer.lost()
        if lost:
            self.culprit = entry.row
            entry.row["status"] = "failed"
            raise DeviceLost(f"{entry.peer.name} on {self.case.name}: {lost}") from error


def _figures(entry: Entry, case: Case, alone_us: Sequence[float]) -> Row:
    """Medians and raw rounds, in microseconds a launch (or a plan); `alone_us` are the rounds of a
    step's layers without the call."""
    launches = entry.row["launches_per_replay"]
    rounds = {
        name: [value / (1 if name in PER_ROUND else launches) for value in values]
        for name, values in entry.rounds.items()
        if name != IN_STEP
    }
    if IN_STEP in entry.rounds:
        alone = median(alone_us)
        rounds[IN_STEP] = [(value - alone) / LAYERS for value in entry.rounds[IN_STEP]]
    row: Row = {name: median(values) for name, values in rounds.items()}
    if "plan_us" in row and "us_with_plan" not in row:
        row["us_with_plan"] = row["us"] + row["plan_us"]
    row["rounds"] = rounds
    row["tflops"] = case.problem.flops() / row["us"] / 1e6
    row["tbps"] = case.problem.bytes() / row["us"] / 1e6
    return {"status": "ok", "reason": None, **row}
