"""Empty modules in place of a package that imports name and that no test here calls."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class that has every attribute, and is each of them itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_Anything):
    """What an empty module says that it has."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `package` and all its submodules, empty."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def stand_in(package: str) -> None:
    """From here on `package` is empty, unless it can be imported: its own operators may be built
    for another torch.
    """
    try:
        importlib.import_module(package)
    except Exception:  # whatever its first lines do
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        sys.meta_path.insert(0, Absent(package))
