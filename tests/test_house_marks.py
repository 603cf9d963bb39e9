"""What a notebook's metadata asks for becomes marks, and what cannot run says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import notebook_marks

from .house import ROOT


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook that fails when it runs, with this `mla_lab` metadata."""

    def write(metadata):
        cell = {"cell_type": "code", "id": "only", "metadata": {}, "source": ["1 / 0"]}
        document = {
            "cells": [cell | {"execution_count": None, "outputs": []}],
            "metadata": {"mla_lab": metadata} if metadata else {},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (tmp_path / "01_probe.ipynb").write_text(json.dumps(document))
        return tmp_path / "01_probe.ipynb"

    return write


def test_metadata_become_marks(notebook):
    assert notebook_marks(notebook({"requires": ["gpu"], "marks": ["slow"]})) == ["gpu", "slow"]
    assert notebook_marks(notebook({})) == []


def test_an_unknown_mark_is_named(notebook):
    with pytest.raises(pytest.UsageError, match=r"01_probe\.ipynb: .*\['fast'\]"):
        notebook_marks(notebook({"marks": ["fast"]}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_notebook_is_skipped_visibly(notebook):
    folder = notebook({"requires": ["gpu"]}).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "--nbmake", "-rs", "."],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0
    assert "1 skipped" in run.stdout
    assert "needs a CUDA device of compute capability 9.0" in run.stdout
