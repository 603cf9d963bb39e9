"""Calls that are made again and again: checked once, then repeated.

The layers of a step, and steps of equal shapes, make the same call with other tensors. What a
backend returned for the first of them repeats it, after a look at what the kernel's own entry does
not check: shapes, flags, scales, plan and workspace. (The entry checks ranks, dtypes, devices,
contiguity and alignment of each tensor; where it refuses, the long way is taken, which says why.)

Debug mode is decided when a call is first seen: a repeated one does not look at the environment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .backends.base import Planned, Repeat
from .call import Arguments, Call

#: remembered calls; a new plan every step makes them many, so that all are forgotten at times
MAX_REPEATS = 256

#: arguments that a launch follows and no tensor shows
_FLAGS = itemgetter(
    *map(
        Arguments._fields.index,
        (
            "kv_lora_rank",
            "qk_rope_head_dim",
            "sparse_mla_top_k",
            "skip_softmax_threshold_scale_factor",
            "enable_pdl",
            "is_var_seq",
            "uses_shared_paged_kv_idx",
            "return_lse",
            "return_lse_base",
            "max_q_len",
            "enable_dcp",
            "cp_world",
            "cp_rank",
            "batch_invariant",
            "max_seq_len",
            "bmm1_scale",
            "bmm2_scale",
        ),
    )
)
#: tensors that a plain call has not
_EXTRA = itemgetter(*map(Arguments._fields.index, ("sinks", "mask", "causal_seqlens_kv_global")))

Result = Tensor | tuple[Tensor, Tensor]


class Remembered:
    """One call that ran, and what repeats it."""

    def __init__(self, call: Call, backend: str, repeat: Repeat, buffer: Any) -> None:
        given = call.given
        self.backend = backend
        self.repeat = repeat
        self.form = call.form
        self.plan = given.plan
        self.buffer = buffer
        # of the last three, a bound and two scales, only the kind is kept here
        flags = _FLAGS(given)
        self.kinds = tuple(map(type, flags))
        self.flags = flags[:-3]
        self.shapes = _shapes(given)
        self.plain = _is_plain(given)
        self.extra_shapes = () if self.plain else _extra_shapes(given)
        self.longest = _longest(given)

    def fits(self, given: Arguments, backend: str) -> bool:
        """Whether `given` is this call with other tensors. (Whether they are tensors at all, the
        kernel's entry sees; True and 1 are equal, so that kinds of flags are looked at too.)
        """
        flags = _FLAGS(given)
        return bool(
            given.plan is self.plan
            and (self.buffer is None or self.buffer() is given.workspace_buffer)
            and flags[:-3] == self.flags
            and tuple(map(type, flags)) == self.kinds
            and _shapes(given) == self.shapes
            and _is_plain(given) == self.plain
            and (self.plain or _extra_shapes(given) == self.extra_shapes)
            and _longest(given) == self.longest
            and backend == self.backend
            and (isinstance(given.bmm1_scale, Tensor) or 0.0 < given.bmm1_scale < math.inf)
            and (isinstance(given.bmm2_scale, Tensor) or -math.inf < given.bmm2_scale < math.inf)
        )

    def run(self, given: Arguments) -> Result:
        """Results as `decode` returns them."""
        form, out, lse = self.form, given.out, given.lse
        if out is None:
            out = torch.empty(form.out_shape, dtype=form.out_dtype, device=form.device)
        if lse is None and given.return_lse:
            lse = torch.empty(form.lse_shape, dtype=torch.float32, device=form.device)
        self.repeat(given, out, lse)
        return (out, lse) if given.return_lse and lse is not None else out


_REMEMBERED: dict[object, Remembered] = {}


def again(given: Arguments, backend: str) -> Result | None:
    """The results of a call like one that ran before; None where there is no such call."""
    try:
        known = _REMEMBERED.get((id(given.plan), given.query.shape))
        if known is not None and known.fits(given, backend):
            return known.run(given)
    except (AttributeError, TypeError, ValueError):
        pass  # something is wrong with an argument: the long way says what
    return None


def remember(call: Call, backend: str, planned: Planned, repeat: Repeat) -> None:
    """Keep `repeat` for calls like `call`, as long as the caller's workspace lives."""
    given = call.given
    if given.causal_seqlens_kv_global is not None or isinstance(given.sinks, Sequence):
        return
    key, buffer = (id(given.plan), given.query.shape), None
    if planned.workspace.nbytes:
        if given.workspace_buffer is None:
            return
        buffer = ref(given.workspace_buffer, lambda _: _REMEMBERED.pop(key, None))
    if len(_REMEMBERED) >= MAX_REPEATS:
        _REMEMBERED.clear()
    _REMEMBERED[key] = Remembered(call, backend, repeat, buffer)


def forget() -> None:
    """Forget every call: the next of each kind is checked in full."""
    _REMEMBERED.clear()


def _shapes(given: Arguments) -> tuple[Any, ...]:
    """Shapes that must agree with each other: the pages of a cache may be as many as they like."""
    out, lse, sums = given.out, given.lse, given.cum_seq_lens_q
    return (
        given.block_tables.shape,
        given.seq_lens.shape,
        None if out is None else out.shape,
        None if lse is None else lse.shape,
        None if sums is None else sums.shape,
    )


def _is_plain(given: Arguments) -> bool:
    """Whether all tensors are those of a plain call; kinds tell where a scale is one."""
    sinks, mask, lengths = _EXTRA(given)
    return sinks is None and mask is None and lengths is None


def _extra_shapes(given: Arguments) -> tuple[Any, ...]:
    """Shapes of what a plain call has not. A list of sinks has none, so that it raises."""
    _, _, lengths = extra = _EXTRA(given)
    if lengths is not None:
        raise ValueError
    return tuple(None if value is None else value.shape for value in extra)


def _longest(given: Arguments) -> int | None:
    """The length that a launch depends on: a plan's check on the bound itself, a plan that the
    device makes on the next power of two.
    """
    bound = given.max_seq_len
    return bound if bound is None or given.plan is not None else (bound - 1).bit_length()
