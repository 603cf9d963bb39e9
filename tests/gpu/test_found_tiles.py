"""On a card, every worker finds the tiles of `plan.self_schedule`: 1,000 random batches."""

from __future__ import annotations

import random

import pytest
import torch

from mla_lab import jit
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.workspace import KEPT_WORDS

from ..found_tiles import Batch, launch, planned

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]
SEEDS, EACH = 20, 50


@pytest.mark.parametrize("seed", range(SEEDS))
def test_workers_find_the_tiles_of_the_rule(seed: int) -> None:
    kernel = jit.kernel(KernelConfig("cute/found_tiles"), jit.device_arch(0)).launch
    schedule = torch.zeros(132 * KEPT_WORDS, dtype=torch.int32, device="cuda")
    rng = random.Random(seed)
    for _ in range(EACH):
        batch = Batch.drawn(rng, (1, 3, 66, 132), 4096 if seed % 4 == 0 else 300)
        expected = planned(batch)
        for _ in range(2):  # found, and taken again
            assert launch(kernel, batch, schedule, "cuda") == expected
