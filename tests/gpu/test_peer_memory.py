"""Results of ranks exchanged and merged by one kernel: the bits of NCCL's gather and the merge."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from mla_lab.api.context_parallel import gather_and_merge
from mla_lab.api.peer_memory import PeerMemory
from mla_lab.core.dims import LATENT_DIM
from mla_lab.core.errors import InvalidInput, Unsupported

pytestmark = pytest.mark.gpu
#: 300 x 16 rows are more than a launch has warps
MOST_TOKENS, HEADS, CALLS = 300, 16, 300


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks(world: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    spawn(_rank, (world, f"file://{tmp_path}/ranks"), world)


def _rank(rank: int, world: int, where: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", where, rank=rank, world_size=world, device_id=device)
    try:
        peers = PeerMemory(MOST_TOKENS, HEADS)
        for step in (_calls_of_any_size, _graphs_of_an_odd_number, _refusals):
            step(rank, peers)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _own(rank: int, rows: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """A rank's result; of some rows it has no key."""
    made = torch.Generator(device="cuda").manual_seed(7 * seed + rank)
    out = torch.randn(rows, HEADS, LATENT_DIM, generator=made, device="cuda").to(dtype)
    lse = 4 * torch.randn(rows, HEADS, generator=made, device="cuda")
    lse[torch.rand(rows, HEADS, generator=made, device="cuda") < 0.1] = -float("inf")
    out[lse.isneginf()] = float("nan")
    return out, lse


def _calls_of_any_size(rank: int, peers: PeerMemory) -> None:
    """The ranks wait at different times, so that one is ahead of the other by all that it may."""
    alike, alone = random.Random(0), random.Random(1 + rank)
    for call in range(CALLS):
        rows = alike.choice((1, 2, 31, MOST_TOKENS))
        dtype = alike.choice((torch.bfloat16, torch.float16))
        base = alike.choice((None, "base2"))
        sinks = torch.linspace(-3, 3, HEADS, device="cuda") if alike.random() < 0.5 else None
        out, lse = _own(rank, rows, dtype, call)
        expected = gather_and_merge(out, lse, sinks=sinks, lse_base=base)
        torch.cuda._sleep(alone.choice((0, 0, 3_000, 100_000)))
        got = gather_and_merge(out, lse, sinks=sinks, lse_base=base, peers=peers)
        for one, same in zip(got, expected, strict=True):
            assert torch.equal(one.nan_to_num(7.0), same.nan_to_num(7.0)), (call, rows, dtype)


def _graphs_of_an_odd_number(rank: int, peers: PeerMemory) -> None:
    """Three calls a replay: two that follow each other begin with different halves."""
    alone = random.Random(1 + rank)
    results = [_own(rank, 5, torch.bfloat16, seed) for seed in range(3)]
    for own in results:
        gather_and_merge(*own, peers=peers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = [gather_and_merge(*own, peers=peers) for own in results]
    for replay in range(60):
        for own, fresh in zip(results, range(3), strict=True):
            for old, new in zip(
                own, _own(rank, 5, torch.bfloat16, 1000 + 3 * replay + fresh), strict=True
            ):
                old.copy_(new)
        torch.cuda._sleep(alone.choice((0, 100_000)))
        graph.replay()
        if replay % 6 == 0:
            for result, own in zip(got, results, strict=True):
                for one, same in zip(result, gather_and_merge(*own), strict=True):
                    assert torch.equal(one, same), replay


def _refusals(rank: int, peers: PeerMemory) -> None:
    out, lse = _own(rank, MOST_TOKENS + 1, torch.bfloat16, 0)
    with pytest.raises(InvalidInput, match="up to 4800, those of peers"):
        gather_and_merge(out, lse, peers=peers)
    with pytest.raises(Unsupported, match=r"peers: got out torch\.float32"):
        gather_and_merge(out[:2].float(), lse[:2], peers=peers)
    with pytest.raises(Unsupported, match="peers: got a latent of 256"):
        gather_and_merge(out[:2, :, :256], lse[:2], peers=peers)
    with pytest.raises(Unsupported, match="autograd follows"):
        gather_and_merge(out[:2], lse[:2].requires_grad_(), peers=peers)
    empty, none = gather_and_merge(out[:0], lse[:0].detach(), peers=peers)
    assert empty.shape[0] == 0 and none.shape[0] == 0
