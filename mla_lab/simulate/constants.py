"""What the simulator knows of a card and of a kernel, in one value that `fit` can replace."""

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
    #: SM clock under a sustained matrix load, which power decides: that at which the card's GEMM
    #: would need every cycle
    clock_ghz: float = 1.46
    #: SM clock while the matrix units rest; 0 keeps `clock_ghz` whatever the load
    burst_ghz: float = 0.0
    #: shares of matrix work between which the clock falls from burst to sustained
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
    #: most that one SM can take in (64 B a clock from L2)
    sm_read_tbps: float = 0.09
    #: KV that another row tile of the request has just read
    l2_tbps: float = 6.5
    #: how sharply the slower of a CTA's own loop and the memories decides (a power mean of both
    #: times): near its limit a memory lets loads wait
    sharpness: float = 4.0
    #: blocks by which the slowest of all streams that share HBM falls behind, and after how many
    lag: float = 1.5
    lag_blocks: float = 8.0
    #: stages of the ring of KV blocks, and blocks that QK runs ahead of PV
    stages: int = 3
    lookahead: int = 1
    #: issue and barrier clocks that the matrix unit loses per block
    gap_clocks: float = 243.0
    #: softmax of a 64 x 64 block, and the hand-back of a stage
    softmax_clocks: float = 880.0
    release_clocks: float = 150.0
    #: least rows that a product costs
    min_rows: int = 16
    #: one CTA's store rate to L2 (TB/s) and the fixed part of writing a tile
    store_tbps: float = 0.15
    write_us: float = 0.6
    #: one CTA's rate of reading partials, and the fixed part of a merge (flag, fence, output); by
    #: mail partials are their own flags
    merge_tbps: float = 0.15
    merge_us: float = 1.2
    mail_us: float = 0.7
    #: partials that go to L2, or come from it, over all SMs: 132 CTAs of 128 KB take 3.3 us to
    #: leave theirs and 3.9 us to merge their shares (cute/keep_ab_sm90, stamps, H200, 2026-11-20)
    exchange_tbps: float = 5.5
    #: from the last worker's end to a second, dependent launch, and its rate over the whole card
    relaunch_us: float = 2.5
    merge_launch_tbps: float = 2.0
    #: one exchange inside a cluster, beside its bytes
    cluster_us: float = 1.0
    #: how many clusters of a size the card holds at once, where that is not SMs / size
    clusters: tuple[tuple[int, int], ...] = gpu.H200.resident_clusters

    def lanes(self, cluster: int) -> int:
        """Workers of `cluster` CTAs that run at once."""
        return dict(self.clusters).get(cluster, self.sms // cluster)

    def matrix_clocks(self, rows: int, tokens: int) -> float:
        """Clocks of both products of one block on one SM: 2176 for 64 x 64."""
        return 2 * max(rows, self.min_rows) * tokens * (576 + 512) / FLOP_PER_CLOCK

    def at_full_load(self) -> Constants:
        """These constants at the clock that a full matrix load leaves, whatever the load: so that
        two plans differ by their plans alone.
        """
        return replace(self, burst_ghz=0.0)

    def at_load(self, share: float) -> Constants:
        """The constants at the clock that the power cap leaves under `share` of matrix work."""
        if not self.burst_ghz:
            return self
        heat = (share - self.burst_share) / (self.hot_share - self.burst_share)
        heat = min(1.0, max(0.0, heat))
        clock = self.burst_ghz + (self.clock_ghz - self.burst_ghz) * heat
        return replace(self, clock_ghz=round(clock, 2), burst_ghz=0.0)


#: query rows on the 64-row side of the matrix unit (cute/keep_ab_sm90)
H200 = Constants()
#: KV on that side, at most 32 rows a tile (cute/swap_ab_sm90): 1.2 us a block at 16 rows and 2.5 at
#: 64 in the prototype, with nothing that overlaps, and 7 % less since PV of one block is issued
#: before QK of the next; one NVIDIA H200, 2026-11-20. Few rows are little matrix work: the clock
#: stays up
KV_M = replace(H200, clock_ghz=1.98, stages=2, lookahead=0, gap_clocks=1430.0, min_rows=8)
