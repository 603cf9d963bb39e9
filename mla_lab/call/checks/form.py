"""Arguments -> Form: every check that reads no tensor's values, and each of them once.

Equal shapes, dtypes, strides and flags have one `Form`, remembered by `form_of`; that is what
makes a call's checks cheap in a serving loop.
"""

from __future__ import annotations

from types import NoneType

from torch import Tensor

from ...core import kv_cache as formats
from ...core.problem import Problem
from ..decode_args import Arguments, Features, Form
from . import features, shapes

#: forms that are remembered before all are forgotten; a serving process has dozens
MAX_FORMS = 4096

_FORMS: dict[object, Form] = {}


def form_of(given: Arguments) -> Form:
    """The form of a call. Raises InvalidInput, InvalidType or Unsupported, most specific first."""
    key = _signature(given)
    try:
        known = _FORMS.get(key)
    except TypeError:  # an unhashable argument is a wrong one: the checks say which
        return _check(given)
    if known is None:
        known = _check(given)
        if len(_FORMS) >= MAX_FORMS:
            _FORMS.clear()
        _FORMS[key] = known
    return known


def _signature(given: Arguments) -> tuple[object, ...]:
    a = given
    return (
        _look(a.query),
        _look(a.kv_cache),
        _look(a.block_tables),
        _look(a.seq_lens),
        _look(a.workspace_buffer),
        _look(a.out),
        _look(a.lse),
        _look(a.cum_seq_lens_q),
        _look(a.mask),
        _look(a.sinks),
        _look(a.bmm1_scale),
        _nonpositive(a.bmm1_scale),
        _look(a.bmm2_scale),
        _look(a.causal_seqlens_kv_global),
        (a.kv_lora_rank, a.qk_rope_head_dim, a.sparse_mla_top_k, a.max_q_len),
        (a.skip_softmax_threshold_scale_factor, a.enable_pdl, a.is_var_seq, a.plan is None),
        (a.uses_shared_paged_kv_idx, a.return_lse, a.return_lse_base, a.batch_invariant),
        (a.enable_dcp, a.cp_world, a.cp_rank),
        # True == 1 == 1.0, but they are not all right
        (type(a.is_var_seq), type(a.uses_shared_paged_kv_idx), type(a.return_lse)),
        (type(a.batch_invariant), type(a.enable_dcp), type(a.enable_pdl), type(a.max_q_len)),
        (type(a.kv_lora_rank), type(a.qk_rope_head_dim), type(a.sparse_mla_top_k)),
        (type(a.cp_world), type(a.cp_rank), type(a.skip_softmax_threshold_scale_factor)),
    )


def _look(value: object) -> object:
    """What a form may depend on: of a tensor all but its values, of anything else its type."""
    kind = type(value)
    if kind is NoneType or kind is float:
        return kind
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_look, value))
    return kind


def _nonpositive(scale: object) -> bool:
    return isinstance(scale, int | float) and scale <= 0


def _check(given: Arguments) -> Form:
    features.check_flags(given)
    latent_dim, rope_dim = shapes.check_dims(given)
    query = shapes.check_query(given, latent_dim + rope_dim)
    max_q_len = shapes.check_q_lens(given, query)
    cache = shapes.check_cache(given, latent_dim + rope_dim)
    capacity = shapes.check_tables(given, query, cache.page_size)
    features.check(given, query, max_q_len)
    out_dtype, lse_shape = shapes.check_results(given, query, latent_dim)
    shapes.check_workspace(given)
    longest = query.total_q if max_q_len is None else min(max_q_len, query.total_q)
    bounds = Problem(
        q_lens=(longest,) * query.batch,
        kv_lens=(capacity,) * query.batch,
        heads=query.heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        q_dtype=formats.DTYPE_NAMES[given.query.dtype],
        kv_format=cache.kv_format,
        out_dtype=formats.DTYPE_NAMES[out_dtype],
        page_size=cache.page_size,
        top_k=given.sparse_mla_top_k,
    )
    return Form(
        features=_features(given, longest),
        bounds=bounds,
        device=given.query.device,
        total_q=query.total_q,
        max_q_len=max_q_len,
        out_shape=(*given.query.shape[:-1], latent_dim),
        out_dtype=out_dtype,
        lse_shape=lse_shape,
        on_host=given.query.device.type == "cpu",
    )


def _features(given: Arguments, longest: int) -> Features:
    sparse = given.sparse_mla_top_k > 0
    pages, tables = given.kv_cache, given.block_tables
    page_elements = pages.shape[-1] * pages.shape[-2]
    return Features(
        ragged=given.cum_seq_lens_q is not None,
        causal=longest > 1 and given.mask is None and not sparse,
        mask=given.mask is not None,
        sinks=given.sinks is not None,
        lse=given.return_lse or given.lse is not None,
        sparse=sparse,
        skip_softmax=bool(given.skip_softmax_threshold_scale_factor),
        tensor_scales=isinstance(given.bmm1_scale, Tensor) or isinstance(given.bmm2_scale, Tensor),
        nonpositive_scale=_nonpositive(given.bmm1_scale),
        separate_tables=not given.uses_shared_paged_kv_idx,
        # a world of one rank is no world
        context_parallel=given.enable_dcp and given.cp_world > 1,
        batch_invariant=given.batch_invariant,
        strided_pages=pages.shape[0] > 1 and pages.stride(0) != page_elements,
        strided_tables=not tables.is_contiguous(),
        pdl=given.enable_pdl is True,
        no_pdl=given.enable_pdl is False,
        planned=given.plan is not None,
    )
