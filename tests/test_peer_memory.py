"""Ranks that exchange their results through peer memory: the kernel, emulated, with the rows of the
other ranks already there; and what is refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from mla_lab import jit
from mla_lab.api.context_parallel import gather_and_merge, merged_by_torch
from mla_lab.api.peer_memory import PeerMemory
from mla_lab.backends import rank_kernels
from mla_lab.core.dims import LATENT_DIM
from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.resources import data_dir
from mla_lab.cute import rank_memory
from mla_lab.emulate import EmulatedKernel, Fault, Options
from mla_lab.emulate.device import Addresses

from .needs import needs_cxx

EMPTY = rank_memory.EMPTY
TOKENS, HEADS, MOST_TOKENS = 3, 2, 3
ROWS, MOST_ROWS = TOKENS * HEADS, MOST_TOKENS * HEADS
BUFFER_ROWS = rank_memory.buffer_rows(MOST_ROWS)
#: an fp32 number with the bits of an empty word
LIKE_EMPTY = torch.tensor(EMPTY, dtype=torch.int32).view(torch.float32)


class Ranks:
    """The memory of all ranks, and rank `rank`'s `PeerMemory` over it."""

    def __init__(self, world: int, rank: int) -> None:
        words = rank_memory.peer_bytes(world, BUFFER_ROWS) // 4
        self.memory = [torch.full((words,), EMPTY, dtype=torch.int32) for _ in range(world)]
        self.state = torch.zeros(2, dtype=torch.int32)
        self.rank = rank
        self.peers = PeerMemory.__new__(PeerMemory)
        of_all: Any = None
        self.peers.group, self.peers.device = of_all, torch.device("cpu")
        self.peers.most_rows = MOST_ROWS
        bases: Any = Addresses(tuple(self.memory))
        self.peers._peers = rank_kernels.Peers(bases, self.state, rank, BUFFER_ROWS)

    def half(self, owner: int, epoch: int) -> tuple[Tensor, Tensor]:
        """outs [ranks, rows, words] and lses [ranks, rows] of an epoch in a rank's memory, bits."""
        world = len(self.memory)
        words = self.memory[owner].view(2, -1)[epoch % 2]
        outs, lses = words.split([world * BUFFER_ROWS * LATENT_DIM // 2, world * BUFFER_ROWS])
        return outs.view(world, BUFFER_ROWS, -1), lses.view(world, -1)

    def receive(self, outs: Tensor, lses: Tensor, epoch: int) -> None:
        """What the other ranks send for a call: results [ranks, tokens, heads, ..] of all."""
        to_outs, to_lses = self.half(self.rank, epoch)
        for rank in range(len(self.memory)):
            if rank != self.rank:
                to_outs[rank, :ROWS], to_lses[rank, :ROWS] = sent(outs[rank]), sent(lses[rank])


def sent(tensor: Tensor) -> Tensor:
    """The words that are sent for a rank's outs or lses."""
    words = tensor.reshape(ROWS, -1).squeeze(-1).contiguous().view(torch.int32)
    return words.masked_fill(words == EMPTY, 0)


def results(world: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Of all ranks. Some words are what an empty one is; of the first row rank 0 has no key, of the
    last none has one."""
    made = torch.Generator().manual_seed(seed)
    outs = torch.randn(world, TOKENS, HEADS, LATENT_DIM, generator=made).to(dtype)
    lses = 4 * torch.randn(world, TOKENS, HEADS, generator=made)
    outs[:, 1, 0, ::3] = outs[:, 1, 1] = -0.0
    lses[-1, 1, 1] = LIKE_EMPTY
    lses[0, 0, 0], outs[0, 0, 0] = -math.inf, math.nan
    lses[:, -1, -1], outs[:, -1, -1] = -math.inf, math.inf
    return outs, lses


@pytest.fixture(scope="module", params=list(rank_kernels.EXCHANGES), ids=str)
def kernel(request: pytest.FixtureRequest) -> tuple[EmulatedKernel, torch.dtype]:
    artifact = jit.compile(rank_kernels.EXCHANGES[request.param])
    return EmulatedKernel.of(artifact, Options(check=True, stop=True)), request.param


@needs_cxx
@pytest.mark.parametrize("base", [None, "base2"])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1), (3, 0), (6, 4)])
def test_calls_that_follow_each_other(
    kernel: tuple[EmulatedKernel, torch.dtype], world: int, rank: int, base: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three calls: the third takes the half of the first, which is empty again by then."""
    run, dtype = kernel
    monkeypatch.setattr(rank_kernels, "_kernel", lambda *given: run)
    ranks = Ranks(world, rank)
    for epoch in (1, 2, 3):
        outs, lses = results(world, dtype, epoch)
        sinks = torch.linspace(-2, 2, HEADS) if epoch > 1 else None
        ranks.receive(outs, lses, epoch)
        out, lse = gather_and_merge(
            outs[rank], lses[rank], sinks=sinks, lse_base=base, peers=ranks.peers
        )
        assert run.run.findings == []
        expected = merged_by_torch(outs, lses, sinks, base)
        close = {"rtol": 0.0, "atol": 2e-2, "equal_nan": True}
        assert torch.allclose(out.float(), expected[0].float(), **close)  # type: ignore[arg-type]
        assert torch.allclose(lse, expected[1], rtol=1e-6, atol=2e-6, equal_nan=True)
        assert out.shape == (TOKENS, HEADS, LATENT_DIM) and lse.shape == (TOKENS, HEADS)
        assert ranks.state.tolist() == [epoch, 0]
        assert bool((ranks.memory[rank] == EMPTY).all())
        for owner in range(world):
            if owner != rank:
                to_outs, to_lses = ranks.half(owner, epoch)
                assert torch.equal(to_outs[rank, :ROWS], sent(outs[rank]))
                assert torch.equal(to_lses[rank, :ROWS], sent(lses[rank]))
                # nothing else was written, and that rank takes it
                to_outs[rank, :ROWS], to_lses[rank, :ROWS] = EMPTY, EMPTY
                assert bool((ranks.memory[owner] == EMPTY).all())


@needs_cxx
@pytest.mark.parametrize("of_lse", [False, True])
def test_it_waits_for_a_word_that_is_not_there(
    kernel: tuple[EmulatedKernel, torch.dtype], of_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, dtype = kernel
    monkeypatch.setattr(rank_kernels, "_kernel", lambda *given: run)
    ranks = Ranks(2, 0)
    outs, lses = results(2, dtype, 0)
    ranks.receive(outs, lses, 1)
    held = ranks.half(0, 1)
    if of_lse:
        held[1][1, 2] = EMPTY
    else:
        held[0][1, 2, 255] = EMPTY
    with pytest.raises(Fault) as caught:
        gather_and_merge(outs[0], lses[0], peers=ranks.peers)
    assert caught.value.finding.kind == "livelock"
    assert ranks.state.tolist() == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_halves_begin_where_a_vector_may(ranks: int) -> None:
    for most_rows in range(1, 40):
        rows = rank_memory.buffer_rows(most_rows)
        assert most_rows <= rows < most_rows + 4
        assert rank_memory.peer_bytes(ranks, rows) // 2 % 16 == 0


@pytest.mark.parametrize(
    ("out", "lse", "error", "message"),
    [
        (
            (5, 2, 512),
            (5, 2),
            InvalidInput,
            "out: got 10 query tokens x heads; supported: up to 6,",
        ),
        ((2, 2, 256), (2, 2), Unsupported, "peers: got a latent of 256"),
    ],
)
def test_a_call_that_does_not_fit(
    out: tuple[int, ...], lse: tuple[int, ...], error: type[Exception], message: str
) -> None:
    peers = Ranks(2, 0).peers
    with pytest.raises(error, match=message):
        gather_and_merge(torch.zeros(out, dtype=torch.bfloat16), torch.zeros(lse), peers=peers)


def test_dtypes_and_derivatives() -> None:
    peers, out, lse = Ranks(2, 0).peers, torch.zeros(1, 2, 512), torch.zeros(1, 2)
    with pytest.raises(Unsupported, match=r"peers: got out torch\.float32, lse torch\.float32"):
        gather_and_merge(out, lse, peers=peers)
    with pytest.raises(Unsupported, match="sinks: got a tensor that autograd follows"):
        gather_and_merge(out.half(), lse, sinks=torch.zeros(2, requires_grad=True), peers=peers)
    with pytest.raises(InvalidType, match="peers: got str"):
        gather_and_merge(out.half(), lse, peers="all")  # type: ignore[arg-type]
    other: Any = object()
    with pytest.raises(InvalidInput, match="group: got another"):
        gather_and_merge(out.half(), lse, group=other, peers=peers)


def test_a_traced_program_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(Unsupported, match=r"peers: got a call inside torch\.compile"):
        gather_and_merge(torch.zeros(1, 2, 512).half(), torch.zeros(1, 2), peers=Ranks(2, 0).peers)


def test_no_rows_are_no_call() -> None:
    ranks = Ranks(2, 0)
    out, lse = torch.zeros(0, 2, 512, dtype=torch.bfloat16), torch.zeros(0, 2)
    got = gather_and_merge(out, lse, peers=ranks.peers)
    assert got[0].shape == out.shape and got[1].shape == lse.shape
    assert ranks.state.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 2), InvalidInput, "most_tokens: got 0"),
        ((4, True), InvalidType, "heads: got bool"),
        ((4.0, 2), InvalidType, "most_tokens: got float"),
        ((4, 2), InvalidInput, "group: got no process group"),
    ],
)
def test_sizes(sizes: tuple[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PeerMemory(*sizes)


def test_all_ctas_of_a_launch_fit_on_a_card() -> None:
    rank_exchange = pytest.importorskip("mla_lab.cute.rank_exchange")
    registers = 32 * rank_exchange.WARPS * rank_exchange.CTAS_PER_SM
    rows = (data_dir() / "records/builds.jsonl").read_text().splitlines()
    builds = [row for row in map(json.loads, rows) if "rank_exchange" in row.get("name", "")]
    assert len(builds) == 2
    for build in builds:
        (found,) = build["kernels"]
        assert found["registers"] * registers <= H200.registers_per_sm


def _leave() -> None:
    """Ends the process of a rank that has found nothing wrong, without Python's finalisation. On a
    busy machine one was aborted at its end ("terminate called without an active exception"),
    presumably by a thread of C++ that waited for the interpreter there."""
    os._exit(0)


def test_all_ranks_refuse_other_sizes(tmp_path: Path) -> None:
    spawn(_other_sizes, (f"file://{tmp_path}/ranks",), 2)


def _other_sizes(rank: int, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", where, rank=rank, world_size=2)
    try:
        peers = PeerMemory.__new__(PeerMemory)
        world: Any = dist.group.WORLD
        peers.group, peers.rank, peers.ranks, peers.most_rows = world, rank, 2, 8 + rank
        with pytest.raises(Unsupported, match=r"most_tokens: got \[8, 9\] query tokens x heads"):
            peers._all_can(lambda: None)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    _leave()


def test_all_ranks_refuse_where_there_is_no_card(tmp_path: Path) -> None:
    spawn(_refused, (f"file://{tmp_path}/ranks",), 2)


def _refused(rank: int, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", where, rank=rank, world_size=2)
    try:
        with pytest.raises(Unsupported, match=r"^group: got a rank without .* \(rank \d\)$"):
            PeerMemory(4, 2)
        first = dist.new_group([0])
        if rank == 1:
            with pytest.raises(InvalidInput, match="group: got a group without this rank"):
                PeerMemory(4, 2, group=first)
        with pytest.raises(InvalidType, match="group: got str"):
            PeerMemory(4, 2, group="all")  # type: ignore[arg-type]
        dist.barrier()
    finally:
        dist.destroy_process_group()
    _leave()
