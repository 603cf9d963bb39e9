"""A kernel launch made ready: all of a call that equal calls share.

`Launch.of` resolves kernel, plan words and workspace slices once; calling it takes the tensors of
one call and enqueues, in order, the device planner (of a `PlanOnDevice`), the attention kernel and
the change of lse's base. By a formula it is the attention kernel alone. It allocates nothing and
waits for nothing.

Host time is what matters here: views cost a microsecond each, so that the kernel takes query,
out and lse in the caller's shapes, and slices of a workspace are made once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import jit
from ...call.bind import Call
from ...call.decode_args import DecodeArgs
from ...call.feature_operands import LOG2_E
from ...call.form import Form
from ...call.slots import slots_of_rows
from ...call.workspace import Workspace
from ...core.errors import invalid, unsupported
from ...core.gpu import Gpu
from ...core.kv_cache import BYTE_TYPES
from ...plan import KernelConfig, Plan
from ...plan.formula import MAX_SPLITS, ll_words
from ...plan.launch_modes import SWAP_AB_PERSISTENT, mode_of
from ..base import Replay, believes_max_q_len, fill_with_nan, refuse_capture
from ..cuda import ops as cuda_ops
from ..cuda.ops import DevicePlan, DevicePlanner
from .catalogue import build_for
from .device_plan import (
    Formula,
    PlanOnDevice,
    SelfScheduled,
    check_groups,
    check_line,
    check_offsets,
    check_partials,
    equal_lengths,
    on_device,
    uniform_q_begin,
)
from .families import FAMILIES, config_for_plan, tiles_of
from .feature_args import Extras, number
from .token_gather import gathers

#: what tensor maps and 16-byte stores require
PLACES = "data at multiples of 16 bytes, pages apart by multiples of 16 bytes"


@dataclass(frozen=True)
class Shapes:
    """How a caller's tensors differ from what the kernel takes; True costs a view a call."""

    #: query and out are [total_q, heads, ...]: a batch of one, to a kernel
    ragged: bool
    #: kv_cache is [pages, 1, page_size, width]
    cache_4d: bool
    #: tokens of 656 bytes are typed int8 or e4m3
    cache_bytes: bool
    #: `sparse_mla_top_k_lens` is of requests, and not of query tokens
    lens_of_requests: bool
    #: lse is [batch, q_len, heads]
    lse_3d: bool
    #: block_tables is [batch, q_len, top_k]
    table_3d: bool
    lse_base2: bool

    @classmethod
    def of(cls, call: Call) -> Shapes:
        """The shapes of a checked call."""
        return cls(
            ragged=call.features.ragged,
            cache_4d=call.args.kv_cache.dim() == 4,
            cache_bytes=typed_otherwise(call),
            lens_of_requests=call.features.top_k_lens
            and call.args.sparse_mla_top_k_lens is not slots_of_rows(call.args, call.form.total_q),
            table_3d=call.features.sparse and call.args.block_tables.dim() == 3,
            lse_3d=call.lse is not None and call.lse.dim() == 3,
            lse_base2=call.lse is not None and call.args.return_lse_base == "base2",
        )

    @property
    def plain(self) -> bool:
        views = self.ragged or self.cache_4d or self.cache_bytes or self.lse_3d or self.table_3d
        return not (views or self.lens_of_requests)


def typed_otherwise(call: Call) -> bool:
    """Whether a cache of 656-byte tokens has another dtype than uint8, which kernels take."""
    packed = call.form.bounds.kv_format == "fp8_656"
    return packed and call.args.kv_cache.dtype is not torch.uint8


#: words of plans that CUDA graphs were captured with: each replay reads them
_CAPTURED: list[DevicePlan] = []


def keep_for_graph(words: DevicePlan) -> None:
    """Keeps a plan's words for as long as the process lives, where a graph is being captured."""
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(words)


class Launch:
    """Repeats one launch for calls of the same form, plan and workspace."""

    def __init__(
        self,
        call: Call,
        config: KernelConfig,
        words: DevicePlan | SelfScheduled | Formula,
        workspace: Workspace,
        planner: DevicePlanner | None = None,
        before: Launch | None = None,
    ) -> None:
        """Work comes from `words`, which `planner` writes in each call where there is one; `before`
        is for the call's other requests.
        """
        form = call.form
        self.config = config
        self.attend = self.kernel_of(config, form.device)
        self._planner, self._before = planner, before
        self._words = words if isinstance(words, DevicePlan) else None
        #: of a caller's plan, which may go while a graph that was captured with it stays
        self._of_plan = self._words if planner is None and form.device.type == "cuda" else None
        self._walk: tuple[Tensor, ...] = ()
        self._numbers: tuple[int, ...] = ()
        q_len = 0 if form.features.ragged else form.bounds.q_lens[0]
        if isinstance(words, SelfScheduled):
            self._walk = found_work(config, workspace, form.device)
            q_len = 1 if form.features.sparse else q_len
            self._numbers = (words.num_workers, q_len, words.word)
        elif isinstance(words, DevicePlan):
            self._walk = (words.tiles, words.worker_begin)
            self._numbers = (len(words.worker_begin) - 1, q_len, 0)
        else:
            q_len = 1 if form.features.sparse else q_len
            self._numbers = (words.num_splits, words.row_tiles, q_len)
        self._between = between(config, words, workspace, form.bounds.latent_dim)
        self._heads = form.bounds.heads
        self._shapes = Shapes.of(call)
        self._base2 = self._shapes.lse_base2
        self._fills = leaves_rows_out(call, words, planner)
        if before is not None:
            before._base2 = False  # the last launch changes the base of all rows
            before._fills, self._fills = False, self._fills or before._fills
        self._extras = Extras(config, form)
        self._no_lse = torch.empty(0, 0, dtype=torch.float32, device=form.device)
        if planner is not None:
            load_planner(form.device)
        self._q_begin, self._lengths = requests_of(form, words)
        self._lens, self._total_q = form.features.top_k_lens, form.total_q
        alone = planner is None and not self._fills
        alone = alone and (before is None or before.repeat is not before)
        as_given = self._shapes.plain and not self._base2 and not self._extras.wanted
        #: does the same; where one kernel takes its arguments as they are given, in half the time
        self.repeat: Replay = self.enqueue() if alone and as_given else self

    @classmethod
    def of(
        cls,
        call: Call,
        plan: Plan | PlanOnDevice | SelfScheduled | Formula,
        workspace: Workspace,
        gpu: Gpu,
    ) -> Launch:
        """Raises InvalidInput or Unsupported where no kernel can run `plan`, or where something
        that happens once would happen inside the capture of a graph.
        """
        check_offsets(call.args.query, call.args.block_tables)
        bounds, device = call.form.bounds, call.form.device
        if isinstance(plan, SelfScheduled):
            rows, tables = call.form.total_q * bounds.heads, call.args.block_tables
            check_line(plan, rows, tables, 1 if bounds.top_k else bounds.page_size)
        wanted = config_of(plan) if isinstance(plan, Plan) else plan.config
        config = build_for(wanted, bounds, call.args.enable_pdl, call.features)
        if isinstance(plan, PlanOnDevice):
            return cls(call, config, plan.words(workspace), workspace, plan.planner)
        if isinstance(plan, SelfScheduled) and plan.before is not None:
            own = Workspace(plan.before.workspace, workspace.buffer)
            before = cls.of(call, plan.before, own, gpu)
            return cls(call, config, plan, workspace, before=before)
        if not isinstance(plan, Plan):
            return cls(call, config, plan, workspace)
        if config.option("grid"):
            return cls(call, config, Formula.of_plan(config, plan, gpu), workspace)
        return cls(call, config, on_device(plan, device, gpu.workers(config.cluster)), workspace)

    @staticmethod
    def kernel_of(config: KernelConfig, device: torch.device) -> Callable[..., Any]:
        """What `attend` calls."""
        return kernel(config, device)

    def stamped(self, build: KernelConfig, stamps: Tensor) -> Launch:
        """This launch by `build`, which leaves its moments in `stamps` (option "stamps")."""
        other = copy.copy(self)
        other.attend = kernel(build, stamps.device)
        other._walk = (*self._walk, stamps)
        other.repeat = other if self.repeat is self else other.enqueue()
        return other

    def __call__(self, given: DecodeArgs, out: Tensor, lse: Tensor | None) -> None:
        """Enqueue everything for one call's tensors."""
        if self.repeat is not self:
            self.repeat(given, out, lse)
            return
        if self._of_plan is not None:
            keep_for_graph(self._of_plan)
        if self._fills:
            fill_with_nan(out, lse)
        if self._before is not None:
            self._before(given, out, lse)
        query, cache, result, lse_rows = given.query, given.kv_cache, out, lse
        tables = given.block_tables
        if not self._shapes.plain:
            query, cache, result, lse_rows = self._view(query, cache, out, lse)
            if self._shapes.table_3d:
                tables = tables.flatten(0, 1)
        if lse_rows is None:
            lse_rows = self._no_lse
        q_begin: Any = given.cum_seq_lens_q if self._q_begin is None else self._q_begin
        if self._planner is not None and self._words is not None:
            self._planner(given.seq_lens, q_begin, self._words)
        try:
            self.attend(
                query,
                cache,
                result,
                lse_rows,
                *self._between,
                tables,
                self._lengths_of(given),
                q_begin,
                *self._walk,
                self._heads,
                number(given.bmm1_scale, LOG2_E),
                number(given.bmm2_scale),
                *self._numbers,
                *self._extras(given),
            )
        except ValueError as error:
            got = f"tensors that the kernel refuses ({error})"
            raise invalid("query, kv_cache, out", got, PLACES) from None
        if self._base2:
            lse_rows.mul_(LOG2_E)

    def enqueue(self) -> Replay:
        """The attention kernel alone, or two of them, with the tensors as they are and scales that
        are numbers: the commonest call. What never changes is bound here.
        """
        attend, heads, lengths = self.attend, self._heads, self._lengths
        numbers, lens = self._numbers, self._lens
        no_lse, q_begin = (jit.converted(attend, x) for x in (self._no_lse, self._q_begin))
        partial_out, partial_lse, counters = (jit.converted(attend, x) for x in self._between)
        walk = [jit.converted(attend, x) for x in self._walk]
        of_plan = self._of_plan

        def enqueue(given: DecodeArgs, out: Tensor, lse: Tensor | None) -> None:
            if of_plan is not None:
                keep_for_graph(of_plan)
            try:
                attend(
                    given.query,
                    given.kv_cache,
                    out,
                    no_lse if lse is None else lse,
                    partial_out,
                    partial_lse,
                    counters,
                    given.block_tables,
                    given.sparse_mla_top_k_lens
                    if lens
                    else given.seq_lens
                    if lengths is None
                    else lengths,
                    given.cum_seq_lens_q if q_begin is None else q_begin,
                    *walk,
                    heads,
                    float(given.bmm1_scale) * LOG2_E,
                    float(given.bmm2_scale),
                    *numbers,
                )
            except ValueError as error:
                got = f"tensors that the kernel refuses ({error})"
                raise invalid("query, kv_cache, out", got, PLACES) from None

        if self._before is None:
            return enqueue
        first = self._before.repeat

        def enqueue_both(given: DecodeArgs, out: Tensor, lse: Tensor | None) -> None:
            first(given, out, lse)
            enqueue(given, out, lse)

        return enqueue_both

    def _lengths_of(self, given: DecodeArgs) -> Tensor:
        """Keys of each request; in a sparse call the slots of each query token."""
        if self._lens:
            lens = slots_of_rows(given, self._total_q)
            return given.seq_lens if lens is None else lens
        return given.seq_lens if self._lengths is None else self._lengths

    def _view(
        self, query: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        shapes = self._shapes
        if shapes.ragged:
            query, out = query.unsqueeze(0), out.unsqueeze(0)
        if shapes.cache_4d:
            cache = cache.squeeze(1)
        if shapes.cache_bytes and cache.dtype in BYTE_TYPES:  # others the kernel refuses
            cache = cache.view(torch.uint8)
        if shapes.lse_3d and lse is not None:
            lse = lse.flatten(0, 1)
        return query, cache, out, lse


def leaves_rows_out(
    call: Call, words: DevicePlan | SelfScheduled | Formula, planner: DevicePlanner | None
) -> bool:
    """Whether rows are left out where `max_q_len` or `max_seq_len` is too small, or where a ragged
    call has other query tokens than its plan, which holds the row tiles of those that it was made
    for. None are where each request has row tiles for all query tokens of the call. A plan made on
    the device is empty where requests of a ragged call share query tokens.
    """
    form = call.form
    believes = believes_max_q_len(form.features.ragged, form.max_q_len, form.total_q)
    if planner is not None:
        bounds = replace(planner, max_kv_len=form.bounds.kv_lens[0])
        return form.features.ragged or planner.capacity != bounds.capacity
    if not form.features.ragged or form.features.sparse:
        return False
    if isinstance(words, SelfScheduled):
        return believes and words.takes_few_rows
    plan, heads = call.args.plan, form.bounds.heads
    rows = words.rows if isinstance(words, Formula) else 0
    if plan is not None and isinstance(words, DevicePlan):
        rows = -(-min(plan.problem.q_lens) * heads // plan.tile_rows) * plan.tile_rows
    return (believes or plan is not None) and rows < form.total_q * heads


def rows_were_read(call: Call, plan: Any) -> bool:
    """Whether the grid has the row tiles of query tokens that were read for this call alone, so
    that no other call may repeat its launch.
    """
    form = call.form
    if not isinstance(plan, Formula) or not form.features.ragged or form.features.sparse:
        return False
    return form.max_q_len is None and plan.rows < form.total_q * form.bounds.heads


def requests_of(
    form: Form, words: DevicePlan | SelfScheduled | Formula
) -> tuple[Tensor | None, Tensor | None]:
    """Prefix sums of query tokens and lengths in place of the caller's, each None where those are
    taken: of a ragged call the sums. To workers that find their tiles, each query token of a sparse
    call is a request of its own, of top_k tokens; to a formula it is as long as its row of slots,
    and there are no lengths. In place of both is `sparse_mla_top_k_lens`, where a call has it.
    """
    if form.features.sparse and isinstance(words, Formula):
        begins = None if form.features.ragged else uniform_begins(form)
        return begins, torch.empty(0, dtype=torch.int32, device=form.device)
    if form.features.sparse and isinstance(words, SelfScheduled):
        lengths = equal_lengths(form.total_q, form.bounds.top_k, form.device)
        return uniform_q_begin(form.total_q, 1, form.device), lengths
    if form.features.ragged:
        return None, None
    return uniform_begins(form), None


def uniform_begins(form: Form) -> Tensor:
    """Prefix sums of query tokens of a call whose requests have equally many."""
    return uniform_q_begin(form.bounds.batch, form.bounds.q_lens[0], form.device)


@cache
def no_tiles(device: torch.device) -> Tensor:
    """In place of a plan's tiles, where workers find theirs themselves."""
    return torch.empty(0, 8, dtype=torch.int32, device=device)


def between(
    config: KernelConfig,
    words: DevicePlan | SelfScheduled | Formula,
    workspace: Workspace,
    latent_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """partial_out, partial_lse and counters; of the LL merge, which does not use its counters, the
    partials and their softmax stats. Without elements where the plan has no partials.
    """
    rows, by_ll = config.tile_rows, isinstance(words, Formula) and config.option("fused_merge") == 3
    if not workspace.layout.slices:
        device = workspace.buffer.device
        # each made as it is: a view of an empty tensor keeps strides that a kernel would refuse
        out = torch.empty(0, rows, latent_dim, dtype=torch.float32, device=device)
        lse = torch.empty((0, 4) if by_ll else (0, rows), dtype=torch.float32, device=device)
        return out, lse, torch.empty(0, dtype=torch.int32, device=device)
    if not isinstance(words, Formula) or not by_ll:
        return workspace["partial_out"], workspace["partial_lse"], workspace["counters"]
    partials = workspace["ll_partials"]
    end, more = ll_words(words.slots, rows, words.num_splits, latent_dim)
    out = partials[:end].view(words.slots, rows, latent_dim)
    return out, partials[end : end + more].view(-1, 4), workspace["counters"]


def found_work(
    config: KernelConfig, workspace: Workspace, device: torch.device
) -> tuple[Tensor, ...]:
    """What a launch that schedules itself takes in place of a plan: no tiles, what its CTAs keep,
    and room for the LL merge of a dual build.
    """
    kept = (no_tiles(device), workspace["schedule"].view(-1))
    return (*kept, workspace["ll_partials"].view(-1)) if config.option("dual") else kept


def config_of(plan: Plan) -> KernelConfig:
    """The kernel for a caller's plan. Raises Unsupported where none can run it."""
    if gathers(plan.problem):
        got = f"a plan for pages of {plan.problem.page_size}, {plan.problem.top_k} slots a token"
        raise unsupported("plan", got, "None where tokens are fetched one by one")
    config = plan.config or config_for_plan(plan)
    family = FAMILIES.get(config.kernel) if config else None
    if config is None or family is None or plan.tile_kv != family.tile_kv:
        has = tiles_of(plan.problem)
        raise unsupported("plan", f"work tiles of {plan.tile_rows} x {plan.tile_kv}", has)
    if config.option("grid"):
        return config
    check_groups("plan", plan.num_groups, config.cluster)
    check_partials(plan.num_slots, config.tile_rows)
    splits = int(plan.splits().max(initial=1))
    if mode_of(config) == SWAP_AB_PERSISTENT.name and splits > MAX_SPLITS:
        got = f"{splits} splits of a row tile with {config.tile_rows} rows"
        raise unsupported("plan", got, f"up to {MAX_SPLITS}, or 64 rows")
    return config


@cache
def kernel(config: KernelConfig, device: torch.device) -> Callable[..., Any]:
    """The tvm-ffi function of a configuration on a device, compiled at its first use."""
    refuse_capture("decode", f"the first use of {config.name()}", device)
    return jit.kernel(config, jit.device_arch(device.index)).launch


@cache
def load_planner(device: torch.device) -> None:
    """Load the device planner's kernel. Raises InvalidInput inside a CUDA graph's capture."""
    refuse_capture("decode", "the first use of cuda/planner", device)
    cuda_ops.kernel(device)
