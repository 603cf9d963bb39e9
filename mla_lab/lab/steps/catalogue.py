"""The ten steps: module, functions that the reader writes, and the trial that each has to pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import invalid

FOLDER = Path(__file__).resolve().parents[2] / "cute" / "steps"
#: sizes of `mla_lab.cute.steps.shape`
ROWS = TILE = 64
LATENT, WIDTH = 128, 192
CTA_THREADS = 384
SCALE = WIDTH**-0.5
SCALE_LOG2 = SCALE * math.log2(math.e)
#: pages of the request of steps 63 to 68, in their order, and its tokens
TABLE, SEQ_LEN = (4, 0, 5, 2, 1), 290
#: requests of step 69, and its workers
SEQ_LENS, WORKERS = (150, 400, 60), 4


@dataclass(frozen=True)
class Trial:
    """Arguments of a call, which outputs it has, and what they must be."""

    args: tuple[Any, ...]
    #: name -> (argument, expected)
    expected: dict[str, tuple[int, Tensor]]
    tolerance: float = 0.0

    def fresh(self) -> tuple[Any, ...]:
        """The arguments, tensors as copies."""
        return tuple(a.clone() if isinstance(a, Tensor) else a for a in self.args)


def _random(*shape: int, seed: int = 60) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _query(requests: int = 1) -> Tensor:
    return _random(requests, ROWS, WIDTH, seed=61)


def _roles() -> Trial:
    out = torch.zeros(2 * CTA_THREADS, dtype=torch.int32)
    one = torch.tensor([1, 2, 2], dtype=torch.int32).repeat_interleave(128)
    return Trial((out,), {"out": (0, one.repeat(2))})


def _copied() -> Trial:
    cache = _random(2, TILE, WIDTH)
    return Trial((cache, torch.zeros_like(cache)), {"out": (1, cache)})


def _transposed() -> Trial:
    cache = _random(2, TILE, WIDTH)
    columns = cache.mT.contiguous()
    return Trial((cache, torch.zeros_like(columns)), {"out": (1, columns)})


def _cache() -> tuple[Tensor, Tensor, Tensor]:
    """Cache, block table, and the request's tokens in their order."""
    cache, table = _random(len(TABLE) + 1, TILE, WIDTH), torch.tensor(TABLE, dtype=torch.int32)
    return cache, table, cache[table.long()].reshape(-1, WIDTH)


def _gathered() -> Trial:
    cache, table, tokens = _cache()
    return Trial((cache, table, torch.zeros_like(tokens)), {"out": (2, tokens)})


def _scored() -> Trial:
    cache, table, tokens = _cache()
    q = _query()
    scores = q[0].float() @ tokens.float().T
    out = torch.zeros_like(scores)
    return Trial((q, cache, table, out), {"scores": (3, scores)}, 1e-3)


def attention(q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of rows q over tokens, both fp32."""
    scores = q.float() @ tokens.float().T * SCALE
    out = torch.softmax(scores, -1) @ tokens[:, :LATENT].float()
    return out, torch.logsumexp(scores, -1)


def _summed() -> Trial:
    cache, table, _ = _cache()
    # one tile's scores are hundreds above those of the others
    cache[TABLE[1]] *= 64
    tokens = cache[table.long()].reshape(-1, WIDTH)
    q, lse = _query(), torch.zeros(ROWS)
    _, expected = attention(q[0], tokens[:SEQ_LEN])
    return Trial((q, cache, table, lse, SEQ_LEN, SCALE_LOG2), {"lse": (3, expected)}, 1e-4)


def _attended() -> Trial:
    cache, table, tokens = _cache()
    q, lse = _query(), torch.zeros(ROWS)
    out, expected = attention(q[0], tokens[:SEQ_LEN])
    made = torch.zeros(ROWS, LATENT, dtype=torch.bfloat16)
    args = (q, cache, table, made, lse, SEQ_LEN, SCALE_LOG2)
    return Trial(args, {"lse": (4, expected), "out": (3, out)}, 1e-2)


def _split() -> Trial:
    count = [-(-n // TILE) for n in SEQ_LENS]
    q, cache = _query(len(count)), _random(sum(count) + 1, TILE, WIDTH)
    # a column of zeros: sums that are +0.0 exactly
    cache[..., 7] = 0.0
    order = torch.randperm(sum(count), generator=torch.Generator().manual_seed(1)).int()
    # entries behind a request's last page are no pages
    table = torch.full((len(count), max(count)), 1 << 20, dtype=torch.int32)
    outs, lses, first = [], [], 0
    for i, (n, tiles) in enumerate(zip(SEQ_LENS, count, strict=True)):
        table[i, :tiles] = order[first : first + tiles]
        tokens = cache[table[i, :tiles].long()].reshape(-1, WIDTH)[:n]
        out, lse = attention(q[i], tokens)
        outs.append(out)
        lses.append(lse)
        first += tiles
    made = torch.zeros(len(count), ROWS, LATENT, dtype=torch.bfloat16)
    mailbox = torch.zeros(WORKERS, 17, 128, 4, dtype=torch.int32)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    args = (q, cache, table, lens, made, torch.zeros(len(count), ROWS), mailbox, SCALE_LOG2)
    expected = {
        "lse": (5, torch.stack(lses)),
        "out": (4, torch.stack(outs)),
        "mailbox": (6, torch.zeros_like(mailbox)),
    }
    return Trial(args, expected, 1e-2)


@dataclass(frozen=True)
class Step:
    """One step. `functions` are the reader's."""

    number: str
    module: str
    functions: tuple[str, ...]
    #: what it is run on; equal in every run
    trial: Callable[[], Trial]
    #: schedules of the emulator under which it must be right
    schedules: tuple[str, ...] = ("fair",)

    @property
    def path(self) -> Path:
        """The author's module."""
        return FOLDER / f"{self.module}.py"

    @property
    def before(self) -> str:
        """Number of the step before; empty for the first one."""
        return "" if self.number == "60" else str(int(self.number) - 1)


_BOTH = ("fair", "late")

_STEPS = (
    Step("60", "empty_kernel", ("element_of", "producer_registers", "consumer_registers"), _roles),
    Step("61", "tile_copy", ("threads_over_tile", "numbers_of_thread", "box_of"), _copied),
    Step("62", "swizzled_tile", ("swizzled", "swizzle_numbers"), _transposed),
    Step("63", "page_load", ("page_of", "tile_bytes"), _gathered),
    Step("64", "one_barrier", ("full_arrivals", "full_parity", "announce"), _gathered, _BOTH),
    Step("65", "stage_ring", ("stage_of", "full_parity", "empty_parity"), _gathered, _BOTH),
    Step("66", "scores", ("multiply", "place_of"), _scored, _BOTH),
    Step("67", "online_softmax", ("new_max", "rescale", "lse_of"), _summed),
    Step("68", "values", ("transposed_layout", "rescale_rows"), _attended),
    Step("69", "split_keep_ab", ("first_of_share", "nonzero_word", "merge_factors"), _split, _BOTH),
)
STEPS = {made.number: made for made in _STEPS}


def step(number: str) -> Step:
    """Step `number` ("61"). Raises InvalidInput for no step."""
    if number not in STEPS:
        raise invalid("number", repr(number), tuple(STEPS))
    return STEPS[number]


def trial(number: str) -> Trial:
    """What step `number` is run on, and what it must give."""
    return step(number).trial()
