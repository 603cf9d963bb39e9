"""The parameters of the MLA decode call, declared once.

`DecodeArgs` has FlashInfer's names, order and defaults, and an `Arg` for each: how its value is
compared with an earlier call's, and what a recorded definition says of it. Derived from this list:

    call.signature    the public functions: their signatures and what they forward
    call.checks.form  the key of a form
    api.replay        the comparison of a repeated call
    api.torch_op      the schema of the torch operation
    capture           inputs and axes of a recorded definition
    reference         the oracle's argument
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from enum import Enum, auto
from inspect import Parameter
from numbers import Integral
from typing import Annotated, Any, NamedTuple, get_type_hints

from torch import Tensor

from ..core.dims import LATENT_DIM, ROPE_DIM
from ..plan.tile import Plan

#: bound of a scale that is a number: fp32 holds it, and its product with log2(e)
MAX_SCALE = 1.7e38


class Rule(Enum):
    """When an argument is as in an earlier call, whose form and launch then hold for this one."""

    #: the same object, or equal and of the same type
    EQUAL = auto()
    #: the same object
    SAME = auto()
    #: a tensor of the same shape; its dtype, device, layout and alignment the kernel's entry checks
    TENSOR = auto()
    #: as TENSOR; where the plan is the same for other key lengths, rows of any number of pages
    TABLES = auto()
    #: as TENSOR, with any number of pages above 0
    PAGES = auto()
    #: the same tensor where the launch uses it, else any that passes the same checks
    WORKSPACE = auto()
    #: a number up to the same power of two, or another one for which the plan is the same;
    #: exactly the same with a caller's plan
    BOUND = auto()
    #: a number with a magnitude below `MAX_SCALE`, or a tensor of one element
    SCALE = auto()
    #: as SCALE, and above 0
    POSITIVE_SCALE = auto()


#: no default, as `inspect` has it
REQUIRED = Parameter.empty


class Arg(NamedTuple):
    """What is derived from one parameter."""

    rule: Rule = Rule.EQUAL
    #: default in the native call, where FlashInfer's call has none
    native: Any = REQUIRED
    #: axes of a recorded definition; "rows", "pages" and "tables" depend on the call
    axes: str | None = None
    #: a recorded definition has it as a number, if it is given
    recorded: bool = False
    #: what a recorded definition says of it
    note: str = ""
    #: the call writes to it
    written: bool = False
    #: bytes of which its address must be a multiple, to a kernel
    alignment: int = 1


def _tensor(axes: str | None = None, note: str = "", alignment: int = 1) -> Arg:
    return Arg(Rule.TENSOR, axes=axes, note=note, alignment=alignment)


_PLAIN, _TENSOR = Arg(), _tensor()
_STORED = "Latent and rope of each token; 656 bytes: 512 e4m3, 4 fp32 scales, 64 bf16 rope."
_TABLES = "Page ids; with a dimension of 2 those of keys, then of values; if sparse, token slots, "
_SKIPPED = "The reference skips nothing; dropped mass is at most this factor."
_SCALE1 = "q_scale x k_scale x softmax scale, natural units."
_DRAFTS = "Words of uint16: bit c of draft row r makes draft column c visible to it."


@dataclass(slots=True, eq=False)
class DecodeArgs:
    """The arguments of one call as the caller gave them, unchecked.

    Tensors are contiguous where nothing else is said, on one device, and never copied or written,
    except out, lse and workspace_buffer, which share no byte with another tensor of the call. No
    gradient passes through a call: its results require none, whatever its tensors do.

    query: dense [batch, q_len, heads, 576], or ragged [total_q, heads, 576] with cum_seq_lens_q;
        512 latent columns, then 64 rope. bf16, fp16, e4m3; for teaching fp32 and fp64. Rows may
        lie apart, at multiples of 16 bytes: heads at one distance, tokens at one (backends torch
        and cuda).
    kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576] in the query's dtype, or e4m3
        under a bf16 query; or [..., 656] bytes, typed uint8, int8 or e4m3 (512 e4m3, 4 fp32 scales,
        64 bf16 rope). There may be gaps between pages. Slots behind a request's length may hold
        anything.
    workspace_buffer: 1-D uint8 or int8, at an address that is a multiple of 64 bytes, zeroed once
        before its first use. It holds the partials and merge counters of the call in flight: calls
        that may run at the same time (two streams, or two threads on two streams) need a buffer
        each, which debug mode checks where both are captured into one graph; calls of one stream
        share one. The torch backend takes memory of its own. None or an empty one suffices for a
        plan without partials; None in the native call allocates.
    qk_nope_head_dim: any; the absorbed form does not use it.
    kv_lora_rank, qk_rope_head_dim: (512, 64); on the torch backend also (256, 64).
    block_tables: int32 [batch, max_pages] page ids, with gaps between rows or without; with
        uses_shared_paged_kv_idx=False [batch, 2, max_pages], row 0 for the keys, row 1 for the
        values. With sparse_mla_top_k: [batch, q_len, top_k] or ragged [total_q, top_k] token
        slots (page x page_size + offset); -1 is skipped, a duplicate counts again.
    seq_lens: int32 [batch], tokens of each request, its new ones included; 0 is legal. More than
        its row of block_tables names raises where they are read, and is NaN in its rows of out and
        lse where they are not (debug mode reads them). A sparse call reads what its slots say,
        whatever the lengths.
    max_seq_len: tokens, a bound of seq_lens for scheduling; None, in the native call, is the
        number of tokens that a row of block_tables can name.
    sparse_mla_top_k: slots of a query token; 0 is dense.
    out: bf16, fp16, or with an e4m3 query e4m3, [*query.shape[:-1], 512]; default a new bf16 one
        (fp32 and fp64 queries: their own dtype).
    bmm1_scale: q_scale x k_scale x softmax scale, natural units: a number, or fp32 of one element
        (finite; checked in debug mode, a number always). A number of 0 or less is no call for the
        CuTe kernels; in memory they take any. Scores times it are fp32: above 1e6 in magnitude
        weights lose digits, and above 1e8 results are undefined.
    bmm2_scale: v_scale x o_scale, applied to out only: a number, or fp32 of one element.
    sinks: fp32 [heads] or a list of one: exp(sink) is added to the denominator of each head.
    skip_softmax_threshold_scale_factor: a KV tile is skipped for a row tile where each row's
        exp(tile_max - running_max) is below factor / seq_len (arXiv:2512.12087); 0 skips nothing,
        nor do kernels for small pages and separate tables, whose results are exact (`explain`).
    enable_pdl: programmatic dependent launch. None: where the device has it; True raises elsewhere;
        False: without it, or with it where only such a build is here and none can be compiled.
    backend: "auto", "torch", "cute", "cuda"; "xqa" is cuda, "cute-dsl" cute, "trtllm-gen" auto;
        "emulate": the PTX of cute on a CPU, up to 2^21 scores (see `backends.emulate`), and
        "emulate_sm100" what a Blackwell card would run;
        "cute-keep-ab-gather": tokens fetched one by one, for 64 query heads per CTA
        (`backends.cute.gather_backend`).
        A backend that is named runs the call or raises.
    is_var_seq: False promises equal lengths, a hint for scheduling without effect on results.
    uses_shared_paged_kv_idx: keys and values have one table of pages.
    lse, return_lse, return_lse_base: fp32 [total_q, heads] or [batch, q_len, heads], natural
        (None, "basee") or "base2"; without the sink. A given lse is written in any case.
    cute_dsl_impl: "auto" or "monolithic"; "modular", whose rows are not causal, where q_len is 1.
    cum_seq_lens_q: int32 [batch + 1], prefix sums of the query tokens, from 0 to total_q. Others
        raise where they are read; where they are not, no memory outside of out and lse is written,
        and a request that has tokens outside of [0, total_q] is NaN.
    max_q_len: a bound of the query tokens of a request; saves a GPU the copy that would read it.
        Rows of a request that has more are right, or NaN in out and lse.
    enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global: decode context parallel. The cache
        holds tokens rank, rank + world, ... of each request, seq_lens counts those, and int32
        [batch] all of them (checked where lengths are read). With several query tokens or a mask
        seq_lens may count tokens behind a request's end too, which no row sees. Needs return_lse;
        `context_parallel.merge` merges and takes the sinks.
    sparse_mla_top_k_lens: int32 [batch] or [total_q], 0 to top_k: how many of the slots of a
        query token, or of each of a request's, count (to a kernel more are top_k, and less than 0
        are 0). The others may hold anything. Where there
        are as many requests as query tokens, of query tokens.
    kv_scale_format, multi_ctas_kv_counter_buffer, use_fp16_softmax: other values than the defaults
        (or False) are not supported.
    mask: uint16 [batch, q_len, ceil(q_len / 32) x 2], ragged [total_q, ceil(max_q_len / 32) x 2]:
        bit c of draft row r, least significant first, makes draft column c visible to it
        (`mla_lab.core.masks`); bits past a request's query tokens are 0, which is checked where
        values are read, and count for nothing. Without a mask draft tokens are causal.
    batch_invariant: the bits of a request's result do not depend on the rest of the batch; with a
        plan they may differ from those without. With 8192 keys and a plan on an H200 a request
        takes 10.1 or 6.6 times as long alone (16 or 128 heads), and calls of 1024 to 8192 keys at
        most 1.15 times from batch 64 on (data/records/h200_invariant.jsonl); without a plan 1.03
        times in the mean, 1.10 at most (data/records/h200_plain_invariant.jsonl).
    plan: made for these lengths and heads; default the backend's own, which "cuda" always takes.
    """

    query: Annotated[
        Tensor, _tensor("rows num_heads head_dim_qk", "512 latent columns, then 64 rope.", 16)
    ]
    kv_cache: Annotated[
        Tensor, Arg(Rule.PAGES, axes="pages page_size kv_width", note=_STORED, alignment=16)
    ]
    workspace_buffer: Annotated[
        Tensor | None,
        Arg(Rule.WORKSPACE, None, "workspace_size", note="Zeroed before first use.", written=True),
    ]
    qk_nope_head_dim: Annotated[int, Arg(native=128)]
    kv_lora_rank: Annotated[int, Arg(native=LATENT_DIM)]
    qk_rope_head_dim: Annotated[int, Arg(native=ROPE_DIM)]
    block_tables: Annotated[Tensor, Arg(Rule.TABLES, axes="tables", note=_TABLES + "-1 for none.")]
    seq_lens: Annotated[Tensor, _tensor("batch_size", "Tokens of each request, new ones included.")]
    max_seq_len: Annotated[int | None, Arg(Rule.BOUND, native=None, recorded=True)]
    sparse_mla_top_k: Annotated[int, _PLAIN] = 0
    out: Annotated[Tensor | None, Arg(Rule.TENSOR, written=True, alignment=16)] = None
    bmm1_scale: Annotated[
        float | Tensor, Arg(Rule.POSITIVE_SCALE, axes="one", recorded=True, note=_SCALE1)
    ] = 1.0
    bmm2_scale: Annotated[
        float | Tensor,
        Arg(Rule.SCALE, axes="one", recorded=True, note="v_scale x o_scale, on the output."),
    ] = 1.0
    sinks: Annotated[
        Tensor | list[Tensor] | tuple[Tensor, ...] | None,
        _tensor("num_heads", "One more term exp(sink) in each head's denominator."),
    ] = None
    skip_softmax_threshold_scale_factor: Annotated[
        float | None, Arg(recorded=True, note=_SKIPPED)
    ] = None
    enable_pdl: Annotated[bool | None, _PLAIN] = None
    backend: Annotated[str, _PLAIN] = "auto"
    is_var_seq: Annotated[bool, _PLAIN] = True
    uses_shared_paged_kv_idx: Annotated[bool, _PLAIN] = True
    lse: Annotated[Tensor | None, Arg(Rule.TENSOR, written=True)] = None
    return_lse: Annotated[bool, _PLAIN] = False
    cute_dsl_impl: Annotated[str, _PLAIN] = "auto"
    kv_scale_format: Annotated[str, _PLAIN] = "auto"
    cum_seq_lens_q: Annotated[
        Tensor | None, _tensor("batch_size_plus_1", "Prefix sums of query tokens.")
    ] = None
    max_q_len: Annotated[int | None, Arg(recorded=True)] = None
    multi_ctas_kv_counter_buffer: Annotated[Tensor | None, _TENSOR] = None
    sparse_mla_top_k_lens: Annotated[Tensor | None, _TENSOR] = None
    enable_dcp: Annotated[bool, _PLAIN] = False
    cp_world: Annotated[int, _PLAIN] = 1
    cp_rank: Annotated[int, _PLAIN] = 0
    causal_seqlens_kv_global: Annotated[Tensor | None, _TENSOR] = None
    use_fp16_softmax: Annotated[bool | None, _PLAIN] = None
    return_lse_base: Annotated[str | None, _PLAIN] = None
    _: KW_ONLY
    mask: Annotated[Tensor | None, _tensor("rows mask_words", _DRAFTS, 4)] = None
    batch_invariant: Annotated[bool, _PLAIN] = False
    plan: Annotated[Plan | None, Arg(Rule.SAME)] = None
    #: the native call's: check every value, which on a GPU copies to the host
    debug: Annotated[bool | None, _PLAIN] = field(default=None, init=False)
    #: made by the native call, where workspace_buffer and max_seq_len may be None
    native: Annotated[bool, _PLAIN] = field(default=True, init=False)

    @property
    def sparse(self) -> bool:
        """A list of token slots for each query token."""
        return self.sparse_mla_top_k > 0

    @property
    def sink(self) -> Tensor | None:
        """fp32 [heads], or None."""
        sinks = self.sinks
        return sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0]


class Declared(NamedTuple):
    """One parameter: its name, default (or `REQUIRED`), type, and what is derived from it."""

    name: str
    default: Any
    type: Any
    arg: Arg
    keyword_only: bool
    #: a parameter of FlashInfer's call, or of ours behind its list
    public: bool


def parameters_of(arguments: type) -> tuple[Declared, ...]:
    """The fields of a class of arguments, in their order."""
    hints = get_type_hints(arguments, include_extras=True)
    found = []
    for f in fields(arguments):
        kind, arg = hints[f.name].__origin__, hints[f.name].__metadata__[0]
        default = REQUIRED if f.default is MISSING else f.default
        found.append(Declared(f.name, default, kind, arg, bool(f.kw_only), f.init))
    return tuple(found)


PARAMETERS = parameters_of(DecodeArgs)


def integers_of(parameters: Sequence[Declared]) -> tuple[str, ...]:
    """Names of the parameters that are an int, or an int and None."""
    return tuple(p.name for p in parameters if p.type in (int, int | None))


INTEGERS = integers_of(PARAMETERS)


def made_plain(args: object, integers: Sequence[str]) -> bool:
    """Put a plain int in place of NumPy's, and of any other integer but a bool, in `args`. Returns
    whether there was one. What is no integer is left to the checks.
    """
    found = False
    for name in integers:
        value = getattr(args, name)
        if type(value) is not int and isinstance(value, Integral) and not isinstance(value, bool):
            setattr(args, name, int(value))
            found = True
    return found


def native_args(**named: Any) -> DecodeArgs:
    """Arguments with the native call's defaults."""
    defaults = {p.name: p.arg.native for p in PARAMETERS if p.arg.native is not REQUIRED}
    return DecodeArgs(**{**defaults, **named})
