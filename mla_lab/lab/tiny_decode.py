"""Text from the tiny model by `mla_lab.api.decode`: a paged cache, drafts, plans as on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..api.decode import decode
from ..core.kv_cache import token_bytes
from ..core.problem import Problem
from ..plan import make_plan
from .tiny_model import HEADS, LATENT, ROPE, SCALE, TinyModel

PAGE = 64
#: workers that a plan divides a call over where bits may depend on the batch: few, so that a small
#: batch has to share them
WORKERS = 4
#: letters that a draft is looked up by
CLUE = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Step:
    """One verification of one request: tokens cached after it, the draft, how many of it were kept,
    and the scores of the first new letter.
    """

    cached: int
    draft: tuple[int, ...]
    kept: int
    scores: Tensor


@dataclass
class Request:
    """A prompt and what was generated; all tokens but the last have their rows in the cache."""

    tokens: list[int]
    prompt: int
    steps: list[Step] = field(default_factory=list)


def look_up(tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the last letters where they occurred before: a draft."""
    clue = list(tokens[-CLUE:])
    for at in range(len(tokens) - CLUE - 1, -1, -1):
        if list(tokens[at : at + CLUE]) == clue:
            return list(tokens[at + CLUE : at + CLUE + count])
    return []


def kept_of(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens that join the text: the draft as far as the model chose the same, and its next."""
    kept: list[int] = []
    for guess, own in zip(draft, chosen, strict=False):
        if guess != own:
            break
        kept.append(guess)
    return [*kept, chosen[len(kept)]]


class Decoder:
    """Generates for several prompts at once; greedy, so that the same scores give the same text.

    most: tokens of a request at most. invariant: `batch_invariant=True`; else a plan for this very
    batch, by FlashMLA's greedy rule. drafts: tokens that are looked up and verified in each call.
    dtype: of cache and query, "bf16" or "fp32".
    """

    def __init__(
        self,
        model: TinyModel,
        prompts: Sequence[str],
        *,
        most: int = 256,
        invariant: bool = True,
        drafts: int = 0,
        dtype: str = "bf16",
    ) -> None:
        self.model, self.invariant, self.drafts = model, invariant, drafts
        self.dtype = dtype
        self.requests = [Request(ids := model.encode(p), len(ids)) for p in prompts]
        pages = -(-most // PAGE)
        total = pages * len(prompts)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        self.table = order.int().reshape(len(prompts), pages)
        self.pages = torch.zeros(len(model.layers), total, PAGE, LATENT + ROPE, dtype=DTYPES[dtype])
        self.calls = 0
        for index, request in enumerate(self.requests):
            # all but the last: that one is the first new token
            if request.prompt > 1:
                self._forward([index], torch.tensor([request.tokens[:-1]]), [0])

    def text(self, index: int = 0) -> str:
        """What was generated for a prompt."""
        request = self.requests[index]
        return self.model.text(request.tokens[request.prompt :])

    def bytes_cached(self) -> int:
        """Bytes of the rows that are in use, in all layers."""
        rows = sum(len(request.tokens) - 1 for request in self.requests)
        return rows * token_bytes(self.dtype) * len(self.model.layers)

    def step(self) -> None:
        """One call a layer: each request's last token and its draft, verified together."""
        drafts = [look_up(r.tokens, self.drafts) for r in self.requests]
        new = [
            [r.tokens[-1], *draft, *[0] * (self.drafts - len(draft))]
            for r, draft in zip(self.requests, drafts, strict=True)
        ]
        first = [len(r.tokens) - 1 for r in self.requests]
        scores = self._forward(range(len(new)), torch.tensor(new), first)
        for request, draft, own in zip(self.requests, drafts, scores, strict=True):
            kept = kept_of(draft, own.argmax(-1).tolist())
            request.tokens += kept
            step = Step(len(request.tokens) - 1, tuple(draft), len(kept) - 1, own[0])
            request.steps.append(step)

    def generate(self, letters: int) -> Decoder:
        """Steps until each request has `letters` new ones; returns itself."""
        while min(len(r.tokens) - r.prompt for r in self.requests) < letters:
            self.step()
        return self

    def _forward(self, which: Sequence[int], tokens: Tensor, first: Sequence[int]) -> Tensor:
        """Scores [requests, new tokens, letters] of new tokens whose first stands at `first`."""
        self.calls += 1
        q_len = tokens.shape[1]
        positions = [torch.arange(at, at + q_len) for at in first]
        table = self.table[list(which)]
        lengths = torch.tensor([at + q_len for at in first], dtype=torch.int32)
        # one request at a time: a matrix product's order of additions may depend on its rows
        streams = [self.model.embed(row) for row in tokens]
        for layer, pages in zip(self.model.layers, self.pages, strict=True):
            queries = []
            for x, position, places in zip(streams, positions, table, strict=True):
                rows = layer.row(x, position).to(pages.dtype)
                pages[places[position // PAGE].long(), position % PAGE] = rows
                queries.append(layer.absorbed(x, position).transpose(0, 1))
            latents = self._attend(torch.stack(queries).to(self.pages.dtype), pages, table, lengths)
            streams = [
                layer.after(x, heads.float()) for x, heads in zip(streams, latents, strict=True)
            ]
        return torch.stack([self.model.logits(x) for x in streams])

    def _attend(self, query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        arguments = (query, pages, table, lengths)
        if self.invariant:
            out: Tensor = decode(*arguments, bmm1_scale=SCALE, batch_invariant=True)
            return out
        q_lens = (query.shape[1],) * len(lengths)
        kind = self.dtype
        problem = Problem(
            q_lens, tuple(lengths.tolist()), HEADS, q_dtype=kind, kv_format=kind, out_dtype=kind
        )
        plan = make_plan(problem, num_workers=WORKERS, policy="greedy")
        planned: Tensor = decode(*arguments, bmm1_scale=SCALE, plan=plan)
        return planned
