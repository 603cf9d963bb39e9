"""Fixtures of the tests on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_lab.api import replay

from .calls import WORKSPACE_BYTES


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    replay.clear()
    yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def workspace() -> torch.Tensor:
    """One buffer, zeroed once, for all calls of this file."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
