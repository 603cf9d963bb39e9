"""Batch-invariant calls on a card: a request's bits are its own, in any company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mla_lab.core.kv_cache import DTYPES
from mla_lab.core.problem import Problem
from mla_lab.plan.fixed_pieces import RING
from mla_lab.plan.without_plan import INVARIANT, plan_without
from mla_lab.reference.mla import decode_reference

from .calls import check, chosen_plan, counters_are_zero, inputs_of, native

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    ("query", "cache"), [("bf16", "bf16"), ("e4m3", "e4m3"), ("bf16", "e4m3"), ("bf16", "fp8_656")]
)
def test_batch_invariant_bits(query: str, cache: str, heads: int, workspace: torch.Tensor) -> None:
    lengths = (5000, 1, 0, 64, 1025, 16385, 777)
    whole = Problem((2,) * 7, lengths, heads, q_dtype=query, kv_format=cache)
    everything = inputs_of(whole, "lse")
    out, lse = (t.clone() for t in native(everything, workspace, batch_invariant=True))
    plan = chosen_plan(whole, True)
    by_plan, lse_by_plan = (
        t.clone() for t in native(everything, workspace, batch_invariant=True, plan=plan)
    )
    lse, lse_by_plan = lse.view(7, 2, heads), lse_by_plan.view(7, 2, heads)
    for chosen in ([4], [5, 0], [6, 4, 3, 2, 1, 0], [2]):
        index = torch.tensor(chosen, device="cuda")
        some = replace(
            everything,
            problem=replace(
                whole, q_lens=(2,) * len(chosen), kv_lens=tuple(lengths[i] for i in chosen)
            ),
            query=everything.query[index].contiguous(),
            block_tables=everything.block_tables[index].contiguous(),
            seq_lens=everything.seq_lens[index].contiguous(),
            max_seq_len=131072,
        )
        mine, own_lse = native(some, workspace, batch_invariant=True)
        assert torch.equal(mine, out[index])
        assert torch.equal(own_lse.view(-1, 2, heads), lse[index])
        mine, own_lse = native(
            some, workspace, batch_invariant=True, plan=chosen_plan(some.problem, True)
        )
        assert torch.equal(mine, by_plan[index])
        assert torch.equal(own_lse.view(-1, 2, heads), lse_by_plan[index])


@pytest.mark.parametrize("heads", [16, 128])
def test_batch_invariant_bits_in_large_batches(heads: int) -> None:
    """64 requests of 1 to 131,072 keys: alone, in parts, in another order, and 64 times itself. By
    default the bits of some of them differ, so that the comparison can fail. In batches of 130 and
    260 times one request of some 5,000 keys a CTA runs all of its pieces, where alone it has one.
    """
    workspace = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    lengths = tuple(sorted({round(131_072 ** (i / 63)) + i % 3 for i in range(63)} | {131_072}))
    everything = inputs_of(Problem((1,) * len(lengths), lengths, heads), "lse")
    count, middle = len(lengths), next(i for i, n in enumerate(lengths) if n > 4500)
    assert 50 <= count <= 64 and lengths[0] == 1
    for n in (130, 260):
        alike = Problem((1,) * n, (lengths[middle],) * n, heads)
        plan = plan_without(alike, INVARIANT, tile_rows=min(heads, 64))
        owners = np.repeat(np.arange(plan.num_workers), np.diff(plan.worker_begin))
        first = (plan.tiles[:, 0] == 0) & (plan.tiles[:, 1] == 0)
        assert first.sum() > len(set(owners[first])) == 1

    def of(index: torch.Tensor, invariant: bool) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = index.tolist()
        some = replace(
            everything,
            problem=Problem((1,) * len(chosen), tuple(lengths[i] for i in chosen), heads),
            query=everything.query[index].contiguous(),
            block_tables=everything.block_tables[index].contiguous(),
            seq_lens=everything.seq_lens[index].contiguous(),
        )
        mine, own = native(some, workspace, batch_invariant=invariant)
        return mine.clone(), own.clone()

    def differ(invariant: bool) -> int:
        out, lse = of(torch.arange(count, device="cuda"), invariant)
        parts = [torch.tensor([i], device="cuda") for i in range(0, count, 7)]
        parts += [torch.arange(count - 1, -1, -1, device="cuda"), torch.arange(20, 37).cuda()]
        parts += [torch.full((64,), i, device="cuda") for i in (3, count // 2, count - 1)]
        parts += [torch.full((n,), middle, device="cuda") for n in (130, 260)]
        found = 0
        for index in parts:
            mine, own = of(index, invariant)
            found += not (torch.equal(mine, out[index]) and torch.equal(own, lse[index]))
        return found

    assert differ(True) == 0
    assert differ(False) > 0


@pytest.mark.parametrize(
    ("heads", "formats", "features"),
    [
        (16, ("bf16", "bf16", "bf16"), ("sinks",)),
        (64, ("bf16", "bf16", "bf16"), ("sinks",)),
        (64, ("fp16", "fp16", "fp16"), ()),
        (128, ("bf16", "bf16", "bf16"), ()),
        (64, ("e4m3", "e4m3", "bf16"), ()),
        (16, ("bf16", "e4m3", "bf16"), ()),
        (16, ("bf16", "fp8_656", "bf16"), ()),
    ],
)
def test_a_worker_that_runs_an_item_whole_leaves_the_same_bits(
    heads: int, formats: tuple[str, str, str], features: tuple[str, ...], workspace: torch.Tensor
) -> None:
    """Requests of 9,000 keys, two or three pieces: as many as CTAs, each of which has a request,
    and one alone.
    """
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    q_dtype, kv_format, out_dtype = formats
    names = {"q_dtype": q_dtype, "kv_format": kv_format, "out_dtype": out_dtype}
    one = Problem((1,), (9000,), heads, **names)
    many = Problem((1,) * workers, (9000,) * workers, heads, **names)
    rows = min(heads, 32 if "e4m3" in formats else 64)
    for problem, whole in ((one, False), (many, True)):
        plan = plan_without(problem, INVARIANT, rows, workers)
        owners = np.repeat(np.arange(workers), np.diff(plan.worker_begin))
        first = (plan.tiles[:, 0] == 0) & (plan.tiles[:, 1] == 0)
        assert first.sum() == (2 if heads == 128 else 3)
        assert len(set(owners[first])) == (1 if whole else first.sum())
    inputs = inputs_of(one, "lse", *features)
    out = torch.empty(1, 1, heads, 512, dtype=DTYPES[out_dtype], device="cuda")
    alone = native(inputs, workspace, batch_invariant=True, out=out)
    check(inputs, alone)
    other = inputs_of(one, seed=2).query
    for place in (0, workers - 1):
        query = other.repeat(workers, 1, 1, 1)
        query[place] = inputs.query[0]
        batch = replace(
            inputs,
            problem=many,
            query=query,
            block_tables=inputs.block_tables.expand(workers, -1).contiguous(),
            seq_lens=inputs.seq_lens.expand(workers).contiguous(),
        )
        outs, lses = native(
            batch, workspace, batch_invariant=True, out=out.repeat(workers, 1, 1, 1)
        )
        assert same_bits(outs[place], out[0])
        assert same_bits(lses[place], alone[1][0])


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("drawn", [False, True])
def test_workers_may_be_late_by_more_rounds_than_slots(
    heads: int, drawn: bool, workspace: torch.Tensor
) -> None:
    """More requests than go by their size: one long one ahead of short ones, and drawn lengths. A
    worker with a long piece has neighbours that are rounds ahead of it, and write slots again."""
    lengths = [131_072] + [1536] * 320
    if drawn:
        rng = np.random.default_rng(7)
        lengths = [min(n, 131_072) for n in rng.lognormal(7.3, 1.3, 400).astype(int).tolist()]
    problem = Problem((1,) * len(lengths), tuple(lengths), heads)
    plan = plan_without(problem, INVARIANT, tile_rows=min(heads, 64))
    assert np.diff(plan.worker_begin).max() > RING
    inputs = inputs_of(problem, "lse")
    expected = decode_reference(inputs, dtype=torch.float32)
    first = None
    for _ in range(3):
        out, lse = native(inputs, workspace, batch_invariant=True)
        check(inputs, (out, lse), expected)
        first = first if first is not None else out.clone()
        assert same_bits(out, first)
    assert counters_are_zero(workspace)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether zeros have the same sign, too."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
