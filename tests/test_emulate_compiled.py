"""What is compiled here: a kernel of one's own, and the CUDA C++ kernels around attention."""

from __future__ import annotations

import pytest
import torch

from mla_lab import jit
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options, run
from mla_lab.plan import make_plan
from mla_lab.plan.config import KernelConfig

from .needs import needs_cxx, needs_nvcc


@needs_cxx
def test_a_kernel_of_ones_own() -> None:
    from .scale_kernel import launch

    a, b = torch.arange(100.0), torch.ones(100)
    done = run(launch, a, b, 100, options=Options(check=True))
    assert torch.equal(b, 2 * a + 1) and done.findings == []
    assert done.launches[0].grid == (2, 1, 1)
    with pytest.raises(InvalidInput, match="argument 0"):
        run(launch, "a", b, 100)


@needs_cxx
def test_the_short_quotient_is_exact_below_two_to_the_nineteenth() -> None:
    from .scale_kernel import launch_divide

    random = torch.Generator().manual_seed(0)
    by = torch.randint(1, 4096, (8000,), generator=random)
    by = torch.cat([by, torch.arange(1, 1025), torch.full((8,), (1 << 31) - 1)])
    most = ((1 << 31) - 1) // by
    most = torch.minimum(most, torch.tensor((1 << 19) - 1))
    whole = (torch.rand(len(by), generator=random) * (most + 1)).long().minimum(most)
    whole[::7] = most[::7]
    for rest in (torch.zeros_like(by), by - 1):  # the ends of the numbers with a quotient
        above = (whole * by + rest).clamp(max=(1 << 31) - 1)
        got = above.to(torch.int32)
        run(launch_divide, got, by.to(torch.int32), len(by), options=Options("card"))
        assert torch.equal(got.long(), above // by)


@needs_cxx
def test_arguments_that_a_library_refuses_are_named() -> None:
    kernel = EmulatedKernel.of(jit.compile(KernelConfig("cute/empty"), "sm_90a"))
    with pytest.raises(InvalidInput, match="Mismatched Tensor on argument #0"):
        kernel(torch.zeros(2, 3))


@needs_nvcc
def test_planner_kernel() -> None:
    workers, kv_lens = 12, (300, 77, 3000)
    problem = Problem(q_lens=(1, 1, 1), kv_lens=kv_lens, heads=64)
    tiles, begin = torch.zeros(40, 8, dtype=torch.int32), torch.zeros(13, dtype=torch.int32)
    counts = torch.zeros(4, dtype=torch.int32)
    q_begin = torch.arange(4, dtype=torch.int32)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    kernel = EmulatedKernel.of(jit.compile(KernelConfig("cuda/planner")), Options(check=True))
    numbers = (40, 40, 3, 64, 64, 64, 16, 32, 0)
    kernel(lengths, q_begin, tiles, begin, counts, *numbers)
    plan = make_plan(problem, num_workers=workers, policy="fixed_size", split_blocks=16)
    assert plan.num_slots == 3
    assert begin.tolist() == plan.worker_begin.tolist()
    assert tiles[: counts[0]].tolist() == plan.tiles.tolist()
    assert kernel.run.findings == []
