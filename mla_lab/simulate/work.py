"""Steps, memory traffic and delays of work tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.problem import ELEMENT_BYTES
from ..plan.tile import Plan
from .constants import Constants
from .pipeline import loop_of

#: rows that one CTA holds; taller tiles are shared by the CTAs of a cluster
CTA_ROWS = 64


@dataclass(frozen=True)
class Share:
    """Part of a work tile that each CTA of its cluster computes."""

    rows: int
    #: CTAs that split the KV blocks of the tile
    kv_ways: int

    @classmethod
    def of(cls, plan: Plan, cluster: int) -> Share:
        """Split over the `cluster` CTAs of a worker: rows over 64 first, then KV."""
        row_ways = min(cluster, max(1, plan.tile_rows // CTA_ROWS))
        return cls(plan.tile_rows // row_ways, cluster // row_ways)


class Work:
    """A plan's tiles in the simulator's units: a *step* is one block of a CTA in steady state."""

    def __init__(self, plan: Plan, constants: Constants, cluster: int) -> None:
        problem = plan.problem
        self.c, self.cluster = constants, cluster
        self.share = Share.of(plan, cluster)
        self.loop = loop_of(constants, self.share.rows, plan.tile_kv, problem.kv_token_bytes)
        self.block_mb = plan.tile_kv * problem.kv_token_bytes / 1e6
        rows = min(self.share.rows, int(problem.rows.max(initial=0)))
        self.query_mb = rows * problem.head_dim * ELEMENT_BYTES[problem.q_dtype] / 1e6
        self.result_mb = rows * problem.latent_dim * ELEMENT_BYTES[problem.out_dtype] / 1e6
        row_tiles = np.maximum(1, -(-problem.rows // plan.tile_rows))
        #: HBM reads per block: the first row tile of a request reads HBM, the others L2
        self.hbm_share = (1.0 / row_tiles).tolist()
        #: row tiles that receive each block by multicast
        self.pair = plan.config.option("pair", 1) if plan.config else 1
        #: MB of one CTA's partial, and TB/s at which it stores and reads partials while all workers
        #: with partials do so
        row_bytes = problem.latent_dim * 4 + 4
        self.partial_mb = plan.tile_rows * row_bytes / cluster / 1e6
        users = min(plan.num_slots, constants.lanes(cluster)) * cluster
        self.exchange_tbps = constants.exchange_tbps / max(1, users)
        self.card_step_us = self._card_step_us(plan)

    def _card_step_us(self, plan: Plan) -> float:
        """us in which HBM delivers one block to every stream of the first wave."""
        begin, end = plan.worker_begin[:-1], plan.worker_begin[1:]
        first = begin[begin < end][: self.c.lanes(self.cluster)]
        streams = float(np.asarray(self.hbm_share)[plan.tiles[first, 0]].sum())
        return streams * self.share.kv_ways * self.block_mb / self.c.read_tbps

    def blocks(self, tile: list[int]) -> int:
        """KV blocks of one CTA."""
        return -(-(tile[3] - tile[2]) // self.share.kv_ways)

    def steps(self, tile: list[int]) -> float:
        """Mainloop steps as long as a CTA takes alone on the card, the query's load included."""
        query_us = self.query_mb / self.c.sm_read_tbps
        return (query_us + self.loop.alone(self.blocks(tile))) / self.loop.steady

    def traffic(self, tile: list[int], steps: float) -> tuple[float, float]:
        """MB from HBM and through L2 for each of the tile's steps. Query and result count evenly
        over the steps.

        CTAs of a cluster with other rows of the tile receive its blocks by multicast.
        """
        blocks_mb = (tile[3] - tile[2]) * self.block_mb / steps
        own_mb = (self.query_mb + self.result_mb) * self.cluster / steps
        return blocks_mb * self.hbm_share[tile[0]] + own_mb, blocks_mb / self.pair + own_mb

    def rate(self, hbm_mb: float, l2_mb: float) -> float:
        """Steps per us of each CTA, for memory traffic (MB per step) of all tiles together."""
        memory = max(hbm_mb / self.c.read_tbps, l2_mb / self.c.l2_tbps)
        sharp = self.c.sharpness
        return float((self.loop.steady**sharp + memory**sharp) ** (-1 / sharp))

    def fill_us(self, tiles: list[list[int]]) -> float:
        """us from a worker's first load to its first step, and the delay it accumulates later.

        The first bytes come after `first_byte_us`, the last block's products follow its bytes;
        streams that share HBM are not served evenly, so the slowest is delayed.
        """
        blocks = sum(self.blocks(tile) for tile in tiles)
        behind = self.c.lag * min(1.0, blocks / self.c.lag_blocks) * self.card_step_us
        return self.c.first_byte_us + self.loop.chain + behind

    def write_us(self, tile: list[int]) -> float:
        """us of storing a result, or a partial."""
        fixed = self.c.write_us + self.c.cluster_us * (self.share.kv_ways > 1)
        if tile[6] >= 0:
            return fixed + self.partial_mb / min(self.c.store_tbps, self.exchange_tbps)
        return fixed + self.result_mb / self.share.kv_ways / self.c.store_tbps

    def merge_us(self, ll: bool) -> float:
        """us of one CTA's part of a merge, which reads as many bytes as its own partial has."""
        fixed = self.c.ll_merge_us if ll else self.c.merge_us
        return fixed + self.partial_mb / min(self.c.merge_tbps, self.exchange_tbps)
