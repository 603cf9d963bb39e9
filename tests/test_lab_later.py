"""A module that plotly imports and does not use costs a notebook's start nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .house import ROOT


def printed(code: str) -> list[str]:
    """Words that a fresh process prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


PICTURES = "import sys; from mla_lab import lab; from mla_lab.lab import style\n"


@pytest.mark.parametrize(
    ("before", "use"),
    [
        ("import torch\n", "import nbformat; nbformat.from_dict"),  # torch looks at all modules
        ("", "from nbformat.v4 import new_notebook"),
    ],
)
def test_nbformat_is_loaded_once_it_is_used(before: str, use: str) -> None:
    loaded = "print('nbformat.v4' in sys.modules)\n"
    code = f"{PICTURES}{before}{loaded}{use}\n{loaded}import nbformat; print(nbformat.__file__)"
    said = printed(code)
    assert said[:2] == ["False", "True"] and said[2].endswith("__init__.py")


def test_the_version_loads_nothing() -> None:
    asked = "import nbformat; print(nbformat.__version__, 'nbformat.v4' in sys.modules)\n"
    said, loaded, then = printed(
        f"{PICTURES}{asked}import nbformat.v4; print(nbformat.__version__)"
    )
    assert (said, loaded) == (then, "False")


def test_what_is_not_there_stays_away() -> None:
    code = "from mla_lab.lab.later import load_later; load_later('nowhere')\ntry: import nowhere\n"
    assert printed(code + "except ModuleNotFoundError as error: print(error.name)") == ["nowhere"]
