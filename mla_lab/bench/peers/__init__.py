"""Peers of a benchmark: our backends, and other libraries where they are installed."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import invalid
from .base import Peer, Prepared
from .flash_attention3 import FlashAttention3
from .flash_mla_peer import FlashMla
from .flashinfer_peer import FlashInferFa3
from .ours import Gathered, Ours
from .plain import Plain
from .torch_eager import TorchEager
from .triton_baseline import TritonSplitKv

__all__ = ["Peer", "Prepared", "all_peers", "select"]


def all_peers() -> list[Peer]:
    """Every peer, whether it can run here or not."""
    return [
        Ours(),
        Plain(),
        Plain(tight=True),
        Ours("cute"),
        Gathered(),
        Ours("cute-keep-ab-gather"),
        Ours("cuda"),
        Ours("torch"),
        TorchEager(),
        TritonSplitKv(),
        FlashInferFa3(),
        FlashMla(),
        FlashAttention3(),
        FlashAttention3(num_splits=32),
    ]


def select(names: Sequence[str]) -> list[Peer]:
    """Peers by name, in the order given; all of them for no names."""
    known = {peer.name: peer for peer in all_peers()}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise invalid("peers", ", ".join(unknown), tuple(known))
    return [known[name] for name in names] if names else list(known.values())
