"""Decode context parallel: the tokens of a call on several ranks, their results merged by lse.

Token i of a request is on rank i mod world. Each rank attends its own tokens and returns out,
normalised by its own lse, and that lse; `merge` weights them into the result over all tokens. Sinks
enter in `merge`, once. `gather_and_merge` is the same by torch.distributed, in each rank's process.
On a Hopper card one kernel merges results in bf16 and fp16 of a latent of 512 of up to 32 ranks
(`cute.rank_merge`); elsewhere PyTorch does.
`shard` makes the calls of all ranks from one call, for tests and notebooks;
`reference.merge_partials` is the merge in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import rank_kernels
from ..call.checks import tensors as argument
from ..call.checks.features import LSE_BASES
from ..call.checks.shapes import WIDE
from ..core import kv_cache as formats
from ..core.errors import InvalidInput, Unsupported, invalid, invalid_type, under_names, unsupported
from ..reference.inputs import DecodeInputs, page_table
from .peer_memory import PeerMemory, group_of

#: of results that a merge takes, of at least 16 bits
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: of torch 2.13 and newer, and its name before
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: collectives as one; of no public interface yet, and so not counted on
_coalesced: Any = getattr(dist, "_coalescing_manager", None)
#: (bytes of all ranks, own bytes) of lse and of out
Transfers: TypeAlias = list[tuple[Tensor, Tensor]]


def merge(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    sinks: Tensor | Sequence[Tensor] | None = None,
    lse_base: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The result over all ranks, merged in rank order in float32, or float64 where out is float64.

    outs: of each rank [..., heads, latent], any floating dtype of at least 16 bits; lses: of each
    rank fp32 or fp64 [rows, heads] or out's shape without latent, in `lse_base` (None and "basee":
    natural; "base2"). Where a rank has no key for a row (lse -inf), its out may hold anything; the
    kernel takes an lse below -1e38 for none.
    sinks: fp32 [heads] or a list of one, entered here, once.
    Returns out in the dtype and shape of one rank's, and lse in its shape and base, sink excluded.
    CUDA graphs may capture the call, after one equal call. Raises InvalidInput (InvalidType for a
    wrong type or dtype) or Unsupported, before anything is launched.
    """
    _check(outs, lses)
    _check_merged(lses[0].shape[-1], outs[0].device, sinks, lse_base)
    heads = outs[0].shape[-2]
    parts = torch.stack([lse.reshape(-1, heads) for lse in lses]).to(_wide(outs[0].dtype))
    rows = torch.stack([out.reshape(-1, *out.shape[-2:]) for out in outs])
    out, lse = _merged(rows, parts, sinks, lse_base)
    return out.view(outs[0].shape), lse.view(lses[0].shape)


def gather_and_merge(
    out: Tensor,
    lse: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    sinks: Tensor | Sequence[Tensor] | None = None,
    lse_base: str | None = None,
    peers: PeerMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge` over the ranks of `group` (None: all), called by each of them with its own result, of
    the same shapes and dtypes on all of them.

    out and lse of all ranks are gathered as they are, and merged in rank order, so that every rank
    returns the same bits where all of them merge alike: on the same kind of card, all or none with
    the kernel's build. NCCL gathers both in one launch; other backends gather the lses first, and
    PyTorch computes the weights while the outs are on the way. With `peers` one kernel exchanges
    and merges, over its group and by its rules. CUDA graphs may capture the call, after one equal
    call. Raises Unsupported for an out or lse that autograd follows: a collective has no
    derivative.
    """
    _check_own(out, lse)
    _check_merged(lse.shape[-1], lse.device, sinks, lse_base)
    if peers is not None:
        if not isinstance(peers, PeerMemory):
            raise invalid_type("peers", type(peers).__name__, "PeerMemory or None")
        if group not in (None, peers.group):
            raise invalid("group", "another than that of peers", "None, or that of peers")
        return peers.merged(out, lse, _one(sinks), base2=lse_base == "base2")
    return start_gather(out, lse, group=group).merged(sinks=sinks, lse_base=lse_base)


class Done:
    """A collective that has ended, or that another's wait includes."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class Gathering:
    """Results of all ranks on their way, in rank order; `merged` waits for them."""

    #: fp32 [ranks, rows, heads], and [ranks, rows, heads, latent]
    lses: Tensor
    outs: Tensor
    works: tuple[Any, Any]
    shapes: tuple[torch.Size, torch.Size]

    def merged(
        self, *, sinks: Tensor | Sequence[Tensor] | None = None, lse_base: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """out and lse as `merge` returns them; on a GPU the current stream waits, not the host."""
        _check_merged(self.lses.shape[-1], self.lses.device, sinks, lse_base)
        of_lses, of_outs = self.works
        of_lses.wait()
        parts = self.lses.to(_wide(self.outs.dtype))
        out, lse = _merged(self.outs, parts, sinks, lse_base, of_outs.wait)
        return out.view(self.shapes[0]), lse.view(self.shapes[1])


def start_gather(out: Tensor, lse: Tensor, *, group: dist.ProcessGroup | None = None) -> Gathering:
    """Enqueue the collectives of `gather_and_merge`: what follows on the stream overlaps them."""
    _check_own(out, lse)
    group = group_of(group)
    rows, transfers = [], []
    for tensor, last in ((lse, lse.shape[-1:]), (out, out.shape[-2:])):
        # bytes: not every backend of torch.distributed gathers every dtype
        own = tensor.contiguous().view(-1).view(torch.uint8)
        world = dist.get_world_size(group)
        every = own.new_empty(world * own.numel())
        transfers.append((every, own))
        # the number of rows, which may be 0, is not left to view
        rows.append(every.view(tensor.dtype).view(world, tensor.numel() // last.numel(), *last))
    # alike on all ranks, whatever merges there: one launch does not meet two of another rank
    at_once = _has_one_launch(out.device, group)
    works = _gather_at_once(transfers, group) if at_once else _gather_in_turn(transfers, group)
    return Gathering(rows[0], rows[1], works, (out.shape, lse.shape))


def _has_one_launch(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether several collectives of this device's tensors may be one launch."""
    backends = dist.get_backend_config(group)
    return _coalesced is not None and device.type == "cuda" and "cuda:nccl" in backends


def _gather_in_turn(transfers: Transfers, group: dist.ProcessGroup | None) -> tuple[Any, Any]:
    """Both one after the other."""
    first, second = (_all_gather(*transfer, group=group, async_op=True) for transfer in transfers)
    return first, second


def _gather_at_once(transfers: Transfers, group: dist.ProcessGroup | None) -> tuple[Any, Any]:
    """Both by one launch of NCCL."""
    with _coalesced(group=group, async_ops=True) as both:
        for transfer in transfers:
            _all_gather(*transfer, group=group)
    return both, Done()


def _one(sinks: Tensor | Sequence[Tensor] | None) -> Tensor | None:
    """Sinks without a list around them."""
    return sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What results of this dtype are merged in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _merged(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | Sequence[Tensor] | None,
    lse_base: str | None,
    wait_for_outs: Callable[[], Any] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Out [rows, heads, latent] and lse [rows, heads] of [ranks, ..], out in its dtype."""
    sink = _one(sinks)
    if rank_kernels.can_merge(outs, lses, sink):
        wait_for_outs()
        return rank_kernels.merged(outs, lses, sink, base2=lse_base == "base2")
    return merged_by_torch(outs, lses, sink, lse_base, wait_for_outs)


def merged_by_torch(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None = None,
    lse_base: str | None = None,
    wait_for_outs: Callable[[], Any] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """`merge` of outs [ranks, rows, heads, latent] and lses [ranks, rows, heads] by some fifteen
    kernels of PyTorch, of any dtype, latent and device; sinks fp32 [heads]. `wait_for_outs` is
    called once the weights are enqueued, before the outs are read.
    """
    weights, lse = _weights(lses, sinks, lse_base)
    wait_for_outs()
    # what has no share of a row may hold anything
    shares = weights.unsqueeze(-1)
    return torch.where(shares == 0, 0.0, shares * outs).sum(0).to(outs.dtype), lse


def _weights(lses: Tensor, sinks: Tensor | None, lse_base: str | None) -> tuple[Tensor, Tensor]:
    """Shares of the ranks in each row [ranks, rows, heads], and the lse over all of them."""
    base2 = lse_base == "base2"
    parts = lses * math.log(2) if base2 else lses
    # a row that no rank has a key for keeps -inf: weights exp(-inf - finite) are 0
    greatest = parts.amax(0).clamp_min(torch.finfo(parts.dtype).min)
    weights = torch.exp(parts - greatest)
    total = weights.sum(0)
    lse = greatest + total.log()
    lse = lse / math.log(2) if base2 else lse
    if sinks is not None:
        total = total + torch.exp(sinks - greatest)
    return weights / total.masked_fill(total == 0, 1), lse


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Results of ranks: of one shape, dtype and device, and an lse for each row and head of out."""
    for name, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, Sequence):
            supported = "a list of tensors, one of each rank"
            raise invalid_type(name, type(tensors).__name__, supported)
    if not outs or len(outs) != len(lses):
        raise invalid("lses", f"{len(lses)} for {len(outs)} outs", "one for each, at least one")
    for name, tensors in (("outs", outs), ("lses", lses)):
        for tensor in tensors:
            argument.tensor(name, tensor)
            if tensor.shape != tensors[0].shape:
                shapes = f"{list(tensor.shape)} and {list(tensors[0].shape)}"
                raise invalid(name, shapes, "the same shape from every rank")
            if tensor.dtype != tensors[0].dtype:
                dtypes = f"{tensor.dtype} and {tensors[0].dtype}"
                raise invalid_type(name, dtypes, "the same dtype from every rank")
            if tensor.device != outs[0].device:
                raise invalid(name, f"device {tensor.device}", f"that of outs[0], {outs[0].device}")
    argument.dtype("outs", outs[0], OUT_DTYPES)
    argument.dtype("lses", lses[0], WIDE)
    *rows, latent = outs[0].shape or (0,)
    if not rows or 0 in (rows[-1], latent):
        raise invalid("outs", f"shape {list(outs[0].shape)}", "[..., heads, latent]")
    flat = [math.prod(rows[:-1]), rows[-1]]
    if list(lses[0].shape) not in (flat, rows):
        got = f"shape {list(lses[0].shape)} for out {list(outs[0].shape)}"
        supported = f"one value for each row and head of out: {flat} or {rows}"
        raise invalid("lses", got, supported)


def _check_own(out: Tensor, lse: Tensor) -> None:
    """A rank's own results."""
    try:
        _check([out], [lse])
    except (InvalidInput, Unsupported) as error:
        raise under_names(error, {"outs": "out", "lses": "lse"}) from None
    for name, tensor in (("out", out), ("lse", lse)):
        if rank_kernels.is_derived(tensor):
            raise unsupported(name, "a tensor that autograd follows", "a tensor without")


def _check_merged(
    heads: int, device: torch.device, sinks: Tensor | Sequence[Tensor] | None, lse_base: str | None
) -> None:
    """What enters a merge beside the results of ranks."""
    if not isinstance(lse_base, str | None) or lse_base not in LSE_BASES:
        raise invalid("lse_base", repr(lse_base), LSE_BASES)
    if sinks is None:
        return
    if isinstance(sinks, Sequence) and len(sinks) != 1:
        raise invalid("sinks", f"a list of {len(sinks)}", "a tensor, or a list of one")
    sink = argument.tensor("sinks", sinks[0] if isinstance(sinks, Sequence) else sinks)
    argument.dtype("sinks", sink, [torch.float32])
    argument.shape("sinks", sink, (heads,))
    if sink.device != device:
        raise invalid("sinks", f"device {sink.device}", f"that of outs, {device}")


def shard(inputs: DecodeInputs, world: int) -> list[DecodeInputs]:
    """The call of each of `world` ranks: its own pool and table, without sinks and a plan, with lse
    and new results.

    Raises Unsupported for sparse calls, separate tables, and the call of a rank.
    """
    world = argument.integer("world", world, 1)
    return [shard_of(inputs, world, rank) for rank in range(world)]


def shard_of(inputs: DecodeInputs, world: int, rank: int) -> DecodeInputs:
    """The call of one of `world` ranks, 1 or more; raises Unsupported as `shard` does."""
    world = argument.integer("world", world, 1)
    rank = argument.integer("rank", rank, 0, world - 1)
    if inputs.sparse or not inputs.uses_shared_paged_kv_idx:
        raise unsupported("inputs", "a sparse call or separate tables", "one table of dense pages")
    if inputs.enable_dcp:
        raise unsupported("inputs", "the call of a rank", "a call whose cache holds all tokens")
    problem = inputs.problem
    lengths = tuple(len(range(rank, n, world)) for n in problem.kv_lens)
    counts = [formats.pages_of(n, problem.page_size) for n in lengths]
    device = inputs.query.device
    kv_cache = formats.poisoned_pages(
        sum(counts) + 1,
        problem.page_size,
        problem.kv_format,
        head_dim=problem.head_dim,
        device=device,
    )
    # pages from the last to the first: any order is as good, and this one is not the identity
    table = page_table(counts, torch.arange(sum(counts), -1, -1, device=device))[:, 0]
    for row, full_row, kv_len in zip(table, inputs.block_tables, problem.kv_lens, strict=True):
        tokens = formats.gather(inputs.kv_cache, full_row, kv_len)
        formats.scatter(kv_cache, row, tokens[rank::world])
    return replace(
        inputs,
        problem=replace(problem, kv_lens=lengths),
        kv_cache=kv_cache,
        block_tables=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_seq_len=max(lengths),
        out=None,
        sinks=None,
        lse=None,
        return_lse=True,
        enable_dcp=True,
        cp_world=world,
        cp_rank=rank,
        causal_seqlens_kv_global=inputs.seq_lens,
        plan=None,
    )
