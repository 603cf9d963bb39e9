"""From a call's features to the options of its build, and to the operands of its launch.

The operands and their order are `call.feature_operands`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ...call.decode_args import DecodeArgs
from ...call.feature_operands import Empty, feature_operands
from ...call.form import Features, Form
from ...core.errors import unsupported
from ...plan.config import KernelConfig
from ...plan.launch_modes import E4M3, FORMATS, KEEP_AB_PERSISTENT, QUERY_HI_LO, SWAP_AB_PERSISTENT


def with_features(config: KernelConfig, features: Features) -> KernelConfig:
    """`config` with what the call's features compile in: with KV on M one kernel for all of them,
    with the query rows on M, where registers are short, one for each that costs time in the loop.
    """
    if config.option("gather") and config.kernel == "cute/swap_ab_sm90":
        return config
    skip = (("skip", 1),) if features.skip_softmax else ()
    if skip:
        _check_skips(config)
    if config.kernel == "cute/swap_ab_sm90":
        wanted = features.mask or features.sinks or features.tensor_scales or skip
        return replace(config, mask="tree", options=(*config.options, *skip)) if wanted else config
    if features.mask:
        config = replace(config, mask="tree")
    options = [*((("scales", 1),) if features.tensor_scales else ()), *skip]
    if features.sinks and not (features.mask or options):
        options = [("features", 1)]
    return replace(config, options=(*config.options, *options))


def _check_skips(config: KernelConfig) -> None:
    """Raises Unsupported for a kernel without skip-softmax. Of 16 bits it is where products are
    what takes the time, and in the one tile with registers for it; over eight bits in persistent
    builds.
    """
    operands = FORMATS.get((config.q_dtype, config.kv_format))
    eight_bits = operands in (E4M3, QUERY_HI_LO)
    if eight_bits and config.kernel == SWAP_AB_PERSISTENT.kernel and not config.option("grid"):
        return
    if eight_bits or (config.kernel, config.cluster) != (KEEP_AB_PERSISTENT.kernel, 1):
        got = f"{config.kernel} of {config.tile_rows} rows with skip-softmax"
        raise unsupported("plan", got, "one of 16 or 32 rows" if eight_bits else "one of 64 rows")


def number(scale: float | Tensor, factor: float = 1.0) -> float:
    """A scale as a number of the launch; of one on the device nothing is known here."""
    return 1.0 if isinstance(scale, Tensor) else float(scale) * factor


class Extras:
    """Picks a call's operands in the order of its build's tuple."""

    def __init__(self, config: KernelConfig, form: Form) -> None:
        self._takes = feature_operands(config)
        self._empty = Empty.on(form.device)
        self.wanted = bool(self._takes)

    def __call__(self, given: DecodeArgs) -> tuple[tuple[Any, ...], ...]:
        """The tuple, alone in a tuple; none for a plain kernel."""
        if not self.wanted:
            return ()
        return (tuple([take(given, self._empty) for take in self._takes]),)
