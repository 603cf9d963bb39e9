"""The tiny model of notebook 70: absorbed equals naive, drafts change no text, bits can stay."""

from __future__ import annotations

import pytest
import torch

from mla_lab.lab.tiny_decode import Decoder, kept_of, look_up
from mla_lab.lab.tiny_model import LATENT, ROPE, TinyModel, corpus, fitted


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return fitted()


def test_absorbed_decoding_gives_the_scores_of_attention_as_trained(model: TinyModel) -> None:
    prompt = corpus()[300:400]
    decoder = Decoder(model, [prompt], dtype="fp32")
    decoder.step()
    naive = model.logits(model.forward(torch.tensor(model.encode(prompt)))[-1]).exp()
    assert (decoder.requests[0].steps[0].scores.exp() - naive).abs().max() < 1e-4


def test_drafts_change_the_calls_and_not_the_text(model: TinyModel) -> None:
    prompt = corpus()[400:520] + corpus()[400:430]
    plain, drafted = (Decoder(model, [prompt], drafts=n).generate(10) for n in (0, 4))
    assert plain.text()[:10] == drafted.text()[:10]
    steps = drafted.requests[0].steps
    assert len(steps) <= 6
    assert sum(s.kept for s in steps) + len(steps) == len(drafted.text())
    cached = len(drafted.requests[0].tokens) - 1
    assert steps[-1].cached == cached
    assert drafted.bytes_cached() == cached * (LATENT + ROPE) * 2 * len(model.layers)


def test_a_neighbour_changes_no_bit_under_batch_invariance_and_some_without(
    model: TinyModel,
) -> None:
    text, same = corpus(), {}
    for invariant in (True, False):
        alone, both = (
            Decoder(model, p, invariant=invariant, dtype="fp32").generate(12)
            for p in ([text[800:1030]], [text[800:1030], text[900:1000]])
        )
        pairs = zip(alone.requests[0].steps, both.requests[0].steps, strict=True)
        same[invariant] = [torch.equal(a.scores, b.scores) for a, b in pairs]
    assert all(same[True])
    assert not all(same[False])


def test_a_draft_continues_what_stood_there_before() -> None:
    assert look_up([1, 2, 3, 9, 8, 1, 2, 3], 2) == [9, 8]
    assert look_up([1, 2, 3, 4], 2) == []
    assert kept_of([7, 8], [7, 5, 9]) == [7, 5]
    assert kept_of([], [3]) == [3]


def test_a_letter_that_was_not_trained_is_refused(model: TinyModel) -> None:
    with pytest.raises(ValueError, match="not in list"):
        model.encode("\u00e9")
