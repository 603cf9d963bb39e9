"""Recorded calls: a build's PTX and the launches of one call, for hosts without any compiler.

A recording is JSON under xz: the build's configuration, the problem, the seed of its inputs, the
PTX, and each launch as host code made it. Inputs are made anew from the seed, and lie at the same
addresses, so that the recorded parameters fit.
"""

from __future__ import annotations

import json
import lzma
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
SUFFIX = ".json.xz"


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

    def call(self) -> Call:
        """The inputs, the arguments and what must come out."""
        return make_call(self.config, self.problem, self.splits, self.seed)

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

    def save(self, folder: Path) -> Path:
        """Write the recording; returns its file."""
        facts = {
            "config": self.config.as_dict(),
            "problem": asdict(self.problem),
            "splits": self.splits,
            "seed": self.seed,
            "function": self.function,
            "tensors": self.tensors,
            "launches": [
                {**asdict(launch), "params": [p.hex() for p in launch.params]}
                for launch in self.calls
            ],
            "ptx": self.text,
        }
        path = folder / f"{self.name}{SUFFIX}"
        path.write_bytes(lzma.compress(json.dumps(facts).encode(), preset=9))
        return path


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


def recordings(name: str = "") -> list[Path]:
    """Files of the shipped recordings whose names contain `name`."""
    return sorted(p for p in (data_dir() / "emulate").glob(f"*{SUFFIX}") if name in p.name)


def load(path: Path) -> Recording:
    """A recording from its file. Raises InvalidInput where it is none."""
    try:
        facts = json.loads(lzma.decompress(path.read_bytes()))
        problem: dict[str, Any] = {k: _tuple(v) for k, v in facts["problem"].items()}
        launches = [
            Launch(**{**{k: _tuple(v) for k, v in x.items()}, "params": _params(x["params"])})
            for x in facts["launches"]
        ]
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
    except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise invalid("recording", f"{path} ({error})", "a file that `save` wrote") from error


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


def _params(values: list[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(value) for value in values)
