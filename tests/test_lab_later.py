"""A module that plotly imports and does not use costs a notebook's start nothing."""

from __future__ import annotations

import subprocess
import sys

from .house import ROOT


def printed(code: str) -> list[str]:
    """Words that a fresh process prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


PICTURES = "import sys; from mla_lab import lab; from mla_lab.lab import style\n"


def test_nbformat_is_loaded_once_it_is_used() -> None:
    """Also where torch, which looks at all modules, is imported behind it."""
    loaded = "print('nbformat.v4' in sys.modules)\n"
    use = f"import nbformat; nbformat.from_dict\n{loaded}print(nbformat.__file__)"
    said = printed(f"{PICTURES}import torch\n{loaded}{use}")
    assert said[:2] == ["False", "True"] and said[2].endswith("__init__.py")


def test_the_version_loads_nothing_and_a_submodule_does() -> None:
    asked = "import nbformat; print(nbformat.__version__, 'nbformat.v4' in sys.modules)\n"
    use = "from nbformat.v4 import new_notebook; print(nbformat.__version__, nbformat.__file__)"
    said, loaded, then, file = printed(f"{PICTURES}{asked}{use}")
    assert (said, loaded) == (then, "False") and file.endswith("__init__.py")


def test_what_is_not_there_stays_away() -> None:
    code = "from mla_lab.lab.later import load_later; load_later('nowhere')\ntry: import nowhere\n"
    assert printed(code + "except ModuleNotFoundError as error: print(error.name)") == ["nowhere"]
