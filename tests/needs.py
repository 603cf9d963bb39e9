"""Marks that skip a test, with the reason, where this machine or this run lacks what it takes."""

from __future__ import annotations

import os
import shutil

import pytest

needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
#: set for a long run
LONG = "MLA_LAB_LONG"
needs_time = pytest.mark.skipif(LONG not in os.environ, reason=f"{LONG} is not set")
