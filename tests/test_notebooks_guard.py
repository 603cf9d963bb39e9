"""Errors that widgets swallow do not pass: the last cell of a notebook finds them under nbmake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from mla_lab.lab.canonical import canonical

SWALLOWED = {
    "output": "import ipywidgets as w\nfrom IPython.display import display\n"
    "out = w.Output()\ndisplay(out)\nwith out:\n    1 / 0",
    "interactive": "import ipywidgets as w\n"
    "w.interactive(lambda x: 1 / x, x=w.IntSlider(value=0, min=0, max=3))",
}


def notebook(*sources: str) -> str:
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source}
        for i, source in enumerate(sources)
    ]
    return canonical(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5}))


def test_a_swallowed_error_fails_the_notebook(tmp_path: Path) -> None:
    start, finish = 'from mla_lab import lab\nlab.start("00")', "lab.finish()"
    for kind, source in SWALLOWED.items():
        path = tmp_path / kind / "00_swallowed.ipynb"
        path.parent.mkdir()
        path.write_text(notebook(start, source, finish))
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "-p", "no:cacheprovider"]
    # a client was once seen to wait in vain for a message of its kernel
    command += ["--nbmake-timeout=60", f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert f"{len(SWALLOWED)} failed" in done.stdout
    sections = re.split(r"^_+ .*ipynb.* _+$", done.stdout, flags=re.MULTILINE)[1:]
    assert len(sections) == len(SWALLOWED)
    for section in sections:
        assert "WidgetFailed" in section and "division by zero" in section
