"""A benchmark run: cases x peers into a record; can be interrupted and resumed."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ..core.errors import DeviceLost, invalid
from . import power
from .cases import Case
from .ceilings import ceilings
from .environment import environment
from .measure import CaseRun, Method
from .peers import Peer
from .records import Key, Record, Row, describe_case, rerun_spread
from .rotation import rotation_bytes_on
from .telemetry import PERIOD_MS, Telemetry, smi_name
from .timers import Timer, timer_for


class Bench:
    """A run: peers on one device with one method, into one record."""

    def __init__(
        self,
        record: Record,
        peers: Sequence[Peer],
        device: torch.device | str,
        method: Method | None = None,
        *,
        timer: Timer | None = None,
        progress: Callable[[str], None] = lambda text: None,
        preflight: Callable[[Sequence[Peer], torch.device], dict[str, str]] | None = None,
    ) -> None:
        self.record = record
        self.peers = peers
        self.device = torch.device(device)
        self.method = method or Method()
        if self.method.rotation_bytes is None:
            self.method = replace(self.method, rotation_bytes=rotation_bytes_on(self.device))
        self.timer = timer or timer_for(self.device)
        self.progress = progress
        #: gets (cases done, all cases)
        self.count: Callable[[int, int], None] = lambda done, total: None
        self.preflight = preflight
        #: peers whose preflight process died, and how; they have a row and are not run
        self.died: dict[str, str] = {}

    def run(self, cases: Sequence[Case], keep_failed: bool = False) -> None:
        """Measure the cases that the record has no result of; with `keep_failed`, failures count as
        results. Raises InvalidInput for a record of another card, or of other cases by these names.

        An early end (Ctrl-C, a lost device) is noted in an `end` row.
        """
        self._check_record(cases)
        missing = {peer.name: peer.available(self.device) for peer in self.peers}
        here = [peer for peer in self.peers if missing[peer.name] is None]
        todo = self._todo(cases, here, keep_failed)
        if todo and self.preflight:
            self.progress("preflight of each peer")
            self.died = self.preflight(here, self.device)
        self.record.append(self._opening(len(todo), missing))
        begin = time.monotonic()
        ended = "interrupted"
        try:
            with Telemetry(self._period_ms(), smi_name(self.device)) as telemetry:
                for number, (case, part, peers) in enumerate(todo, 1):
                    seconds = time.monotonic() - begin
                    self.count(number - 1, len(todo))
                    self.progress(f"{number}/{len(todo)} {case.name} ({seconds:.0f} s)")
                    for row in self._case(case, part, peers, telemetry):
                        self.record.append({**row, "part": part})
            ended = "complete"
        finally:
            self.record.append(
                {
                    "kind": "end",
                    "status": ended,
                    "seconds": time.monotonic() - begin,
                    "ceilings": self._ceilings() if ended == "complete" else None,
                    "rerun_spread": rerun_spread(self.record.rows),
                }
            )

    def _check_record(self, cases: Sequence[Case]) -> None:
        """Raises InvalidInput for a record of another card, and for one in which a case's name
        stands for another problem: its results would count as these."""
        card = _card_of(environment(self.device))
        problems = {case.name: json.dumps(describe_case(case)["problem"]) for case in cases}
        for row in self.record.rows:
            if row["kind"] == "run" and _card_of(row["environment"]) != card:
                got = f"{self.record.path} of {_card_of(row['environment'])}, to continue on {card}"
                raise invalid("record", got, "a record of this card, or a new one")
            name = row.get("case", "") if row["kind"] == "result" else ""
            if name in problems and json.dumps(row["problem"]) != problems[name]:
                got = f"{self.record.path}, where {name} is another problem"
                raise invalid("record", got, "a record of these cases, or a new one")

    def _todo(
        self, cases: Sequence[Case], here: Sequence[Peer], keep_failed: bool
    ) -> list[tuple[Case, int, list[Peer]]]:
        """Cases, the part of the run, and the peers without a result in it; part by part."""
        done = self.record.done(keep_failed)
        todo = []
        for part in range(self.method.parts):
            for case in cases:
                able = self._peers(case, here)
                peers = [p for p in able if Key(case.name, p.name, part) not in done]
                if peers:
                    todo.append((case, part, peers))
        return todo

    def _peers(self, case: Case, here: Sequence[Peer]) -> list[Peer]:
        """Available peers for `case`."""
        return list(here)

    def _opening(self, cases: int, missing: dict[str, str | None]) -> Row:
        return {
            "kind": "run",
            "environment": environment(self.device),
            "method": {**asdict(self.method), "timer": self.timer.name},
            "peers": [_describe_peer(peer, missing[peer.name]) for peer in self.peers],
            "cases": cases,
            "ceilings": self._ceilings(),
        }

    def _period_ms(self) -> int:
        return power.PERIOD_MS if self.method.power else PERIOD_MS

    def _ceilings(self) -> Row | None:
        return ceilings(self.device) if self.method.ceilings else None

    def _case(
        self, case: Case, part: int, peers: Sequence[Peer], telemetry: Telemetry
    ) -> Iterator[Row]:
        """Result rows of one case; clocks and watts are over all its peers together."""
        for peer in peers:
            if peer.name in self.died:
                yield _failed(case, peer, self.died[peer.name])
        begin = time.monotonic()
        run = CaseRun(case, self.method.of_part(part), self.timer, self.device, telemetry)
        try:
            rows = run.rows([peer for peer in peers if peer.name not in self.died])
        except DeviceLost:
            if run.culprit is not None:
                yield run.culprit
            raise
        readings = telemetry.between(begin, time.monotonic())
        if self.device.type == "cuda":
            # free the graphs and pools of a case before the next one allocates its own
            gc.collect()
            torch.cuda.empty_cache()
        yield from ({**row, "telemetry": readings} for row in rows)


def _card_of(found: Row) -> str:
    """The card of an environment, in words."""
    return str((found.get("card") or {}).get("name", "a CPU"))


def _failed(case: Case, peer: Peer, reason: str) -> Row:
    row = {"kind": "result", **describe_case(case), "peer": peer.name}
    return {**row, "status": "failed", "reason": reason}


def _describe_peer(peer: Peer, unavailable: str | None) -> dict[str, Any]:
    version = None if unavailable else peer.version()
    return {"name": peer.name, "version": version, "unavailable": unavailable}
