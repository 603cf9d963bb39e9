"""Settings that every test shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from .lasting_worker import LastingWorker

# CI must not depend on luck or on how busy the machine is; HYPOTHESIS_PROFILE=explore searches
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(scope="session", autouse=True)
def compiling_processes_outlast_their_builds() -> Iterator[None]:
    """To start one for each test that compiles costs minutes in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mla_lab.jit.build.CuteWorker", LastingWorker)
        yield
    LastingWorker.end()


@pytest.fixture(autouse=True)
def which_builds_are_there_is_asked_anew() -> Iterator[None]:
    """A test that says so for itself leaves nothing of it behind."""
    yield
    builds = sys.modules.get("mla_lab.backends.cute.catalogue")
    if builds is not None:
        builds.without_rule.cache_clear()
        builds.without_pdl.cache_clear()
