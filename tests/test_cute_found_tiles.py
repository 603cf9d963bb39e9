"""The kernels' rule, compiled and emulated, finds the tiles of `plan.self_schedule`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mla_lab import jit
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.fixed_pieces import LEAST_BUNDLES, MOST_PIECES, PieceCuts
from mla_lab.plan.self_schedule import Costs
from mla_lab.plan.workspace import HELD_REQUESTS, KEPT_WORDS

from .found_tiles import REST, Batch, launch, planned
from .needs import needs_cxx

pytestmark = needs_cxx
WORKERS = 8
#: of a drawn batch of pieces: each takes milliseconds
MOST_TILES = 500
CHEAP = Costs(1, 2)


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return EmulatedKernel.of(jit.compile(KernelConfig("cute/found_tiles")), Options(check=True))


def kept() -> torch.Tensor:
    """What nobody has written yet."""
    random_words = torch.Generator().manual_seed(0)
    shape = (WORKERS * KEPT_WORDS,)
    return torch.randint(-9, 9, shape, dtype=torch.int32, generator=random_words)


@pytest.mark.parametrize("seed", range(30))
def test_workers_find_the_tiles_of_the_rule(kernel: EmulatedKernel, seed: int) -> None:
    batch = Batch.drawn(random.Random(seed), (1, 3, WORKERS), 300)
    assert launch(kernel, batch, kept()) == planned(batch)
    assert kernel.run.findings == []


@pytest.mark.parametrize(
    ("requests", "ragged"),
    [(1, False), (HELD_REQUESTS - 1, True), (HELD_REQUESTS, False), (HELD_REQUESTS + 1, True)],
)
def test_workers_find_the_tiles_of_lengths_far_apart(
    kernel: EmulatedKernel, requests: int, ragged: bool
) -> None:
    """Without keys, without query tokens, and of more blocks than even pieces may have."""
    rng = random.Random(requests)
    kv_lens = tuple(rng.choice([0, 1, 64, 65, 1 << 26, (1 << 26) + 1]) for _ in range(requests))
    q_lens = tuple(rng.choice([0, 1, 3]) if ragged else 1 for _ in kv_lens)
    batch = Batch(Problem(q_lens, kv_lens, 16), 16, WORKERS, CHEAP, 0)
    found_again(kernel, batch)


def found_again(kernel: EmulatedKernel, batch: Batch) -> None:
    """Workers find the plan's pieces, and take them again from the words that they kept."""
    schedule = torch.zeros(batch.workers * KEPT_WORDS, dtype=torch.int32)
    for _ in range(2):
        assert launch(kernel, batch, schedule) == planned(batch)
        assert kernel.run.findings == []


@pytest.mark.parametrize(("requests", "heads"), [(3, 512), (HELD_REQUESTS + 44, 32)])
def test_lengths_whose_sum_does_not_fit_are_whole_items(
    kernel: EmulatedKernel, requests: int, heads: int
) -> None:
    """Each row tile of each request is one work tile of one worker."""
    lens = torch.full((requests,), 2**31 - 64, dtype=torch.int32)
    rows = torch.zeros(WORKERS, requests * heads // 16, 8, dtype=torch.int32)
    counts = torch.zeros(WORKERS, dtype=torch.int32)
    begin = torch.arange(requests + 1, dtype=torch.int32)
    no_plan = torch.zeros(0, 8, dtype=torch.int32)
    kernel(
        lens, begin, no_plan, kept(), rows, counts, heads, 1, CHEAP.packed, 16, requests
    )  # fmt: skip
    assert kernel.run.findings == []
    mine = zip(rows.tolist(), counts.tolist(), strict=True)
    found = sorted(tuple(row) for own, count in mine for row in own[:count])
    whole = [(r, t, 0, REST, 0, 1, -1, -1) for r in range(requests) for t in range(heads // 16)]
    assert found == whole


#: offsets of 6 query tokens, and the tokens that requests have of them
OFFSETS = (
    ([-3, 2, 5, 2**31 - 1, -(2**31)], (2, 3, 1, 0)),
    ([4, 1, 6, 3, 9], (0, 5, 0, 3)),
    ([8, 10, 20, 30, 40], (0, 0, 0, 0)),
    ([0, 1, 2, 4, 6], (1, 1, 2, 2)),
)


@pytest.mark.parametrize("cuts", [CHEAP, PieceCuts(1, 1)], ids=("rule", "pieces"))
def test_offsets_are_cut_into_the_query(
    kernel: EmulatedKernel, pieces: EmulatedKernel, cuts: Costs | PieceCuts
) -> None:
    """One workspace for all: what was found for other offsets is not taken again."""
    workers = WORKERS if isinstance(cuts, Costs) else 2 * LEAST_BUNDLES
    schedule = torch.zeros(workers * KEPT_WORDS, dtype=torch.int32)
    shifted = [begin + 2 for begin in OFFSETS[-1][0]]
    for q_begin, q_lens in (*OFFSETS, (shifted, (1, 1, 2, 0)), OFFSETS[-1]):
        batch = Batch(Problem(q_lens, (300, 900, 70, 500), 32), 16, workers, cuts, 0)
        found = kernel if isinstance(cuts, Costs) else pieces
        assert launch(found, batch, schedule, q_begin=q_begin, tokens=6) == planned(batch)
        assert found.run.findings == []


DEALT = [Batch.of_dealt(random.Random(seed), (4, 16, 33)[seed % 3]) for seed in range(24)]


@pytest.mark.parametrize("batch", DEALT, ids=range(len(DEALT)))
def test_workers_find_the_pieces_that_are_dealt(kernel: EmulatedKernel, batch: Batch) -> None:
    found_again(kernel, batch)


def test_dealt_batches_have_several_rounds_and_many_pieces() -> None:
    rounds = {int(np.diff(batch.plan.worker_begin).max()) for batch in DEALT}
    assert {1, 2, 3} <= rounds
    assert max(int(batch.plan.tiles[:, 5].max()) for batch in DEALT) > 4
    assert {batch.problem.heads for batch in DEALT} == {16, 32}


@pytest.fixture(scope="module")
def pieces() -> EmulatedKernel:
    config = KernelConfig("cute/found_tiles", options=(("pieces", 1),))
    return EmulatedKernel.of(jit.compile(config), Options(check=True))


@pytest.mark.parametrize("seed", range(16))
def test_workers_find_the_pieces_of_a_batch_invariant_call(
    pieces: EmulatedKernel, seed: int
) -> None:
    batch = Batch.of_pieces(random.Random(seed), (16, 17, 33), 40)
    found_again(pieces, batch.of_tiles(MOST_TILES))


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("batch", [30, 48, HELD_REQUESTS + 64])
def test_workers_find_whole_items_of_lengths_that_are_alike(
    pieces: EmulatedKernel, batch: int, q_len: int
) -> None:
    """With two query tokens by bundles of two workers; with more requests than a warp holds in
    rounds that the lengths do not order."""
    kv_lens = tuple(1000 - 11 * (b % 4) for b in range(batch))
    problem = Problem((q_len,) * batch, kv_lens, 16)
    found = Batch(problem, 16, 2 * LEAST_BUNDLES, PieceCuts(5, 8), q_len)
    assert found.whole and set(found.plan.tiles[:, 5]) == {2}
    found_again(pieces, found)


@pytest.mark.parametrize("batch", [60, HELD_REQUESTS + 64])
def test_whole_items_go_by_their_length(pieces: EmulatedKernel, batch: int) -> None:
    """The longer ones are split, into pieces that are shorter than the items that are not; of more
    requests than a warp holds they go in the order of the batch."""
    kv_lens = tuple(1088 if b % 3 == 1 else 1024 - 70 * (b % 3) for b in range(batch))
    problem = Problem((1,) * batch, kv_lens, 16)
    found = Batch(problem, 16, 2 * LEAST_BUNDLES, PieceCuts(16, 64), 1)
    assert found.whole and set(found.plan.tiles[:, 5]) == {1, 2}
    firsts = [kv_lens[rows[0][0]] for rows in planned(found)]
    assert (firsts == sorted(firsts, reverse=True)) == (batch <= HELD_REQUESTS)
    found_again(pieces, found)


def test_workers_find_the_pieces_of_more_requests_than_a_warp_holds(
    pieces: EmulatedKernel,
) -> None:
    """In groups of HELD_REQUESTS, of whose second the launch takes none. The last requests of the
    first and of the third have more pieces than a round. Nothing is bundled, though the workers
    would suffice: row tiles differ."""
    kv_lens, q_lens = [70, 200, 0, 40] * 150, [3, 1, 1, 0, 1, 1] * 100
    q_lens[HELD_REQUESTS : 2 * HELD_REQUESTS] = [1] * HELD_REQUESTS
    for last in (HELD_REQUESTS - 1, -1):
        kv_lens[last], q_lens[last] = 131_072, 2
    problem = Problem(tuple(q_lens), tuple(kv_lens), 16)
    batch = Batch(problem, 16, 3 * LEAST_BUNDLES, PieceCuts(1, 1, few=False), 0)
    assert batch.plan.tiles[:, 5].max() == MOST_PIECES
    found_again(pieces, batch)


def test_bundles_find_the_pieces_of_more_requests_than_a_warp_holds(
    pieces: EmulatedKernel,
) -> None:
    """Two row tiles each, by bundles of two workers, and one worker that has none."""
    kv_lens = tuple(150 if b % 9 == 0 else 64 for b in range(HELD_REQUESTS + 4))
    problem = Problem((2,) * len(kv_lens), kv_lens, 16)
    batch = Batch(problem, 16, 2 * LEAST_BUNDLES + 1, PieceCuts(1, 1), 2)
    found_again(pieces, batch)


@pytest.mark.parametrize("workers", [LEAST_BUNDLES, MOST_PIECES - 1, MOST_PIECES, 67, 132])
@pytest.mark.parametrize("requests", [HELD_REQUESTS - 56, HELD_REQUESTS + 44])
def test_a_slot_is_written_by_one_worker_in_turn(workers: int, requests: int) -> None:
    """A flag of 0 says that a slot was read, or that nothing was written yet: a second writer could
    take the one for the other where the first one is late (`cute.split_merge.piece_flags`)."""
    rng = random.Random(workers)
    lengths = tuple(min(131_072, int(rng.lognormvariate(7.3, 1.3))) for _ in range(requests))
    batch = Batch(Problem((1,) * requests, lengths, 16), 16, workers, PieceCuts(4, 16), 1)
    assert not batch.whole
    turns: dict[int, list[tuple[int, int]]] = {}
    for worker, rows in enumerate(planned(batch)):
        for row in (row for row in rows if row[5] > 1):
            turns.setdefault(row[6], []).append((worker, row[7]))
    assert max(turn for of_slot in turns.values() for _, turn in of_slot) > 1
    for of_slot in turns.values():
        assert len({worker for worker, _ in of_slot}) == 1
        assert [turn for _, turn in of_slot] == sorted({turn for _, turn in of_slot})


@pytest.fixture(scope="module", params=[1, 2])
def single(request: pytest.FixtureRequest) -> tuple[EmulatedKernel, int]:
    """The closed form, and the least blocks of a piece."""
    config = KernelConfig("cute/found_tiles", options=(("single", request.param),))
    return EmulatedKernel.of(jit.compile(config), Options(check=True)), request.param


@pytest.mark.parametrize("seed", range(40))
def test_the_closed_form_of_one_request_finds_the_same(
    single: tuple[EmulatedKernel, int], seed: int
) -> None:
    kernel, least = single
    rng = random.Random(seed)
    q_len = rng.choice([1, 1, 2, 4])
    longest = rng.choice([1, 64, 700, 9000, 131_072])
    kv_len = max(q_len, rng.randint(1, longest)) if rng.random() < 0.9 else 0
    problem = Problem((q_len,), (kv_len,), rng.choice([16, 64, 128]))
    costs = Costs(rng.randint(0, 12), rng.randint(0, 12), least=least)
    batch = Batch(problem, 64, WORKERS, costs, q_len)
    schedule = kept()
    for _ in range(2):  # found, and kept
        assert launch(kernel, batch, schedule) == planned(batch)
    assert kernel.run.findings == []


def batch_of(*kv_lens: int, costs: Costs = CHEAP, q_lens: tuple[int, ...] = ()) -> Batch:
    problem = Problem(q_lens or (1,) * len(kv_lens), kv_lens, 16)
    return Batch(problem, 16, WORKERS, costs, 0 if q_lens else 1)


def test_what_was_found_is_taken_again_only_where_all_is_the_same(kernel: EmulatedKernel) -> None:
    schedule, first = kept(), batch_of(3000, 700, 64)
    assert launch(kernel, first, schedule) == planned(first)
    found = kernel.run.instructions
    assert launch(kernel, first, schedule) == planned(first)
    again = kernel.run.instructions
    assert again < found / 2
    for other in (
        batch_of(3000, 700, 65),
        batch_of(3000, 700, 64, 64),
        batch_of(3000, 700),
        batch_of(3000, 700, 64, costs=Costs(1, 3)),
        batch_of(3000, 700, 64, q_lens=(1, 2, 1)),
        batch_of(3000, 700, 64, q_lens=(2, 1, 1)),
    ):
        assert launch(kernel, other, schedule) == planned(other)
        assert kernel.run.instructions > 1.5 * again


@pytest.mark.parametrize("row", range(0, 24, 5))
def test_words_that_something_else_wrote_are_not_taken(kernel: EmulatedKernel, row: int) -> None:
    schedule, batch = kept(), batch_of(3000, 700, 64)
    launch(kernel, batch, schedule)
    schedule[row::KEPT_WORDS] += 1
    assert launch(kernel, batch, schedule) == planned(batch)
