"""The plain call: no plan, lengths on the device, and a bound on them as in a serving engine.

A launch is the native call with `plan=None`. Its CUDA graph is captured while every request has one
token, and replayed at the case's lengths, so that the graph cannot depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ... import backends
from ...api import decode
from ...backends.base import Planned
from ...call.decode_args import native_args
from ...core.errors import unsupported
from ...plan.config import KernelConfig
from ...reference.inputs import DecodeInputs
from ..rotation import Rotation
from .base import PeerBase, Prepared
from .ours import native_arguments, native_launch

#: tokens that the block table can address: the bound with which an engine captures its graphs
LOOSE_BOUND = 131_072
#: block table entries after a request's pages, an invalid page id
UNUSED_PAGE = 2**31 - 1


def kernel_of(planned: Planned) -> dict[str, Any]:
    """Notes on the kernel that a call chose; of the two of a batch-invariant call, on the first."""
    first = getattr(planned, "before", None) or planned
    config: KernelConfig | None = getattr(first, "config", None)
    return {} if config is None else {"kernel": config.name(), "tile_rows": config.tile_rows}


class Plain(PeerBase):
    """`mla_lab.api.decode.decode` without a plan.

    tight: `max_seq_len` is the longest length; else `LOOSE_BOUND` tokens, or the longest length
    where that is more, and the block table has entries for as many.
    """

    def __init__(self, *, tight: bool = False) -> None:
        self.tight = tight
        self.name = "mla-lab-plain-tight" if tight else "mla-lab-plain"

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`. Raises Unsupported where no kernel takes the call."""
        given = rotation.copies[0].seq_lens
        lengths, shorter = given.clone(), (given - 1).clamp(min=0)
        # one table for all copies, as the layers of a step have it
        bounded = {"seq_lens": lengths} | self._bound(rotation.copies[0])
        copies = [replace(copy, **bounded) for copy in rotation.copies]
        arguments = native_arguments(copies[0], rotation.case.batch_invariant)
        call, runner = decode.prepare(native_args(**arguments))
        if rotation.device.type == "cuda" and runner.name == "torch":
            raise unsupported("backend", "auto, which has no kernel for this call", "mla-lab-torch")

        @contextmanager
        def captured() -> Iterator[None]:
            lengths.fill_(1)
            try:
                yield
            finally:
                lengths.copy_(given)

        launches = tuple(native_launch(copy, rotation.case) for copy in copies)
        other = tuple(
            native_launch(replace(copy, seq_lens=shorter), rotation.case) for copy in copies
        )
        notes = {"backend": runner.name, "max_seq_len": copies[0].max_seq_len}
        gpu = backends.gpu_of(rotation.device)
        if gpu is not None and runner.name == "cute":
            notes |= kernel_of(runner.plan(call, gpu))
        return Prepared(launches, captured=captured, other_lengths=other, notes=notes)

    def _bound(self, copy: DecodeInputs) -> dict[str, Any]:
        """Table and bound of this kind of call, where they are not those of `copy`."""
        table, longest = copy.block_tables, max(copy.problem.kv_lens, default=0)
        if self.tight or copy.problem.top_k:
            return {}
        bound = max(LOOSE_BOUND, longest)
        columns = -(-bound // copy.problem.page_size)
        wide = table.new_full((*table.shape[:-1], max(columns, table.shape[-1])), UNUSED_PAGE)
        wide[..., : table.shape[-1]] = table
        return {"block_tables": wide, "max_seq_len": bound}
