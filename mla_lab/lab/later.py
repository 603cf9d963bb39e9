"""Modules that load at the first use of what is in them."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

#: special attributes that a user of a module asks for. Others are looked for in all modules there
#: are, by `inspect.getmodule` as torch is imported
_SPECIAL = ("__all__", "__path__")


class _Later(ModuleType):
    """A module that is not loaded yet; importing it takes none of its attributes."""

    def __getattr__(self, attribute: str) -> Any:
        """An attribute of the module, which is loaded for it; its version from the installation."""
        name = self.__name__
        if attribute == "__version__":
            try:
                return version(name)
            except PackageNotFoundError:
                raise AttributeError(attribute) from None
        if attribute.startswith("__") and attribute not in _SPECIAL:
            raise AttributeError(attribute)
        if sys.modules.get(name) is self:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)


def load_later(name: str) -> None:
    """Make `import NAME` load the module once an attribute of it is read; nothing happens where it
    is loaded or not installed.

    For what another package imports and hardly uses: plotly asks nbformat for its version where a
    figure shows itself, and nbformat's grammars take a second of each notebook's start.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        module = _Later(name)
        module.__spec__, module.__file__ = spec, spec.origin
        sys.modules[name] = module
