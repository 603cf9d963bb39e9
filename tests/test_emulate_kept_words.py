"""Workspaces that nobody zeroed behind their counters: what a launch keeps may hold anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_lab import jit, trtllm_batch_decode_with_kv_cache_mla
from mla_lab.backends.emulate import backend as emulated
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.cute.common.kv_prefetch import LEAST_REQUESTS
from mla_lab.cute.common.self_schedule import COUNT, END
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import is_right, make_call, problem_for
from mla_lab.interop.flashinfer.first_use import ZEROED_BYTES
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.workspace import KEPT_WORDS, MAX_CTAS, WORD_BYTES
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error

from .needs import needs_cxx
from .shared_builds import KEEP_AB

pytestmark = needs_cxx
SMS = 16
FIRST = ZEROED_BYTES // WORD_BYTES
LAST = FIRST + MAX_CTAS * KEPT_WORDS
#: words of a tile: request, begin, end, number of tiles. The second one's end minus its begin is
#: above 0 in 32 bits
WORDS = {
    "a begin below 0": (1 << 20, -5, 9, 0),
    "blocks further apart than 31 bits": (0, 2**25 + 5, -2_147_000_000, 1),
    "no such request": (1 << 30, 0, 4, 1),
    "a request below 0": (-(1 << 30), 3, 9, 1),
}


def kept(words: tuple[int, int, int, int]) -> torch.Tensor:
    """A workspace in which every CTA has kept these words."""
    memory = torch.zeros(32 << 20, dtype=torch.int32)
    row = memory[FIRST:LAST].view(MAX_CTAS, KEPT_WORDS)
    for place, word in zip((0, 2, END, COUNT), words, strict=True):
        row[:, place] = word
    return memory.view(torch.uint8)


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_kept_words_may_hold_anything(
    monkeypatch: pytest.MonkeyPatch, words: tuple[int, int, int, int]
) -> None:
    # swap_ab: in keep_ab the words are replaced before that fetch, in every schedule tried
    problem = Problem((2,) * LEAST_REQUESTS, (70,) * LEAST_REQUESTS, 8, page_size=128)

    def kernel(config: KernelConfig) -> EmulatedKernel:
        # warps run as far ahead of each other as they may: the fetch ahead of what replaces it
        return EmulatedKernel.of(jit.compile(config), Options(schedule="adverse", seed=0))

    monkeypatch.setattr(emulated, "_kernel", kernel)
    monkeypatch.setattr(emulated.EmulateBackend, "gpu", replace(H200, sms=SMS))
    inputs = make_inputs(problem, 3, workspace_bytes=64)
    given = inputs.contract_args() | {"workspace_buffer": kept(words), "backend": "emulate"}
    out = trtllm_batch_decode_with_kv_cache_mla(**given)
    assert error(out, decode_reference(inputs).out.reshape(out.shape)).relative < 0.008


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_keep_ab_loads_nothing_outside_by_kept_words(words: tuple[int, int, int, int]) -> None:
    # lengths, tokens and page ids of the tile that a CTA began with last are loaded before the
    # words are compared
    kernel = EmulatedKernel.of(jit.compile(KEEP_AB), Options(schedule="adverse", check=True))
    call = make_call(KEEP_AB, problem_for(KEEP_AB, (70, 300)), 0)
    row = call.args[11].view(MAX_CTAS, KEPT_WORDS)
    row[:, [0, 2, END, COUNT]] = torch.tensor(words, dtype=torch.int32)
    for _ in range(2):  # words of others, then its own
        kernel(*call.args)
        assert kernel.run.findings == []
        assert is_right(call), call.errors()
