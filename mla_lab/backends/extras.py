"""What a launch takes beyond a plain call: sinks, scales on the device, a packed draft mask.

A kernel with the option features, or the mask "tree", takes one more argument, a tuple: sinks fp32
[heads], bmm1 and bmm2 fp32 [1], each without an element where the call has none, and for "tree"
the mask, uint16 [batch, q_len, words] or without an element.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..call import Arguments, Features, Form
from ..plan.config import KernelConfig


def with_features(config: KernelConfig, features: Features) -> KernelConfig:
    """`config` with what the call's features compile in: with KV on M one kernel for all of them,
    with the query rows on M, where registers are short, one with a mask and one without.
    """
    if config.option("gather"):
        return config
    wanted = features.mask or features.sinks or features.tensor_scales
    if features.mask or (wanted and config.kernel == "cute/kv_m"):
        return replace(config, mask="tree")
    return replace(config, options=(*config.options, ("features", 1))) if wanted else config


def number(scale: float | Tensor, factor: float = 1.0) -> float:
    """A scale as a number of the launch; of one on the device nothing is known here."""
    return 1.0 if isinstance(scale, Tensor) else float(scale * factor)


class Extras:
    """Picks a call's tensors in the order of its kernel."""

    def __init__(self, config: KernelConfig, form: Form) -> None:
        self.wanted = config.mask == "tree" or bool(config.option("features"))
        self._mask = config.mask == "tree"
        self.nothing = torch.empty(0, dtype=torch.float32, device=form.device)
        self._no_mask = torch.empty(0, 0, 0, dtype=torch.uint16, device=form.device)

    def __call__(self, given: Arguments) -> tuple[tuple[Tensor, ...], ...]:
        """The tuple, alone in a tuple; none for a plain kernel."""
        if not self.wanted:
            return ()
        chosen = (self.sinks(given), self._cell(given.bmm1_scale), self.out_scale(given))
        if not self._mask:
            return (chosen,)
        mask = self._no_mask if given.mask is None else given.mask
        return ((*chosen, mask.unsqueeze(0) if mask.dim() == 2 else mask),)

    def sinks(self, given: Arguments) -> Tensor:
        """fp32 [heads], or no element."""
        sinks = given.sinks
        if sinks is None:
            return self.nothing
        return sinks if isinstance(sinks, Tensor) else sinks[0]

    def out_scale(self, given: Arguments) -> Tensor:
        """bmm2_scale in memory fp32 [1], or no element."""
        return self._cell(given.bmm2_scale)

    def _cell(self, scale: float | Tensor) -> Tensor:
        return scale.view(1) if isinstance(scale, Tensor) else self.nothing
