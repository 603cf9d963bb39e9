"""A language model of two layers of MLA whose weights come from a seed and a design, not a file.

Layer 1 looks back by position: head d attends to the token d before. Layer 2 looks for what
followed the same letters earlier in the text (induction heads). A network over both, which keeps
each place of the glossary as a key and its next letter as the value, scores the next letter.

`TinyModel.forward` attends as a model is trained, with keys and values of every head;
`mla_lab/lab/tiny_decode.py` generates from the same weights in the absorbed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .glossary import terms

#: the sizes of a cached row that the call has
LATENT, ROPE = 512, 64
HEADS, LETTER = 4, 48
#: the residual stream: a constant, five letters, and what layer 2 found
SLOTS = 2 + HEADS
WIDTH = 1 + SLOTS * LETTER
#: score of the token that a head looks for above others, and of one equal letter in layer 2
LOOK, MATCH = 2.0, 3.0
#: weight of a letter in the readout's keys, the newest first, and of what layer 2 found
WEIGHTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.5)
#: how much an equal letter counts for in the readout; letters of a window
SHARP, WINDOW, SEED = 8.0, 256, 70
#: entries of the glossary that it keeps
WORDS = 24
#: rope turns that tell neighbours apart; slow ones do not
FAST = 16
SCALE = 1.0


@dataclass(frozen=True)
class Layer:
    """Weights of one layer of MLA, heads first.

    query [4, WIDTH, n] and key [4, 512, n] multiply to scores; query_rope [4, WIDTH, 64] and
    key_rope [WIDTH, 64] are rotated; down [WIDTH, 512] makes the latent, value [4, 512, LETTER]
    reads it, out [4, LETTER, WIDTH] writes to the residual stream.
    """

    query: Tensor
    key: Tensor
    query_rope: Tensor
    key_rope: Tensor
    down: Tensor
    value: Tensor
    out: Tensor

    def row(self, x: Tensor, position: Tensor) -> Tensor:
        """What the cache keeps of tokens `x` [tokens, WIDTH]: 512 latent and 64 rotated numbers."""
        return torch.cat((x @ self.down, rotate(x @ self.key_rope, position)), -1)

    def ropes(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotated part of the queries [4, tokens, 64]."""
        flat = x @ self.query_rope.transpose(0, 1).flatten(1)
        return rotate(flat.unflatten(-1, (HEADS, ROPE)).transpose(0, 1), position)

    def absorbed(self, x: Tensor, position: Tensor) -> Tensor:
        """Queries [4, tokens, 576] over cached rows, the map to keys folded in."""
        latent = (x @ self.folded_query).unflatten(-1, (HEADS, LATENT)).transpose(0, 1)
        return torch.cat((latent, self.ropes(x, position)), -1)

    @cached_property
    def folded_query(self) -> Tensor:
        """Query and key maps as one [WIDTH, 4 x 512]."""
        return (self.query @ self.key.mT).transpose(0, 1).flatten(1)

    @cached_property
    def folded_value(self) -> Tensor:
        """Value and output maps as one [4 x 512, WIDTH]."""
        return (self.value @ self.out).flatten(0, 1)

    def after(self, x: Tensor, latents: Tensor) -> Tensor:
        """The stream after attention whose heads averaged latents [tokens, 4, 512]."""
        return x + latents.flatten(-2) @ self.folded_value


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of `x` [..., tokens, 64] at `position` [tokens]."""
    half = ROPE // 2
    angle = position[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def _slot(index: int) -> slice:
    return slice(1 + index * LETTER, 1 + (index + 1) * LETTER)


def _look_back() -> Layer:
    """Head d attends to the token d + 1 before: its query is the key's, turned back."""
    down, eye = torch.zeros(WIDTH, LATENT), torch.eye(LETTER)
    down[_slot(0), :LETTER] = eye
    key_rope, query_rope = torch.zeros(WIDTH, ROPE), torch.zeros(HEADS, WIDTH, ROPE)
    key_rope[0, :FAST] = 1.0
    for head in range(HEADS):
        turned = rotate(key_rope[:1], torch.tensor([-(head + 1)]))
        query_rope[head, 0] = LOOK * turned[0]
    value, out = torch.zeros(HEADS, LATENT, LETTER), torch.zeros(HEADS, LETTER, WIDTH)
    value[:, :LETTER] = eye
    for head in range(HEADS):
        out[head, :, _slot(1 + head)] = eye
    nothing = torch.zeros(HEADS, WIDTH, 1), torch.zeros(HEADS, LATENT, 1)
    return Layer(*nothing, query_rope, key_rope, down, value, out)


def _induction() -> Layer:
    """Head h matches the last h + 1 letters with those before a token, and takes that token."""
    size = SLOTS * LETTER
    down, eye = torch.zeros(WIDTH, LATENT), torch.eye(LETTER)
    down[1:, :size] = torch.eye(size)
    query, key = torch.zeros(HEADS, WIDTH, size), torch.zeros(HEADS, LATENT, size)
    for head in range(HEADS):
        for back in range(head + 1):
            ours, theirs = _slot(back), slice((back + 1) * LETTER, (back + 2) * LETTER)
            place = slice(back * LETTER, (back + 1) * LETTER)
            query[head, ours, place] = MATCH * eye
            key[head, theirs, place] = eye
    value, out = torch.zeros(HEADS, LATENT, LETTER), torch.zeros(HEADS, LETTER, WIDTH)
    for head in range(HEADS):
        value[head, :LETTER] = eye
        out[head, :, _slot(1 + HEADS)] = eye / HEADS
    ropes = torch.zeros(HEADS, WIDTH, ROPE), torch.zeros(WIDTH, ROPE)
    return Layer(query, key, *ropes, down, value, out)


def corpus() -> str:
    """The first words of the glossary as a text: `word: meaning`, a line each."""
    return "\n".join(f"{term.name}: {term.meaning}" for term in terms()[:WORDS]) + "\n"


class TinyModel:
    """Letters in, logits of the next letter out."""

    def __init__(self, text: str) -> None:
        torch.manual_seed(SEED)
        self.letters = sorted(set(text))
        codes = torch.randn(len(self.letters), LETTER)
        self.codes = codes / codes.norm(dim=1, keepdim=True)
        self.layers = (_look_back(), _induction())
        #: the readout: keys [places, WIDTH - 1], and the letter that follows each of them
        self.keys, self.next = torch.zeros(0, WIDTH - 1), torch.zeros(0, dtype=torch.int64)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, of letters in the glossary. Raises ValueError for another one."""
        return [self.letters.index(letter) for letter in text]

    def text(self, tokens: Sequence[int]) -> str:
        """The letters of token ids."""
        return "".join(self.letters[token] for token in tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream [..., WIDTH] before layer 1."""
        x = torch.zeros(*tokens.shape, WIDTH)
        x[..., 0] = 1.0
        x[..., _slot(0)] = self.codes[tokens]
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Log-probabilities [..., letters] of the next letter from the stream after layer 2."""
        scores = SHARP * (_weighted(x) @ self.keys.T)
        shares = torch.zeros(*x.shape[:-1], len(self.letters))
        letters = self.next.expand_as(scores)
        return shares.scatter_add_(-1, letters, scores.softmax(-1)).clamp_min(1e-30).log()

    def forward(self, tokens: Tensor) -> Tensor:
        """The stream [tokens, WIDTH] of a whole text, keys and values of every head made."""
        position = torch.arange(len(tokens))
        x = self.embed(tokens)
        later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        for layer in self.layers:
            row = layer.row(x, position)
            latent, rope = row[:, :LATENT], row[:, LATENT:]
            query, key = x @ layer.query, latent @ layer.key
            scores = query @ key.mT + layer.ropes(x, position) @ rope.T
            weights = (SCALE * scores).masked_fill(later, -torch.inf).softmax(-1)
            x = x + (weights @ (latent @ layer.value) @ layer.out).sum(0)
        return x


def _weighted(x: Tensor) -> Tensor:
    return x[..., 1:] * torch.tensor(WEIGHTS).repeat_interleave(LETTER).sqrt()


def fitted() -> TinyModel:
    """A model that keeps the glossary: one pass over its text, in about a second."""
    text = corpus()
    model = TinyModel(text)
    tokens = torch.tensor(model.encode(text))
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - 1, WINDOW)]
    streams = torch.cat([model.forward(window) for window in windows])[:-1]
    model.keys, model.next = _weighted(streams), tokens[1:]
    return model
