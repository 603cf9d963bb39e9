"""`mla-lab lab`: how JupyterLab is started, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import jupyterlab
import pytest

from mla_lab import cli

from .house import ROOT


def started(monkeypatch, *options):
    """The command line that the process would become."""
    lines = []
    monkeypatch.setattr(os, "execv", lambda path, line: lines.append((path, line)))
    assert cli.main(["lab", *options]) == 0
    ((path, line),) = lines
    assert path == line[0] == sys.executable
    return line


def test_this_machine_only_and_the_token_stays(monkeypatch, tmp_path):
    line = started(monkeypatch, str(tmp_path), "--port", "8899", "--no-browser")
    assert line[1:3] == ["-m", "jupyterlab"]
    assert {"--ip=localhost", "--port=8899", "--no-browser"} <= set(line)
    assert f"--ServerApp.root_dir={tmp_path}" in line
    assert not [part for part in line if "token" in part or "password" in part]


def test_the_workbook_opens_at_its_first_notebook(monkeypatch, tmp_path):
    first = "--LabApp.default_url=/lab/tree/00_start_here.ipynb"
    assert first not in started(monkeypatch, str(tmp_path))
    assert first in started(monkeypatch, str(ROOT / "notebooks"))


def test_jupyterlab_asks_nobody_about_news_and_no_user_s_settings_are_touched(
    monkeypatch, tmp_path
):
    from jupyterlab_server.settings_utils import get_settings

    line = started(monkeypatch, str(tmp_path))
    (folder,) = (
        part.split("=")[1] for part in line if part.startswith("--LabApp.app_settings_dir")
    )
    overrides = json.loads((Path(folder) / "overrides.json").read_text(encoding="utf-8"))
    schemas = Path(jupyterlab.__file__).parent / "schemas"
    for name, defaults in overrides.items():
        found, _ = get_settings(str(tmp_path), str(schemas), str(tmp_path), name, overrides)
        known = found["schema"]["properties"]
        assert {key: known[key]["default"] for key in defaults} == defaults, "JupyterLab knows them"
    notification = overrides["@jupyterlab/apputils-extension:notification"]
    assert notification == {"fetchNews": "false", "checkForUpdates": False}


def test_a_browser_opens_unless_told(monkeypatch, tmp_path):
    assert "--no-browser" not in started(monkeypatch, str(tmp_path))


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_root_is_allowed_only_where_it_is_root(user, allowed, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert ("--allow-root" in started(monkeypatch, str(tmp_path))) == allowed


def test_what_is_refused(monkeypatch, tmp_path, capsys):
    assert cli.main(["lab", str(tmp_path / "absent")]) == 2
    assert cli.main(["lab", str(tmp_path), "--port", "0"]) == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["lab", str(tmp_path)]) == 2
    folder, port, jupyter = capsys.readouterr().err.splitlines()
    assert "take a clone" in folder
    assert "--port: got 0" in port
    assert "pip install mla-lab[lab]" in jupyter
