"""Checks of a call's arguments: each raises one error that says what was wrong.

tensors     one argument: type, dtype, rank, sizes, device, layout
shapes      the tensors that every call has
features    scales, sinks, masks, ranks, flags, and what excludes what
form_cache  all of that, once for equal shapes, dtypes, strides and flags
values      numbers, lengths, prefix sums, page ids, mask bits
capture     in debug mode, a workspace that two streams of one captured graph share
overlap     tensors that are written have memory of their own

They read arguments and nothing else: no check plans, and none looks up a build.
"""

from .form_cache import form_of

__all__ = ["form_of"]
