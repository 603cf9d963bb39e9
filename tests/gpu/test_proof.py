"""Pairs of features, dtypes and shapes on a card, and a public list of configurations."""

from __future__ import annotations

import pytest
import torch

from mla_lab.verify import published
from mla_lab.verify.cases import pairwise_cases
from mla_lab.verify.check import run_case

pytestmark = pytest.mark.gpu

CASES = pairwise_cases()


@pytest.mark.parametrize("index", range(len(CASES)))
def test_pairs(index: int, workspace: torch.Tensor) -> None:
    outcome = run_case(CASES[index], index, workspace)
    assert (outcome.status, outcome.reason) == ("ok", "")


@pytest.fixture(scope="module")
def pool() -> published.Pool:
    """Tokens of the largest configuration, 9.7 GB."""
    tokens = max(published.BATCHES) * max(published.KV_LENS)
    return published.Pool("bf16", tokens, "cuda")


@pytest.mark.parametrize("page_size", published.PAGE_SIZES)
@pytest.mark.parametrize("batch", published.BATCHES)
def test_published_configurations(
    batch: int, page_size: int, pool: published.Pool, workspace: torch.Tensor
) -> None:
    for c in published.configurations():
        if (c.dtype, c.batch, c.page_size) == ("bf16", batch, page_size):
            outcome = published.run(c, pool, workspace)
            assert (outcome.status, outcome.reason) == ("ok", ""), c.name
