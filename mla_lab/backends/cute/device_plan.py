"""Plans in device memory: copied there once, or made there anew in every call.

    SelfScheduled                nothing: each worker finds its tiles, or pieces, from the lengths
    on_device(plan, device, n)   a Plan's words for n workers on a device, copied at first use
    PlanOnDevice                 bounds in place of lengths; on Blackwell a planner kernel cuts in
                                 each launch of a batch-invariant call
    Formula                      three numbers in place of a plan; each worker cuts for itself

None of them waits for the device. A copy is enqueued on the current stream, which later launches
are expected to use too, as they share a workspace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...call.workspace import Workspace
from ...core.dims import LATENT_DIM, ROPE_DIM
from ...core.errors import unsupported
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...plan import Choice, KernelConfig, Plan, WorkspaceLayout
from ...plan.choose import Kind
from ...plan.fixed_pieces import LEAST_BUNDLES, PieceCuts, most_slots
from ...plan.formula import MAX_SPLITS, fits_ll_slice, whole_pairs
from ...plan.gate import gated
from ...plan.launch_modes import costs_of, in_waves
from ...plan.promotion import promoted_slots
from ...plan.selection import Selection
from ...plan.self_schedule import BLOCK, MOST_LENGTH, Costs
from ...plan.workspace import LL_WORDS, MAX_GROUPS
from ..base import refuse_capture
from ..cuda.ops import DevicePlan, DevicePlanner
from .families import check_resident

#: policies and schedules of the plans that are a formula of each request's length
FORMULAS = (("fixed", "grid"), ("none", "grid"))
#: elements of a tensor that kernels count in 32 bits, and rows of a query that they suffice for
MOST_OFFSETS = 1 << 31
MOST_ROWS = (MOST_OFFSETS - 1) // (LATENT_DIM + ROPE_DIM)
#: the most query tokens that the causal mask counts (`small_quotient`)
MOST_TOKENS = (1 << 19) - 1
#: a Plan's words on each device that it was used on, for so many workers; they go when it goes
_COPIES: WeakKeyDictionary[Plan, dict[tuple[torch.device, int], DevicePlan]] = WeakKeyDictionary()


@dataclass(frozen=True)
class SelfScheduled:
    """A launch whose workers find their tiles from the lengths (see `plan.self_schedule`), or the
    pieces of a batch-invariant call (see `plan.fixed_pieces`)."""

    config: KernelConfig
    num_workers: int
    costs: Costs | PieceCuts
    #: of any batch and any lengths
    workspace: WorkspaceLayout
    #: of a dual build, see `plan.gate`
    gate: int = 0
    #: launched before; of pieces, for the call's requests of other numbers of query rows
    before: SelfScheduled | None = None
    #: see `backends.base.Planned`
    any_bound: bool = False

    @classmethod
    def of(cls, config: KernelConfig, gpu: Gpu, bounds: Problem) -> SelfScheduled:
        """One worker for each place on the card."""
        workers = gpu.workers(config.cluster)
        slots = 2 * workers + promoted_slots(bounds, config.tile_rows, workers, config)
        layout = WorkspaceLayout.of(slots, workers, config.tile_rows, bounds.latent_dim)
        return cls(config, workers, costs_of(config), layout)

    @classmethod
    def of_kinds(cls, kinds: list[Kind], gpu: Gpu, bounds: Problem, total_q: int) -> SelfScheduled:
        """The launches of a batch-invariant call, one for each kind of request, one behind the
        other. `total_q`: query tokens of all requests. Raises Unsupported on a card with too few
        workers.
        """
        # where workers are bundled all requests have as many row tiles: no more than the mean has
        rows = total_q * bounds.heads // bounds.batch
        first, *others = (cls._of_kind(kind, gpu, bounds.latent_dim, rows) for kind in kinds)
        for plan in others:
            layout = plan.workspace.behind(first.workspace)
            first = replace(plan, workspace=layout, before=first)
        return first

    @classmethod
    def _of_kind(cls, kind: Kind, gpu: Gpu, latent_dim: int, rows: int) -> SelfScheduled:
        config = kind.choice.config
        workers = gpu.workers(config.cluster)
        check_bundles(workers, gpu)
        tiles = max(1, min(-(-rows // config.tile_rows), workers // LEAST_BUNDLES))
        slots = max(most_slots(workers, most) for most in range(1, tiles + 1))
        layout = WorkspaceLayout.of(slots, slots, config.tile_rows, latent_dim)
        return cls(config, workers, kind.cuts, layout)

    @property
    def any_page(self) -> bool:
        """See `backends.base.Planned`."""
        return bool(self.config.option("gather"))

    @property
    def takes_few_rows(self) -> bool:
        """Whether requests of many query rows are left out, by this launch and the one before."""
        return isinstance(self.costs, PieceCuts) and not self.costs.many

    @property
    def word(self) -> int:
        """The launch argument `costs`."""
        if isinstance(self.costs, PieceCuts):
            return self.costs.packed
        return gated(self.costs.packed, self.gate)


def of_selection(selection: Selection, bounds: Problem, gpu: Gpu) -> SelfScheduled | Formula:
    """The launch of a selected build."""
    if selection.config.option("grid"):
        return Formula.of(selection.config, selection.num_splits, bounds, gpu)
    planned = SelfScheduled.of(selection.config, gpu, bounds)
    return replace(planned, gate=selection.gate)


@dataclass(frozen=True)
class PlanOnDevice:
    """What stays fixed of a plan that is made on the device: kernel, bounds, memory."""

    config: KernelConfig
    planner: DevicePlanner
    workspace: WorkspaceLayout

    @classmethod
    def of(cls, choice: Choice, bounds: Problem, total_q: int) -> PlanOnDevice:
        """The planner for calls within `bounds`, in the pieces of `choice`, whose policy is
        "fixed_size". Raises Unsupported where there are too many.
        """
        config = choice.config
        planner = DevicePlanner(
            heads=bounds.heads,
            max_batch=bounds.batch,
            max_q_len=max(bounds.q_lens),
            max_kv_len=max(bounds.kv_lens),
            tile_rows=config.tile_rows,
            tile_kv=config.tile_kv,
            num_workers=choice.num_workers,
            total_q=total_q,
            **dict(choice.knobs),
        )
        tiles, slots, groups = planner.capacity
        check_groups("plan", groups, config.cluster)
        check_partials(slots, config.tile_rows)
        layout = WorkspaceLayout.of(
            slots, groups, config.tile_rows, bounds.latent_dim, tiles, choice.num_workers
        )
        return cls(config, planner, layout)

    def words(self, workspace: Workspace) -> DevicePlan:
        """Where the planner writes."""
        return DevicePlan(
            tiles=workspace["tiles"],
            worker_begin=workspace["worker_begin"],
            counts=workspace["counts"],
        )


@dataclass(frozen=True)
class Formula:
    """A grid plan as its kernel takes it: nothing of it is in memory (see `plan.formula`)."""

    config: KernelConfig
    num_splits: int
    #: of the longest request, and those of the whole batch
    row_tiles: int
    groups: int
    workspace: WorkspaceLayout
    #: as in `SelfScheduled`
    any_bound: bool = False

    @classmethod
    def of(cls, config: KernelConfig, num_splits: int, bounds: Problem, gpu: Gpu) -> Formula:
        """Raises Unsupported for more workers than run at once, splits or row tiles than merge."""
        if not 1 <= num_splits <= MAX_SPLITS:
            raise unsupported("plan", f"{num_splits} splits a request", f"1 to {MAX_SPLITS}")
        row_tiles = max(1, -(-max(bounds.q_lens, default=0) * bounds.heads // config.tile_rows))
        groups = bounds.batch * row_tiles
        pairs = whole_pairs(row_tiles, config.option("pair", 1))
        if in_waves(config):
            if num_splits > 1:  # its launch is not cooperative: no CTA may wait for another
                got = f"{num_splits} splits a request in e4m3 with {config.tile_rows} rows a CTA"
                raise unsupported("plan", got, "whole requests")
        else:
            check_resident(config, bounds.batch * pairs * num_splits, gpu)
        check_groups("plan", groups, config.cluster)
        slots = groups * num_splits if num_splits > 1 else 0
        check_partials(slots, config.tile_rows)
        by_ll = config.option("fused_merge", 1) == 3 and slots > 0
        if by_ll:
            if not fits_ll_slice(slots, config.tile_rows, num_splits, bounds.latent_dim):
                got = f"{slots} partials of {config.tile_rows} rows"
                raise unsupported("plan", got, f"up to {LL_WORDS * 4:,} bytes of them")
            slots = 0
        layout = WorkspaceLayout.of(slots, groups, config.tile_rows, bounds.latent_dim, ll=by_ll)
        return cls(config, num_splits, row_tiles, groups, layout)

    @property
    def any_page(self) -> bool:
        """See `backends.base.Planned`."""
        return bool(self.config.option("gather"))

    @property
    def rows(self) -> int:
        """Query rows of a request that the grid has row tiles for."""
        return self.row_tiles * self.config.tile_rows

    @property
    def slots(self) -> int:
        """Partials that the launch has room for; 0 where no request is cut."""
        return self.groups * self.num_splits if self.num_splits > 1 else 0

    @classmethod
    def of_plan(cls, config: KernelConfig, plan: Plan, gpu: Gpu) -> Formula:
        """The formula that gives `plan`. Raises Unsupported where none does."""
        if (plan.policy, plan.schedule) not in FORMULAS:
            got = f"policy {plan.policy!r}, schedule {plan.schedule!r} for {config.kernel}"
            raise unsupported("plan", got, [f"{p!r}, {s!r}" for p, s in FORMULAS])
        splits = int(plan.splits().max(initial=1))
        return cls.of(config, max(1, splits), plan.problem, gpu)


def check_bundles(workers: int, gpu: Gpu) -> None:
    """Refuse fewer workers than the pieces of batch-invariant calls are made for: with fewer, one
    waits for an item behind its own.
    """
    if workers < LEAST_BUNDLES:
        got = f"True on {gpu.name} with {workers} workers on {gpu.sms} SMs"
        raise unsupported("batch_invariant", got, f"{LEAST_BUNDLES} workers or more")


def check_groups(name: str, groups: int, cluster: int) -> None:
    """Refuse more row tiles with partials than there are counters, one a CTA of the cluster."""
    if groups * cluster > MAX_GROUPS:
        supported = f"up to {MAX_GROUPS // cluster} with a cluster of {cluster}"
        raise unsupported(name, f"{groups} split row tiles", supported)


def check_offsets(query: Tensor, tables: Tensor) -> None:
    """Refuse tensors with elements that a kernel's 32-bit offsets do not reach, and more query
    tokens than its mask counts."""
    rows = query.numel() // query.shape[-1]
    tokens = rows // query.shape[-2]
    if tokens > MOST_TOKENS:
        raise unsupported("query", f"{tokens} tokens", f"up to {MOST_TOKENS} in a call")
    if rows > MOST_ROWS:
        raise unsupported("query", f"{rows} rows (tokens x heads)", f"up to {MOST_ROWS} in a call")
    words = tables.shape[0] * tables.stride(0)
    if words >= MOST_OFFSETS:
        got = f"{tables.shape[0]} rows {tables.stride(0)} entries apart"
        raise unsupported("block_tables", got, f"fewer than {MOST_OFFSETS} entries in all")


def check_line(plan: SelfScheduled, rows: int, tables: Tensor, page_size: int) -> None:
    """Refuse more blocks of all row tiles, with what a piece costs beside them, than 32 bits count.
    `rows` of all requests; requests are as long as their rows of `tables` allow, in which an entry
    stands for `page_size` tokens."""
    if not isinstance(plan.costs, Costs):
        return
    tiles = rows // plan.config.tile_rows + tables.shape[0]
    blocks = -(-tables.shape[-1] * page_size // BLOCK)
    if tiles * (blocks + plan.costs.piece) >= MOST_LENGTH:
        got = f"up to {tiles} row tiles of {blocks} blocks of {BLOCK} tokens"
        supported = f"fewer than {MOST_LENGTH} blocks and costs of pieces"
        raise unsupported("block_tables", got, supported)


def check_partials(slots: int, tile_rows: int) -> None:
    """Refuse more partials than a kernel's 32-bit offsets reach."""
    most = (MOST_OFFSETS - 1) // (tile_rows * LATENT_DIM)
    if slots > most:
        got = f"{slots} partials of {tile_rows} rows"
        raise unsupported("plan", got, f"up to {most}; a lower max_seq_len needs fewer")


def on_device(plan: Plan, device: torch.device, most: int) -> DevicePlan:
    """`plan`'s words on `device` for at most `most` workers, as many as run there at once; the
    first use copies them, on the current stream, behind which calls on other streams have to be.

    Raises InvalidInput where that first use is inside a CUDA graph's capture.
    """
    copies, key = _COPIES.setdefault(plan, {}), (device, most)
    if key not in copies:
        refuse_capture("plan", "copied to the device", device)
        tiles, begins = plan.tiles, folded(plan, most)
        if not plan.num_tiles:  # a launch without a row of tiles would find its own
            tiles, begins = np.zeros((1, tiles.shape[1])), np.zeros(max(2, len(begins)))
        copies[key] = DevicePlan(
            tiles=upload(tiles, device),
            worker_begin=upload(begins, device),
            counts=torch.empty(0, dtype=torch.int32, device=device),
        )
    return copies[key]


def folded(plan: Plan, most: int) -> np.ndarray:
    """`plan.worker_begin` of at most `most` workers: where it has more, neighbours are one, which
    runs the tiles of each in their order. Merges wait for partials of other workers, so that all of
    a launch must run at once.
    """
    workers = plan.num_workers
    if workers <= most:
        return plan.worker_begin
    return plan.worker_begin[np.arange(most + 1) * workers // most]


@cache  # for as long as the process lives: a captured graph reads it at each replay
def uniform_q_begin(batch: int, q_len: int, device: torch.device) -> Tensor:
    """Query-token prefix sums of a dense call, int32 [batch + 1] on `device`."""
    refuse_capture("query", "met for the first time, and its prefix sums are made", device)
    return constant(np.arange(batch + 1, dtype=np.int32) * q_len, device)


@cache  # as above
def equal_lengths(count: int, tokens: int, device: torch.device) -> Tensor:
    """Lengths of `count` requests of `tokens` tokens each, int32 [count] on `device`."""
    refuse_capture("query", "met for the first time, and its lengths are made", device)
    return constant(np.full(count, tokens, dtype=np.int32), device)


def constant(words: np.ndarray, device: torch.device) -> Tensor:
    """A copy of int32 words that is kept for good, and that any stream may read once this returns.
    A stream of its own copies it, so that the host waits for nothing that callers have enqueued."""
    if device.type != "cuda":
        return upload(words, device)
    with torch.cuda.stream(_copying(device)):
        made = upload(words, device)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    return made


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device's constants."""
    return torch.cuda.Stream(device)


def upload(words: np.ndarray, device: torch.device) -> Tensor:
    """A copy of int32 words on `device`, enqueued without waiting for it."""
    host = torch.from_numpy(np.array(words, dtype=np.int32, order="C"))  # rows of selected columns
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host
