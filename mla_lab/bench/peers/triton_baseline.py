"""The Triton baseline as a peer."""

from __future__ import annotations

import os

import torch

from ..rotation import Rotation
from .base import PeerBase, Prepared, missing, refuse_beyond_plain, refuse_unequal_queries

#: SMs to fill where there is no GPU to ask (Triton's interpreter)
INTERPRETED_WORKERS = 8


class TritonSplitKv(PeerBase):
    """`triton_split_kv.decode`: two kernels, splits chosen by the number of SMs."""

    module = "triton"
    name = "triton-split-kv"
    refusals = (refuse_beyond_plain, refuse_unequal_queries)

    def available(self, device: torch.device) -> str | None:
        """As `Peer.available`. Triton's interpreter runs it on a CPU, slowly."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            device = torch.device("cuda")
        return missing("triton", device)

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`: the copies share their buffers."""
        from . import triton_split_kv as kernels

        workers = INTERPRETED_WORKERS
        if rotation.device.type == "cuda":
            workers = torch.cuda.get_device_properties(rotation.device).multi_processor_count
        splits = kernels.choose_splits(rotation.copies[0], workers)
        buffers = kernels.allocate(rotation.copies[0], splits)
        launches = tuple(
            lambda copy=copy: kernels.decode(copy, splits, buffers) for copy in rotation.copies
        )
        return Prepared(launches, notes={"num_splits": splits.num_splits})
