"""Where kernels/ and data/ are: at the top of a checkout, or inside an installed wheel.

MLA_LAB_DATA names another folder of data, such as one that `mla-lab live` has just refreshed.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import BuildError, invalid

#: names the other folder of data
VARIABLE = "MLA_LAB_DATA"

_PACKAGE = Path(__file__).resolve().parent.parent


def _resource_dir(name: str) -> Path:
    # a wheel has its copy inside the package (pyproject.toml, force-include); a checkout has none
    for path in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if path.is_dir():
            return path
    raise BuildError(
        f"{name}/: got an installation without it; supported: a checkout, or a wheel built from one"
    )


def kernels_dir() -> Path:
    """CUDA C++ sources, one folder a kernel. Raises BuildError where the installation has none."""
    return _resource_dir("kernels")


def own_data_dir() -> Path:
    """`data/` of this checkout or wheel. Raises BuildError as `kernels_dir`."""
    return _resource_dir("data")


def data_dir() -> Path:
    """The folder that `MLA_LAB_DATA` names, else `own_data_dir`. Raises InvalidInput where it names
    no such folder.
    """
    other = os.environ.get(VARIABLE)
    if not other:
        return own_data_dir()
    if not (Path(other) / "runtime").is_dir():
        supported = "a folder of data, such as `mla-lab live --into` makes: it has runtime/"
        raise invalid(VARIABLE, repr(other), supported)
    return Path(other)
