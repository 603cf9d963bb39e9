"""What `from mla_lab import ...` promises, and that each promise can be kept."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest

import mla_lab
from mla_lab.core.resources import data_dir, kernels_dir

from .house import ROOT

EXPORTED = [
    "BuildError",
    "InvalidInput",
    "MlaLabError",
    "Problem",
    "Unsupported",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]


def test_exported_names():
    assert sorted(mla_lab.__all__) == EXPORTED


@pytest.mark.parametrize("name", EXPORTED)
def test_each_name_is_there_and_explained(name):
    assert getattr(mla_lab, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mla_lab.no_such_name


def test_exported_names_from_a_fresh_process():
    code = "from mla_lab import *; print(trtllm_batch_decode_with_kv_cache_mla.__module__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("mla_lab.")


def test_version_is_stated_once():
    assert mla_lab.__version__ == version("mla-lab")
    assert re.fullmatch(r"\d+\.\d+\.\d+", mla_lab.__version__)


def test_metadata_promises_what_it_should():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.11" in project["dependencies"]
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")


def test_resources_of_a_checkout():
    assert kernels_dir() == ROOT / "kernels"
    assert data_dir() == ROOT / "data"
