"""Fixtures of the tests on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_lab.api import replay
from mla_lab.verify.cases import CARD_WORKSPACE_BYTES


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    replay.clear()
    yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def workspace() -> torch.Tensor:
    """One buffer, zeroed once, for all calls of a file."""
    return torch.zeros(CARD_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
