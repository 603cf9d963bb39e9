"""A recorder of calls: each distinct one of a running program is written once.

It is called where a call is checked in full, which happens once for equal shapes; a replayed call
costs nothing more. What cannot be written is logged once, and the program goes on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from ...api import decode, replay
from ...call.decode_args import DecodeArgs
from ...call.form import Form
from ...core import files
from ...core.errors import MlaLabError
from .definition import OP_TYPE, definition_of, number, sizes_of
from .solution import solution_of

#: names the folder to record into
VARIABLE = "MLA_LAB_TRACE"
#: different reasons that are logged; a program that never stops must not fill its log
MOST_LOGGED = 16

_LOG = logging.getLogger("mla_lab")


class Recorder:
    """Writes definitions, our solutions and workloads below `folder`, each of them once."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        #: names of definitions, and (name, uuid) of workloads, that are written
        self.written: set[str | tuple[str, str]] = set()
        self._lock = Lock()
        self._logged: set[str] = set()

    def __call__(self, args: DecodeArgs, form: Form) -> None:
        """Write the call's definition and sizes where they are not there yet."""
        try:
            with self._lock:
                self._record(args, form)
        except Exception as error:  # whatever it is, the call itself works
            reason = str(error) if isinstance(error, MlaLabError | OSError) else repr(error)
            if reason not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(reason)
                _LOG.warning("a call was not recorded: %s", reason)

    def _record(self, args: DecodeArgs, form: Form) -> None:
        definition = definition_of(args, form)
        name = definition["name"]
        path = self.folder / "definitions" / OP_TYPE / f"{name}.json"
        if name not in self.written:
            _write(path, definition)
            solution = solution_of(definition, args, form)
            path = self.folder / "solutions" / OP_TYPE / name / f"{solution['name']}.json"
            _write(path, solution)
            self.written.add(name)
        workload = self._workload(definition, sizes_of(args, form), args)
        key = (name, workload["uuid"])
        path = self.folder / "workloads" / OP_TYPE / f"{name}.jsonl"
        if key in self.written or _holds(path, workload["uuid"]):
            self.written.add(key)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"definition": name, "workload": workload, "solution": None, "evaluation": None}
        with path.open("ab") as appended:
            files.lock(appended.fileno(), wait=True)
            files.append(appended.fileno(), f"{json.dumps(row, default=_plain)}\n".encode())
        self.written.add(key)

    @staticmethod
    def _workload(
        definition: dict[str, Any], sizes: dict[str, int], args: DecodeArgs
    ) -> dict[str, Any]:
        """Sizes, scalars as they were, tensors to be made anew."""
        inputs: dict[str, Any] = {name: {"type": "random"} for name in definition["inputs"]}
        for name, entry in definition["inputs"].items():
            if entry["shape"] is None:
                inputs[name] = {"type": "scalar", "value": number(getattr(args, name))}
        identity = json.dumps([definition["name"], sizes])  # scalars follow values, not shapes
        return {"uuid": str(uuid5(NAMESPACE_URL, identity)), "axes": sizes, "inputs": inputs}


@contextmanager
def recording(folder: Path | str) -> Iterator[Recorder]:
    """Record the calls of a `with` block, in every thread, below `folder`."""
    recorder = Recorder(folder)
    _start(recorder)
    try:
        yield recorder
    finally:
        decode.OBSERVERS.remove(recorder)


def start_from_environment() -> Recorder | None:
    """Record the whole process below the folder that `MLA_LAB_TRACE` names, if it names one."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    recorder = Recorder(folder)
    _start(recorder)
    return recorder


def _start(recorder: Recorder) -> None:
    decode.OBSERVERS.append(recorder)
    replay.clear()  # calls that were replayed are checked in full once more


def _holds(path: Path, uuid: str) -> bool:
    """Whether an earlier process wrote a workload; the file may be anybody's, in any encoding."""
    return path.exists() and f'"uuid": "{uuid}"'.encode() in path.read_bytes()


def _write(path: Path, value: dict[str, Any]) -> None:
    """A file of JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        file.write(f"{json.dumps(value, indent=2, default=_plain)}\n".encode())


def _plain(value: Any) -> Any:
    """The number of a NumPy or torch scalar, which JSON does not take itself."""
    return value.item() if hasattr(value, "item") else str(value)
