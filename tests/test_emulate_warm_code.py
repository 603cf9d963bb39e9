"""Warps that are done run the merge's code ahead of those that merge, and take nothing by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import is_right, make_call, problem_for
from mla_lab.emulate.machine import Silent
from mla_lab.plan.config import KernelConfig

from .needs import needs_cxx
from .shared_builds import KEEP_AB, SWAP_AB_LL, SWAP_AB_WALK

pytestmark = needs_cxx
#: threads of the warps that merge; those behind are the QK-softmax warps, or the producer warp
MERGING = 256
#: modules of a merge's code, of which none is part of what these warps do otherwise
MERGE = ("keep_ab_registers.py", "keep_ab_combine.py", "swap_ab_merge.py", "swap_ab_ll.py")
#: bytes that a thread loads of a partial, and of nothing else
PARTIAL_BYTES = 16


@pytest.mark.parametrize(
    ("config", "splits"),
    [(KEEP_AB, 3), (KEEP_AB, 10), (SWAP_AB_LL, 6), (SWAP_AB_LL, 9), (SWAP_AB_WALK, 2)],
    ids=lambda value: value if isinstance(value, int) else value.kernel[5:-5],
)
def test_the_merge_is_run_ahead_without_an_access(
    monkeypatch: pytest.MonkeyPatch, config: KernelConfig, splits: int
) -> None:
    #: (spare warp, bytes of a thread) -> instructions
    loads: Counter[tuple[bool, int]] = Counter()
    stores: Counter[tuple[bool, int]] = Counter()

    def counted(into: Counter[tuple[bool, int]]) -> Callable[..., None]:
        def count(_: Any, g: Any, offset: Any, nbytes: int, where: Any) -> None:
            into[g.first >= MERGING, nbytes] += 1

        return count

    methods = {"read": counted(loads), "write": counted(stores), "atomic": counted(stores)}
    monkeypatch.setattr(Silent, "globals", type("Globals", (), methods)(), raising=False)
    monkeypatch.setattr(Silent, "cp_async", counted(loads), raising=False)
    #: (spare warp, module) -> instructions
    ran: Counter[tuple[bool, str]] = Counter()

    def watch(g: Any, block: int) -> None:
        program = g.cta.program
        for pc in range(program.starts[block], program.ends[block]):
            module = str(program.kernel.code[pc].place.file).rpartition("/")[2]
            ran[g.first >= MERGING, module] += 1

    kernel = EmulatedKernel.of(jit.compile(config), Options(watch=watch))
    call = make_call(config, problem_for(config, (64 * splits - 3,)), splits)
    kernel(*call.args)
    assert is_right(call), call.errors()
    used = [name for name in MERGE if ran[False, name]]
    assert used and all(ran[True, name] > 0 for name in used), ran
    assert loads[False, PARTIAL_BYTES] > 0 and loads[True, PARTIAL_BYTES] == 0
    assert stores and not any(spare for spare, _ in stores)
