"""Model presets: heads a rank, and the softmax scale with YaRN's mscale."""

from __future__ import annotations

import math

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.core.models import MODELS, Model, get_model
from mla_lab.core.problem import Problem


@pytest.mark.parametrize(
    ("name", "heads", "layers", "mscale", "scale"),
    [
        ("deepseek-v2-lite", 16, 27, 1.2608, 0.11472),
        ("deepseek-v2", 128, 60, 1.2608, 0.11472),
        ("deepseek-v3", 128, 61, 1.3689, 0.13523),
        ("deepseek-r1", 128, 61, 1.3689, 0.13523),
        ("kimi-k2", 64, 61, 1.3466, 0.13086),
        ("kimi-k2-0905", 64, 61, 1.4159, 0.14468),
    ],
)
def test_presets(name, heads, layers, mscale, scale):
    model = get_model(name.upper())
    assert (model.heads, model.layers) == (heads, layers)
    assert model.mscale == pytest.approx(mscale, abs=5e-5)
    assert model.softmax_scale == pytest.approx(scale, abs=5e-6)
    assert (model.latent_dim, model.rope_dim) == (512, 64)


def test_every_preset_is_held_here():
    assert len(MODELS) == 6


def test_v3_scale_as_written_in_the_contract():
    assert get_model("deepseek-v3").softmax_scale == pytest.approx(
        1.3689**2 / math.sqrt(192), rel=1e-4
    )
    assert round(get_model("deepseek-r1").softmax_scale, 4) == 0.1352


def test_without_yarn_the_scale_is_plain():
    model = Model("plain", "Plain", heads=8, layers=1, yarn_factor=1.0, mscale_all_dim=1.0)
    assert model.softmax_scale == pytest.approx(192**-0.5, rel=1e-15)


def test_heads_per_rank():
    model = get_model("deepseek-v3")
    assert [model.heads_per_rank(ranks) for ranks in (1, 2, 8, 128)] == [128, 64, 16, 1]
    for ranks in (0, 3, 256):
        with pytest.raises(InvalidInput, match=f"tensor_parallel: got {ranks}; supported: a div"):
            model.heads_per_rank(ranks)


def test_problem_of_a_rank():
    problem = get_model("kimi-k2").problem((100, 200), 2, tensor_parallel=4, page_size=32)
    assert problem == Problem((2, 2), (100, 200), heads=16, page_size=32)
    assert get_model("kimi-k2").problem((7, 8), (1, 3)).q_lens == (1, 3)


def test_unknown_model():
    with pytest.raises(InvalidInput, match=r"model: got 'gpt-2'; supported: .*deepseek-v3"):
        get_model("gpt-2")
