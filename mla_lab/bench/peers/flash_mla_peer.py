"""FlashMLA (github.com/deepseek-ai/FlashMLA): dense decode on SM90."""

from __future__ import annotations

from torch import Tensor

from ...reference.inputs import DecodeInputs
from ..cases import Case
from ..rotation import Rotation
from ..timers import Launch
from .base import PeerBase, Prepared, refuse_beyond_plain, refuse_unequal_queries

PAGE_SIZE = 64


class FlashMla(PeerBase):
    """`flash_mla_with_kvcache`; the scheduler's metadata is the plan of a step."""

    module = "flash_mla"
    name = "flashmla"

    def refuses(self, case: Case) -> str | None:
        """As `Peer.refuses`."""
        if case.problem.page_size != PAGE_SIZE:
            return f"page_size: got {case.problem.page_size}, supported: {PAGE_SIZE}"
        return refuse_beyond_plain(case) or refuse_unequal_queries(case)

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`. The first call of a metadata object fills it."""
        import flash_mla

        shared = flash_mla.get_mla_metadata()[0]
        _launch(rotation.copies[0], shared)()
        return Prepared(
            tuple(_launch(copy, shared) for copy in rotation.copies),
            planned_launches=tuple(_launch(copy, None) for copy in rotation.copies),
        )


def _launch(copy: DecodeInputs, metadata: object | None) -> Launch:
    """metadata: None makes it anew in every call."""
    import flash_mla

    problem = copy.problem
    query = copy.query.reshape(problem.batch, problem.q_lens[0], problem.heads, -1)
    kv_cache = copy.kv_cache.unsqueeze(2)

    def launch() -> Tensor:
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            query,
            kv_cache,
            copy.block_tables,
            copy.seq_lens,
            problem.latent_dim,
            flash_mla.get_mla_metadata()[0] if metadata is None else metadata,
            softmax_scale=copy.bmm1_scale,
            causal=problem.q_lens[0] > 1,
        )[0]
        return out

    return launch
