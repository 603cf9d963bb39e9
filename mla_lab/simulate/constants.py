"""Constants of a card and of a kernel for the simulator, in one value that `fit` replaces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core import gpu

#: operations of one SM's matrix unit per clock, bf16 with fp32 accumulation, Hopper (dense
#: 989.4 TFLOP/s over 132 SMs at 1.83 GHz, NVIDIA H100 datasheet)
FLOP_PER_CLOCK = 4096


@dataclass(frozen=True)
class Constants:
    """Times in us, rates in TB/s (= MB/us), clocks of the SM.

    Defaults: one NVIDIA H200, 700 W, measured on 2026-11-20 (launch, reads and the compute
    kernel's loop), the card warm and limited by its power.
    """

    card: str = gpu.H200.name
    sms: int = gpu.H200.sms
    #: SM clock under a sustained MMA load, limited by power: that at which the card's GEMM would
    #: issue in every cycle
    clock_ghz: float = 1.46
    #: SM clock while the tensor cores idle; 0 keeps `clock_ghz` at every load
    burst_ghz: float = 0.0
    #: MMA utilisation between which the clock falls from burst to sustained
    burst_share: float = 0.3
    hot_share: float = 0.8
    #: an empty launch of 132 CTAs with 225 KB of shared memory inside a graph
    launch_us: float = 0.7
    #: barriers, descriptors, table: from a CTA's first instruction to its first load
    setup_us: float = 0.3
    #: from a CTA's first load to its first bytes, cold; and from any later load to its bytes
    first_byte_us: float = 1.05
    load_latency_us: float = 0.5
    #: between two work tiles of one persistent worker
    switch_us: float = 0.5
    read_tbps: float = gpu.H200.read_tbps
    #: most TB/s that one SM can read (64 B a clock from L2)
    sm_read_tbps: float = 0.09
    #: KV that another row tile of the request has just read
    l2_tbps: float = 6.5
    #: exponent of the power mean of a CTA's own loop and the memories: near its limit a memory
    #: delays loads
    sharpness: float = 4.0
    #: blocks by which the slowest of the streams that share HBM falls behind, and after how many
    #: blocks
    lag: float = 1.5
    lag_blocks: float = 8.0
    #: KV pipeline stages, and blocks that QK runs ahead of PV
    stages: int = 3
    lookahead: int = 1
    #: clocks of issue and barriers per block in which the tensor cores idle
    gap_clocks: float = 243.0
    #: clocks of the softmax of a 64 x 64 block, and of the release of a stage
    softmax_clocks: float = 880.0
    release_clocks: float = 150.0
    #: least rows that a product costs
    min_rows: int = 16
    #: one CTA's store rate to L2 (TB/s) and the fixed part of writing a tile
    store_tbps: float = 0.15
    write_us: float = 0.6
    #: one CTA's rate of reading partials, and the fixed part of a cooperative merge (flag, fence,
    #: output) and of an LL merge
    merge_tbps: float = 0.15
    merge_us: float = 1.2
    ll_merge_us: float = 0.7
    #: rate of storing or reading partials over all SMs: 132 CTAs of 128 KB take 3.3 us to store
    #: theirs and 3.9 us to merge (cute/keep_ab_sm90, stamps, H200, 2026-11-20)
    exchange_tbps: float = 5.5
    #: from the last worker's end to the start of the merge kernel, and its rate over the whole card
    relaunch_us: float = 2.5
    merge_launch_tbps: float = 2.0
    #: fixed part of one exchange inside a cluster
    cluster_us: float = 1.0
    #: resident clusters by size, where that is not SMs / size
    clusters: tuple[tuple[int, int], ...] = gpu.H200.resident_clusters

    def lanes(self, cluster: int) -> int:
        """Workers of `cluster` CTAs that are resident at once."""
        return dict(self.clusters).get(cluster, self.sms // cluster)

    def matrix_clocks(self, rows: int, tokens: int) -> float:
        """Clocks of both products of one block on one SM: 2176 for 64 x 64."""
        return 2 * max(rows, self.min_rows) * tokens * (576 + 512) / FLOP_PER_CLOCK

    def at_full_load(self) -> Constants:
        """These constants at the sustained clock, for comparing plans without the effect of their
        power.
        """
        return replace(self, burst_ghz=0.0)

    def at_load(self, share: float) -> Constants:
        """The constants at the clock under the power cap with an MMA utilisation of `share`."""
        if not self.burst_ghz:
            return self
        heat = (share - self.burst_share) / (self.hot_share - self.burst_share)
        heat = min(1.0, max(0.0, heat))
        clock = self.burst_ghz + (self.clock_ghz - self.burst_ghz) * heat
        return replace(self, clock_ghz=round(clock, 2), burst_ghz=0.0)


#: cute/keep_ab_sm90
H200 = Constants()
#: cute/swap_ab_sm90, at most 32 rows a tile: 1.2 us a block at 16 rows and 2.5 us at 64 in a
#: prototype without overlap, 7 % less with PV of one block issued before QK of the next (H200,
#: 2026-11-20). Few rows are little MMA work, so the clock stays at burst
SWAP_AB = replace(H200, clock_ghz=1.98, stages=2, lookahead=0, gap_clocks=1430.0, min_rows=8)
