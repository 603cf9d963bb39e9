"""Arguments -> Form: every check that reads no tensor's values, once for equal arguments.

Equal shapes, dtypes, strides and flags have one `Form`, kept by `form_of`; that makes the checks of
a call cheap in a serving loop.
"""

from __future__ import annotations

from numbers import Real
from types import NoneType

import torch
from torch import Tensor

from ...core import kv_cache as formats
from ...core.problem import Problem
from ..decode_args import INTEGERS, PARAMETERS, DecodeArgs, Rule, made_plain
from ..form import Features, Form
from . import features, shapes

#: forms that are kept before all are dropped; a serving process has dozens
MAX_FORMS = 4096

_FORMS: dict[object, Form] = {}


def form_of(args: DecodeArgs) -> Form:
    """The form of a call, whose integers are plain ones afterwards. Raises InvalidInput,
    InvalidType or Unsupported, most specific first.
    """
    made_plain(args, INTEGERS)
    key = key_of(args)
    try:
        known = _FORMS.get(key)
    except TypeError:  # an unhashable argument is a wrong one: the checks say which
        return _check(args)
    if known is None:
        known = _check(args)
        if len(_FORMS) >= MAX_FORMS:
            _FORMS.clear()
        _FORMS[key] = known
    return known


def key_of(args: DecodeArgs) -> tuple[object, ...]:
    """What a form depends on, of every argument by its rule."""
    return tuple([_part(p.arg.rule, getattr(args, p.name)) for p in PARAMETERS])


def _part(rule: Rule, value: object) -> object:
    if rule is Rule.EQUAL:  # True == 1 == 1.0, but not all of them are right
        return value, type(value)
    if rule is Rule.SAME:
        return value is None
    if rule is Rule.BOUND:
        return None
    if rule is Rule.POSITIVE_SCALE:
        return look(value), _nonpositive(value)
    return look(value)


def look(value: object) -> object:
    """Of a tensor all but its values, of a list that of its elements, of anything else its type."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_look_at_one(element) for element in value])
    return _look_at_one(value)


def _look_at_one(value: object) -> object:
    kind = type(value)
    if kind is NoneType or kind is float or not isinstance(value, Tensor):
        return kind
    if value.layout is not torch.strided or value.is_nested:
        return kind, value.layout
    return kind, value.shape, value.stride(), value.dtype, value.device, value.is_neg()


def _nonpositive(scale: object) -> bool:
    return isinstance(scale, Real) and bool(scale <= 0)


def _check(args: DecodeArgs) -> Form:
    features.check_flags(args)
    latent_dim, rope_dim = shapes.check_dims(args)
    query = shapes.check_query(args, latent_dim + rope_dim)
    max_q_len = shapes.check_q_lens(args, query)
    cache = shapes.check_cache(args, latent_dim + rope_dim)
    capacity = shapes.check_tables(args, query, cache.page_size)
    features.check(args, query, max_q_len)
    out_dtype, lse_shape = shapes.check_results(args, query, latent_dim)
    shapes.check_workspace(args)
    longest = query.total_q if max_q_len is None else min(max_q_len, query.total_q)
    bounds = Problem(
        q_lens=(longest,) * query.batch,
        kv_lens=(capacity,) * query.batch,
        heads=query.heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        q_dtype=formats.DTYPE_NAMES[args.query.dtype],
        kv_format=cache.kv_format,
        out_dtype=formats.DTYPE_NAMES[out_dtype],
        page_size=cache.page_size,
        top_k=args.sparse_mla_top_k,
    )
    return Form(
        features=_features(args, longest),
        bounds=bounds,
        device=args.query.device,
        total_q=query.total_q,
        max_q_len=max_q_len,
        out_shape=(*args.query.shape[:-1], latent_dim),
        out_dtype=out_dtype,
        lse_shape=lse_shape,
        on_host=args.query.device.type == "cpu",
    )


def _features(args: DecodeArgs, longest: int) -> Features:
    pages, tables = args.kv_cache, args.block_tables
    page_elements = pages.shape[-1] * pages.shape[-2]
    return Features(
        ragged=args.cum_seq_lens_q is not None,
        causal=longest > 1 and args.mask is None and not args.sparse,
        mask=args.mask is not None,
        sinks=args.sinks is not None,
        lse=args.return_lse or args.lse is not None,
        sparse=args.sparse,
        top_k_lens=args.sparse_mla_top_k_lens is not None,
        skip_softmax=bool(args.skip_softmax_threshold_scale_factor),
        tensor_scales=isinstance(args.bmm1_scale, Tensor) or isinstance(args.bmm2_scale, Tensor),
        nonpositive_scale=_nonpositive(args.bmm1_scale),
        separate_tables=not args.uses_shared_paged_kv_idx,
        # with cp_world == 1 the only rank has every token, and one query token sees a rank's all;
        # then `checks.values` wants lengths of all that agree with seq_lens. A ragged call may have
        # more tokens than its bound
        context_parallel=args.enable_dcp
        and args.cp_world > 1
        and (longest > 1 or args.mask is not None or args.cum_seq_lens_q is not None),
        batch_invariant=args.batch_invariant,
        strided_query=not args.query.is_contiguous(),
        strided_pages=pages.shape[0] > 1 and pages.stride(0) != page_elements,
        strided_tables=not tables.is_contiguous(),
        pdl=args.enable_pdl is True,
        no_pdl=args.enable_pdl is False,
        planned=args.plan is not None,
    )
