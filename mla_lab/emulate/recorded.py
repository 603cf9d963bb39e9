"""Recorded calls: a build's PTX and the launches of one call, for hosts without any compiler.

Recordings are members of one zip archive, each JSON: the build's configuration, the problem, the
seed of its inputs, the PTX, and each launch as host code made it. Inputs are made anew from the
seed, and lie at the same addresses, so that the recorded parameters fit.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import invalid, unsupported
from ..core.problem import Problem
from ..core.resources import data_dir
from ..jit import Artifact
from ..plan.config import KernelConfig
from .calls import Call, make_call
from .device import Device
from .host import DeviceTensor
from .kernel import EmulatedKernel, Options
from .machine import Launch
from .ptx import shorten

#: bytes of a tensor map, of which the second half holds nothing
MAP_BYTES, MAP_USED = 128, 64
SUFFIX = ".json"
ARCHIVE = "runtime/emulate_calls.zip"


@dataclass(frozen=True)
class Recording:
    """One call of one build."""

    config: KernelConfig
    problem: Problem
    splits: int
    seed: int
    function: str
    text: str
    #: (offset, shape) of each tensor
    tensors: tuple[tuple[int, tuple[int, ...]], ...]
    calls: tuple[Launch, ...]

    @property
    def name(self) -> str:
        """The build's name."""
        return self.config.name()

    def call(self, scale: float | None = None) -> Call:
        """The inputs, the arguments and what must come out, by another scale if one is given (see
        `make_call`)."""
        return make_call(self.config, self.problem, self.splits, self.seed, scale=scale)

    def kernel(self, options: Options | None = None) -> EmulatedKernel:
        """The kernel, for exactly this call."""
        return EmulatedKernel(self.text, self.function, self, options)

    def launches(
        self, function: str, args: Sequence[Any], sizes: dict[str, list[int]]
    ) -> list[Launch]:
        """The recorded launches, if the tensors are those of the recorded call."""
        if function != self.function or _tensors(args) != self.tensors:
            raise unsupported("arguments", "another call than the recorded one", "Recording.call")
        return list(self.calls)

    def save(self, archive: Path) -> None:
        """Write the recording into an archive, in place of an earlier one of the build."""
        facts = {
            "config": self.config.as_dict(),
            "problem": asdict(self.problem),
            "splits": self.splits,
            "seed": self.seed,
            "function": self.function,
            "tensors": self.tensors,
            "launches": [pack_launch(launch) for launch in self.calls],
            "ptx": self.text,
        }
        if archive.exists() and not zipfile.is_zipfile(archive):
            raise invalid("archive", str(archive), "a ZIP archive of recordings, or none")
        members = {name: _read(archive, name) for name in recordings(archive=archive)}
        members[self.name] = json.dumps(facts)
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as out:
            for name in sorted(members):
                out.writestr(zipfile.ZipInfo(name + SUFFIX), members[name], zipfile.ZIP_LZMA)


def record(artifact: Artifact, problem: Problem, splits: int = 1, seed: int = 0) -> Recording:
    """Record a call of a compiled build. Needs its host code, and a C compiler."""
    call = make_call(artifact.config, problem, splits, seed)
    kernel = EmulatedKernel.of(artifact)
    placed = Device().place(call.args)
    launches = kernel.host.launches(kernel.function, placed, kernel.sizes)
    return Recording(
        artifact.config,
        problem,
        splits,
        seed,
        kernel.function,
        shorten(kernel.text),
        _tensors(placed),
        tuple(_clean(launch) for launch in launches),
    )


def shipped() -> Path:
    """The archive that ships."""
    return data_dir() / ARCHIVE


def recordings(part: str = "", archive: Path | None = None) -> list[str]:
    """Names of an archive's builds that contain `part`, or the one that is `part`."""
    path = archive or shipped()
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as members:
        names = [name.removesuffix(SUFFIX) for name in members.namelist()]
    return [part] if part in names else [name for name in names if part in name]


def _read(archive: Path, name: str) -> str:
    with zipfile.ZipFile(archive) as members:
        return members.read(name + SUFFIX).decode()


def load(name: str, archive: Path | None = None) -> Recording:
    """The recording of a build. Raises InvalidInput where there is none."""
    try:
        facts = json.loads(_read(archive or shipped(), name))
        problem: dict[str, Any] = {k: _tuple(v) for k, v in facts["problem"].items()}
        launches = [unpack_launch(launch) for launch in facts["launches"]]
        return Recording(
            KernelConfig.from_dict(facts["config"]),
            Problem(**problem),
            facts["splits"],
            facts["seed"],
            facts["function"],
            facts["ptx"],
            tuple((offset, tuple(shape)) for offset, shape in facts["tensors"]),
            tuple(launches),
        )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise invalid("recording", f"{name!r} ({error})", recordings(archive=archive)) from error


def pack_launch(launch: Launch) -> dict[str, Any]:
    """A launch as JSON has it."""
    return {**asdict(launch), "params": [p.hex() for p in launch.params]}


def unpack_launch(facts: dict[str, Any]) -> Launch:
    """And back."""
    params = tuple(bytes.fromhex(value) for value in facts["params"])
    return Launch(**{**{k: _tuple(v) for k, v in facts.items()}, "params": params})


def _tensors(args: Sequence[Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    found: list[tuple[int, tuple[int, ...]]] = []
    for arg in args:
        if isinstance(arg, tuple):
            found += _tensors(arg)
        elif isinstance(arg, DeviceTensor):
            found.append((arg.offset, arg.shape))
    return tuple(found)


def _clean(launch: Launch) -> Launch:
    """A launch without the uninitialised bytes that host code leaves in tensor maps."""
    params = [
        p[:MAP_USED] + bytes(MAP_BYTES - MAP_USED) if len(p) == MAP_BYTES else p
        for p in launch.params
    ]
    return Launch(**{**vars(launch), "params": tuple(params)})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
