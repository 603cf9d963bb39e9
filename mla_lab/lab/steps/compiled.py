"""A step's module compiled: once, into the cache of kernels, by its text and what it imports.

A prebuilt folder ($MLA_LAB_PREBUILT) comes first, as for shipped kernels: a GPU host without the
DSL launches the steps that were compiled elsewhere.
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from ...core.errors import MlaLabError
from ...emulate.user_kernel import FUNCTION, build, built
from ...jit import Artifact
from ...jit.build import manifest_versions, prebuilt_caches
from ...jit.cache import Cache
from ...jit.cubin import read_resources
from ...jit.toolchain import cute_versions
from ...plan.config import KernelConfig
from ...xray import KernelReport, inspect
from .catalogue import FOLDER

ARCH = "sm_90a"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: where in a step's file of the cache: of no use to a reader
_PLACE = re.compile(r'\("[^"]*step_\d+\.py":\d+:\d+\)')


class DoesNotCompile(MlaLabError):
    """The DSL refuses a step; the message is its first sentence."""


@dataclass(frozen=True)
class Compiled:
    """Files of a compiled step."""

    number: str
    folder: Path
    needs: tuple[str, ...]

    @property
    def artifact(self) -> Artifact:
        """As other tools take it."""
        return Artifact(
            config=KernelConfig(f"step/{self.number}"),
            arch=ARCH,
            folder=self.folder,
            functions=(FUNCTION,),
            needs=self.needs,
            resources=tuple(read_resources((self.folder / "kernel.cubin").read_bytes())),
            toolchain={},
        )

    @property
    def xray(self) -> KernelReport:
        """Registers, spills and instructions of its one kernel."""
        return inspect(self.artifact).kernels[0]

    def emulated(self) -> Any:
        """Its emulated kernel."""
        return built(self.folder)


@cache
def _imported() -> bytes:
    """Text of everything that steps import."""
    common = FOLDER.parent / "common" / "ptx_sm90.py"
    return b"".join(path.read_bytes() for path in (*sorted(FOLDER.glob("*.py")), common))


def entry_name(number: str, text: str, args: tuple[Any, ...], versions: dict[str, str]) -> str:
    """Name of a step's entry in a cache of kernels; `versions` are those of its compilers."""
    around = hashlib.sha256(repr(sorted(versions.items())).encode() + _imported()).hexdigest()
    facts = "\0".join([number, text, _signature(args), around])
    return f"step-{number}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _prebuilt(number: str, text: str, args: tuple[Any, ...]) -> Compiled | None:
    """The step out of a prebuilt folder, which has the versions of its compilers."""
    for place in prebuilt_caches(ARCH):
        versions = manifest_versions(place, "cute/step")
        name = entry_name(number, text, args, versions) if versions else ""
        found: Any = place.find(name) if name else None
        if found:
            return Compiled(number, place.root / name, tuple(found["needs"]))
    return None


def _signature(args: tuple[Any, ...]) -> str:
    """What of the arguments is compiled in: dtypes, shapes, strides, kinds of numbers."""
    return repr(
        [
            (str(a.dtype), tuple(a.shape), a.stride()) if isinstance(a, Tensor) else type(a)
            for a in args
        ]
    )


def compile_step(number: str, text: str, args: tuple[Any, ...]) -> Compiled:
    """Compile a step's text for arguments like these, or find it in the cache.

    Raises DoesNotCompile with the compiler's words.
    """
    prebuilt = _prebuilt(number, text, args)
    if prebuilt:
        return prebuilt
    name, cache = entry_name(number, text, args, cute_versions()), Cache()

    def make(folder: Path) -> dict[str, object]:
        path = folder / f"step_{number}.py"
        path.write_text(text, encoding="utf-8")
        try:
            return {"needs": build(_module(path, name).launch, args, folder, ARCH)}
        except MlaLabError:
            raise
        except Exception as error:  # whatever the DSL or the reader's functions raise
            raise DoesNotCompile(_sentence(error)) from error
        finally:
            sys.modules.pop(name, None)

    found: Any = cache.find(name) or cache.build(name, make, waiting=lambda: None)
    return Compiled(number, cache.root / name, tuple(found["needs"]))


def _module(path: Path, name: str) -> ModuleType:
    """A step's file as a module, without bytecode beside it: a cache entry holds files alone."""
    module = ModuleType(name)
    module.__file__ = str(path)
    # the DSL looks names up in the module that a function names
    sys.modules[name] = module
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    exec(code, vars(module))
    return module


def _sentence(error: Exception) -> str:
    """The first line of an error that says something, and the next where it ends in a colon."""
    lines = [_COLOURS.sub("", line).strip() for line in str(error).splitlines()]
    said = [_PLACE.sub("", line).removeprefix("error:").strip() for line in lines if line]
    first = said[0] if said else "no message"
    if first.endswith(":") and len(said) > 1:
        first += f" {said[1]}"
    return f"{type(error).__name__}: {first[:300].rstrip('.')}"
