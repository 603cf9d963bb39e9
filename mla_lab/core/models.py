"""Models with multi-head latent attention, as far as decode attention sees them.

The figures belong to the `config.json` that the authors publish with the weights: DeepSeek-V2-Lite,
DeepSeek-V2, DeepSeek-V3 and -R1 (deepseek-ai on Hugging Face), Kimi-K2-Instruct and its later
releases (moonshotai). They were checked not against those files themselves but against copies of
their text in public repositories (November 2026): heads, layers and `rope_scaling` of the DeepSeek
models as whole files; of Kimi K2 as the fields that training and serving code repeats, factor 32
with the first release (128 K tokens) and 64 with Instruct-0905 and Thinking (256 K).
All of them cache one latent of 512 and one rope key of 64 a token, and score with queries of
128 + 64 = 192 columns before absorption, so the softmax scale starts from 1 / sqrt(192).

YaRN (arXiv:2309.00071) stretches the context by `factor` and sharpens the softmax. DeepSeek's
modelling code multiplies the scale by mscale^2 where
mscale = 0.1 * mscale_all_dim * ln(factor) + 1: 1.3689 for V3 and R1 (factor 40), so 0.1352.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .dims import LATENT_DIM, ROPE_DIM
from .errors import invalid
from .problem import Problem


@dataclass(frozen=True)
class Model:
    """One model's decode attention. `heads` counts the whole model, not a rank."""

    name: str
    title: str
    heads: int
    layers: int
    yarn_factor: float
    mscale_all_dim: float
    nope_dim: int = 128
    rope_dim: int = ROPE_DIM
    latent_dim: int = LATENT_DIM

    @property
    def mscale(self) -> float:
        """YaRN's attention factor; 1 where the context is not stretched."""
        if self.yarn_factor <= 1:
            return 1.0
        return 0.1 * self.mscale_all_dim * math.log(self.yarn_factor) + 1.0

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores in natural units: mscale^2 / sqrt(nope + rope)."""
        return self.mscale**2 / math.sqrt(self.nope_dim + self.rope_dim)

    def heads_per_rank(self, tensor_parallel: int = 1) -> int:
        """Query heads on one of `tensor_parallel` ranks; the latent cache is whole on each."""
        if tensor_parallel < 1 or self.heads % tensor_parallel:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise invalid("tensor_parallel", tensor_parallel, f"a divisor of the heads: {divisors}")
        return self.heads // tensor_parallel

    def problem(
        self,
        kv_lens: Sequence[int],
        q_lens: Sequence[int] | int = 1,
        *,
        tensor_parallel: int = 1,
        **fields: object,
    ) -> Problem:
        """One layer's decode call on one rank; further `fields` go to `Problem`."""
        lens = (q_lens,) * len(kv_lens) if isinstance(q_lens, int) else tuple(q_lens)
        return Problem(
            q_lens=lens,
            kv_lens=tuple(kv_lens),
            heads=self.heads_per_rank(tensor_parallel),
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            **fields,  # type: ignore[arg-type]
        )


#: by the name that the command line takes
MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v2-lite", "DeepSeek-V2-Lite", 16, 27, 40.0, 0.707),
        Model("deepseek-v2", "DeepSeek-V2", 128, 60, 40.0, 0.707),
        Model("deepseek-v3", "DeepSeek-V3", 128, 61, 40.0, 1.0),
        Model("deepseek-r1", "DeepSeek-R1", 128, 61, 40.0, 1.0),
        Model("kimi-k2", "Kimi K2", 64, 61, 32.0, 1.0),
        Model("kimi-k2-0905", "Kimi K2 0905", 64, 61, 64.0, 1.0),
    )
}


def get_model(name: str) -> Model:
    """The model called `name`, as in `MODELS` (case does not matter)."""
    try:
        return MODELS[name.lower()]
    except KeyError:
        raise invalid("model", repr(name), tuple(MODELS)) from None
