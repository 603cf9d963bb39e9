"""FlashAttention-3 (github.com/Dao-AILab/flash-attention, hopper/): paged decode with qv."""

from __future__ import annotations

from torch import Tensor

from ...reference.inputs import DecodeInputs
from ..rotation import Rotation
from ..timers import Launch
from .base import PeerBase, Prepared, refuse_beyond_plain, refuse_unequal_queries


class FlashAttention3(PeerBase):
    """`flash_attn_with_kvcache` with qv: rope columns as keys, latent ones as values and qv.

    num_splits 0 leaves the choice to the library. Values of unread slots are multiplied by a
    zero probability where pages come by TMA, so it needs finite ones.
    """

    module = "flash_attn_interface"
    refusals = (refuse_beyond_plain, refuse_unequal_queries)

    def __init__(self, num_splits: int = 0) -> None:
        self.num_splits = num_splits
        self.name = f"fa3-qv-{num_splits}" if num_splits else "fa3-qv"

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`: the scheduler's metadata is the plan of a step."""
        copies = rotation.without_poison
        metadata = self._metadata(copies[0])
        return Prepared(
            tuple(self._launch(copy, metadata) for copy in copies),
            planned_launches=tuple(self._launch(copy, None) for copy in copies),
            notes={"num_splits": self.num_splits or "auto", "inputs": "without poison"},
        )

    def _metadata(self, copy: DecodeInputs) -> Tensor:
        import flash_attn_interface

        problem = copy.problem
        metadata: Tensor = flash_attn_interface.get_scheduler_metadata(
            problem.batch,
            problem.q_lens[0],
            _pages(copy) * problem.page_size,
            problem.heads,
            1,
            problem.rope_dim,
            copy.seq_lens,
            copy.query.dtype,
            headdim_v=problem.latent_dim,
            page_size=problem.page_size,
            causal=problem.q_lens[0] > 1,
            num_splits=self.num_splits,
        )
        return metadata

    def _launch(self, copy: DecodeInputs, metadata: Tensor | None) -> Launch:
        """metadata: None leaves it to the call."""
        import flash_attn_interface

        problem = copy.problem
        latent = problem.latent_dim
        query = copy.query.reshape(problem.batch, problem.q_lens[0], problem.heads, -1)
        kv_cache = copy.kv_cache.unsqueeze(2)
        table = copy.block_tables[:, : _pages(copy)]

        def launch() -> Tensor:
            out: Tensor = flash_attn_interface.flash_attn_with_kvcache(
                query[..., latent:],
                kv_cache[..., latent:],
                kv_cache[..., :latent],
                qv=query[..., :latent],
                cache_seqlens=copy.seq_lens,
                page_table=table,
                softmax_scale=copy.bmm1_scale,
                causal=problem.q_lens[0] > 1,
                scheduler_metadata=metadata,
                num_splits=self.num_splits,
            )
            return out

        return launch


def _pages(copy: DecodeInputs) -> int:
    """Pages of the longest request; the library sizes its splits by the table's width."""
    return -(-max(copy.problem.kv_lens) // copy.problem.page_size)
