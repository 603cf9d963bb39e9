"""Notebooks are stored in one form, and each is on the workbook's map."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.lab.canonical import canonical, main

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

MESSY = {
    "cells": [
        {
            "cell_type": "code",
            "execution_count": 7,
            "id": "first",
            "metadata": {
                "tags": ["keep"],
                "collapsed": True,
                "nbmake": {"post_cell_execute": ["x"]},
            },
            "outputs": [{"output_type": "stream", "name": "stdout", "text": ["hello"]}],
            "source": "print('hello')\nprint('again')\n\n",
        },
        {
            "cell_type": "markdown",
            "id": "first",
            "metadata": {},
            "source": ["a line  \n", "next\n"],
        },
        {"cell_type": "code", "metadata": {}, "source": [], "outputs": []},
    ],
    "metadata": {
        "kernelspec": {"name": "elsewhere"},
        "mla_lab": {"requires": ["gpu"]},
        "widgets": {"state": 1},
    },
    "nbformat": 4,
    "nbformat_minor": 2,
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_canonical_form(path):
    text = path.read_text(encoding="utf-8")
    assert text == canonical(text), f"fix: python -m mla_lab.lab.canonical {path.name}"


def test_names_are_numbered_and_unique():
    numbers = [re.fullmatch(r"(\d\d)_[a-z0-9_]+", p.stem) for p in NOTEBOOKS]
    assert numbers
    assert all(numbers)
    assert len({m.group(1) for m in numbers if m}) == len(NOTEBOOKS)


def test_canonical_drops_what_a_run_left():
    form = json.loads(canonical(json.dumps(MESSY)))
    first, second, third = form["cells"]
    assert first["outputs"] == []
    assert first["execution_count"] is None
    assert first["metadata"] == {"tags": ["keep"], "nbmake": {"post_cell_execute": ["x"]}}
    assert first["source"] == ["print('hello')\n", "print('again')"]
    assert second["source"] == ["a line  \n", "next"], "two spaces are a line break in Markdown"
    assert [c["id"] for c in form["cells"]] == ["first", "cell-01", "cell-02"]
    assert third["source"] == []
    assert set(form["metadata"]) == {"kernelspec", "language_info", "mla_lab"}
    assert form["metadata"]["kernelspec"]["name"] == "python3"
    assert canonical(json.dumps(form)) == canonical(canonical(json.dumps(MESSY)))


def test_fix_command(tmp_path, capsys):
    notebook = tmp_path / "01_messy.ipynb"
    notebook.write_text(json.dumps(MESSY))
    main([str(tmp_path)])
    assert "01_messy.ipynb: rewritten" in capsys.readouterr().out
    assert notebook.read_text() == canonical(json.dumps(MESSY))
    main([str(tmp_path)])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("text", ["not json", "[]", "{}"])
def test_what_is_no_notebook_is_named(text):
    with pytest.raises(InvalidInput, match="notebook"):
        canonical(text)


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(InvalidInput, match="absent"):
        main([str(tmp_path / "absent")])
