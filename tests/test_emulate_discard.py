"""Merged partials are discarded: no launch reads them again, and none faults on them."""

from __future__ import annotations

import pytest
import torch

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import Call, is_right, make_call, problem_for
from mla_lab.emulate.memory import GlobalMemory

from .needs import needs_cxx
from .shared_builds import KEEP_AB, SWAP_AB_SKIP, SWAP_AB_WALK

pytestmark = needs_cxx
#: fp32 words of the strips of a partial, and of it all
STRIPS, PARTIAL = 64 * 256, 64 * 512
#: keep_ab sums up to eight splits in registers and more from shared memory, swap_ab up to four and
#: more by different code
SPLITS = (3, 10)


def strips_of(call: Call, splits: int) -> torch.Tensor:
    """The words of all strips of the call's only row tile."""
    partial_out = call.args[4]
    return partial_out.flatten().view(-1, PARTIAL)[:splits, :STRIPS].view(torch.int32)


@pytest.mark.parametrize("splits", SPLITS)
def test_every_strip_is_discarded_and_the_next_launch_is_right(splits: int) -> None:
    call = make_call(KEEP_AB, problem_for(KEEP_AB, (64 * splits - 3,)), splits)
    kernel = EmulatedKernel.of(jit.compile(KEEP_AB))
    for _ in range(2):
        call.out.fill_(float("nan"))
        kernel(*call.args)
        assert is_right(call), call.errors()
        # the emulator sets all bits of what is discarded
        assert (strips_of(call, splits) == -1).all()


@pytest.mark.parametrize("splits", SPLITS)
def test_every_fragment_is_discarded_and_the_next_launch_is_right(splits: int) -> None:
    call = make_call(SWAP_AB_WALK, problem_for(SWAP_AB_WALK, (64 * splits - 3,)), splits)
    kernel = EmulatedKernel.of(jit.compile(SWAP_AB_WALK))
    words = splits * SWAP_AB_WALK.tile_rows * 512
    for _ in range(2):
        call.out.fill_(float("nan"))
        kernel(*call.args)
        assert is_right(call), call.errors()
        partial_out = call.args[4].flatten().view(torch.int32)
        assert (partial_out[:words] == -1).all()
        assert not (partial_out[words:] == -1).any()


def test_no_thread_loads_a_line_that_another_may_have_discarded() -> None:
    """Threads beyond the end of a slice have no fragment to load in the slice's last round."""
    call = make_call(SWAP_AB_SKIP, problem_for(SWAP_AB_SKIP, (140,)), 3)
    kernel = EmulatedKernel.of(jit.compile(SWAP_AB_SKIP), Options(check=True))
    kernel(*call.args)
    assert kernel.run.findings == []
    assert is_right(call), call.errors()


def test_a_workspace_that_begins_in_the_middle_of_a_line_keeps_its_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = make_call(KEEP_AB, problem_for(KEEP_AB, (64 * SPLITS[0] - 3,)), SPLITS[0])
    allocate, size = GlobalMemory.allocate, call.args[4].nbytes

    def shifted(self: GlobalMemory, nbytes: int, name: str) -> int:
        shift = 64 if nbytes == size else 0
        return allocate(self, nbytes + shift, name) + shift

    monkeypatch.setattr(GlobalMemory, "allocate", shifted)
    EmulatedKernel.of(jit.compile(KEEP_AB))(*call.args)
    assert is_right(call), call.errors()
    assert not (strips_of(call, SPLITS[0]) == -1).all(1).any()
