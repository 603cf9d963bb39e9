"""validate: what the caller gave -> a `Call`, or an error that says what was wrong.

tensors    one argument: type, dtype, rank, sizes, device, layout
shapes     the tensors that every call has
features   scales, sinks, masks, ranks, flags, and what excludes what
form       all of that once for equal shapes, dtypes, strides and flags
values     lengths, prefix sums, page ids, mask bits
"""

from __future__ import annotations

import math

import torch

from ...core.errors import invalid, invalid_type
from ...plan import Plan
from ..decode_args import Arguments, Call, Form
from . import tensors as argument
from .form import form_of
from .values import check_debug, read_lengths

__all__ = ["bind", "form_of"]


def bind(given: Arguments, form: Form, *, reads_lengths: bool, debug: bool) -> Call:
    """The call of checked arguments: lengths read where they may be, results allocated.

    reads_lengths: the backend plans on the host; on a GPU that is a synchronisation.
    debug: every value is checked, which on a GPU synchronises too.
    """
    _check_unformed(given)
    lengths = read_lengths(given, form, reads_lengths or debug)
    if debug:
        check_debug(given, form, lengths)
    out, lse = given.out, given.lse
    if out is None:
        out = torch.empty(form.out_shape, dtype=form.out_dtype, device=form.device)
    if lse is None and given.return_lse:
        lse = torch.empty(form.lse_shape, dtype=torch.float32, device=form.device)
    return Call(form, given, lengths, out, lse)


def _check_unformed(given: Arguments) -> None:
    """What may change from call to call without a new form."""
    if given.plan is not None and not isinstance(given.plan, Plan):
        raise invalid_type("plan", type(given.plan).__name__, "a mla_lab Plan")
    if given.max_seq_len is not None:
        argument.integer("max_seq_len", given.max_seq_len, 0)
    for name in ("bmm1_scale", "bmm2_scale"):
        scale = getattr(given, name)
        if isinstance(scale, float) and not math.isfinite(scale):
            raise invalid(name, scale, "a finite number")
