"""Memory that the ranks of a group write to: decode context parallel's gather and merge in one
kernel.

    peers = PeerMemory(most_tokens=64, heads=128, group=group)    # once, by every rank
    out, lse = gather_and_merge(out, lse, peers=peers)            # in every layer

The memory is torch's symmetric memory (`torch.distributed._symmetric_memory`, of no public
interface yet): of ranks whose cards reach each other's memory, as those of one host by NVLink.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import rank_kernels
from ..core.dims import LATENT_DIM
from ..core.errors import MlaLabError, Unsupported, describe, invalid, invalid_type, unsupported
from ..cute import rank_memory


class PeerMemory:
    """Room for the results of calls of up to `most_tokens` query tokens and `heads` heads.

    Every rank of `group` (None: all) makes one, at the same place in its program: a collective. The
    calls that take it run in one order on all ranks, on one stream of a rank at a time, each with
    the same query tokens, heads and dtype on all ranks. The kernels of the others wait for ever for
    a rank that makes no such call, or raises instead. The object must outlive the calls, and CUDA
    graphs of them. It holds 2 x ranks x most_tokens x heads x 1,028 bytes of the current device:
    17 MB for 32 tokens, 128 heads and 2 ranks.

    Raises InvalidInput for sizes below 1, without a process group and for a group without this
    rank; Unsupported on all ranks where one of them has no Hopper card of 132 SMs, no build of the
    kernel, another size, or no access to another's memory.
    """

    def __init__(
        self, most_tokens: int, heads: int, *, group: dist.ProcessGroup | None = None
    ) -> None:
        for name, size in (("most_tokens", most_tokens), ("heads", heads)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise invalid_type(name, type(size).__name__, "int")
            if size < 1:
                raise invalid(name, size, "1 or more")
        self.group = group_of(group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.most_rows = most_tokens * heads
        self._rows = rank_memory.buffer_rows(self.most_rows)
        # a rank that cannot go on must not leave the others waiting in the next step
        for step in (self._check, self._allocate, self._connect):
            self._all_can(step)

    def _check(self) -> None:
        if self.ranks > rank_kernels.MOST_RANKS:
            raise unsupported("group", f"{self.ranks} ranks", f"up to {rank_kernels.MOST_RANKS}")
        if not torch.cuda.is_available():
            raise unsupported("group", "a rank without a GPU", "Hopper cards")
        self.device = torch.device("cuda", torch.cuda.current_device())
        if not rank_kernels.can_exchange(self.device):
            got = "a rank whose card or builds lack the kernel"
            raise unsupported("group", got, f"Hopper cards of {rank_memory.SMS} SMs")

    def _allocate(self) -> None:
        # late: it is slow to import
        from torch.distributed import _symmetric_memory as symmetric

        size = rank_memory.peer_bytes(self.ranks, self._rows)
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)

    def _connect(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        # holds what of the others is mapped here
        self._handle: Any = symmetric.rendezvous(self._memory, self.group)
        self._memory.view(torch.int32).fill_(rank_memory.EMPTY)
        shape = tuple(self._memory.shape)
        every = [self._handle.get_buffer(r, shape, torch.uint8) for r in range(self.ranks)]
        # where a tensor lies within what is mapped is the same on all ranks
        within = self._memory.data_ptr() - every[self.rank].data_ptr()
        bases = [part.data_ptr() + within for part in every]
        self._peers = rank_kernels.Peers(
            torch.tensor(bases, dtype=torch.int64, device=self.device),
            torch.zeros(2, dtype=torch.int32, device=self.device),
            self.rank,
            self._rows,
        )
        # empty before anyone writes: the collective that follows is behind it
        torch.cuda.synchronize(self.device)

    def _all_can(self, step: Callable[[], None]) -> None:
        """Run a step on all ranks; raises on all of them what one of them has met."""
        error = ""
        cause: Exception | None = None
        try:
            step()
        except MlaLabError as caught:
            error, cause = f"{caught} (rank {self.rank})", caught
        except Exception as caught:
            got = f"{type(caught).__name__} on rank {self.rank}: {caught}"
            error, cause = describe("peers", got, "ranks that reach each other's memory"), caught
        said: list[Any] = [None] * self.ranks
        dist.all_gather_object(said, (error, self.most_rows), group=self.group)
        errors = [text for text, _ in said if text]
        if errors:
            raise Unsupported(error or errors[0]) from cause
        sizes = sorted({rows for _, rows in said})
        if len(sizes) > 1:
            got = f"{sizes} query tokens x heads on the ranks"
            raise unsupported("most_tokens", got, "the same on all ranks")

    def merged(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, *, base2: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse over all ranks, of this rank's, whose shapes and dtypes have been checked."""
        self._check_call(out, lse, sinks)
        flat = (-1, *out.shape[-2:])
        if out.numel() == 0:
            return out.clone(), lse.clone()
        packed = out.contiguous()
        packed = packed.clone() if packed.data_ptr() % 16 else packed
        result = rank_kernels.exchanged(
            self._peers,
            packed.view(flat),
            lse.contiguous().view(-1, out.shape[-2]),
            sinks,
            base2=base2,
        )
        return result[0].view(out.shape), result[1].view(lse.shape)

    def _check_call(self, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        if torch.compiler.is_compiling():
            raise unsupported("peers", "a call inside torch.compile", "eager calls, CUDA graphs")
        if out.device != self.device:
            raise invalid("out", f"device {out.device}", f"that of peers, {self.device}")
        if out.dtype not in rank_kernels.EXCHANGES or lse.dtype is not torch.float32:
            got = f"out {out.dtype}, lse {lse.dtype}"
            raise unsupported("peers", got, "out in bf16 or fp16, lse in fp32")
        if out.shape[-1] != LATENT_DIM:
            raise unsupported("peers", f"a latent of {out.shape[-1]}", LATENT_DIM)
        if lse.numel() > self.most_rows:
            got = f"{lse.numel()} query tokens x heads"
            raise invalid("out", got, f"up to {self.most_rows}, those of peers")
        if sinks is not None and rank_kernels.is_derived(sinks):
            raise unsupported("sinks", "a tensor that autograd follows", "a tensor without")


def group_of(group: Any) -> dist.ProcessGroup:
    """The group that was asked for, of which this process is a rank."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        # new_group returns a number to processes that are not in it
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise invalid("group", "a group without this rank", "a group with it")
        raise invalid_type("group", type(group).__name__, "ProcessGroup or None")
    if not dist.is_initialized():
        raise invalid("group", "no process group", "one that init_process_group has made")
    found: Any = dist.group.WORLD if group is None else group
    if dist.get_rank(found) < 0:
        raise invalid("group", "a group without this rank", "a group with it")
    return found
