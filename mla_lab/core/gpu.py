"""GPUs as numbers: figures of their datasheets, and figures measured on one card.

Sources: NVIDIA H100 datasheet and "H100 Tensor Core GPU Architecture" white paper (SXM5: 132 SMs,
50 MB L2, 3.35 TB/s, 989.4 TFLOP/s dense bf16), H200 datasheet (141 GB, 4.8 TB/s), HGX and DGX
B200 datasheets (8 TB/s, 2.25 PFLOP/s dense bf16 a card), and the Hopper and Blackwell tuning guides
(228 KB of shared memory an SM of which a block may have 227, 64 K registers). H800 is the H100 SXM
with slower NVLink, which plays no part here. `clock_mhz` is the clock at which the stated TFLOP/s
hold: 4096 (Hopper) or 8192 (Blackwell) dense bf16 operations a clock and SM.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .errors import invalid
from .problem import Problem

KIB = 1024
#: CTAs of a cluster at most
MAX_CLUSTER = 16


@dataclass(frozen=True)
class Ceilings:
    """Rates and times measured on one card; TB/s and TFLOP/s are decimal."""

    read_tbps: float
    copy_tbps: float
    #: bf16 GEMM of 8192^3: a short burst, and the range that the card sustains under its power cap
    burst_tflops: float
    sustained_tflops: tuple[float, float]
    #: one launch inside a CUDA graph, every SM taken
    launch_us: float
    #: (bytes, us) of a first, cold read by one launch
    cold_read_us: tuple[tuple[int, float], ...]
    card: str
    date: str


@dataclass(frozen=True)
class Gpu:
    """One card. Sizes in bytes, rates in TB/s and dense TFLOP/s."""

    name: str
    arch: str
    sms: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    hbm_tbps: float
    bf16_tflops: float
    fp8_tflops: float
    clock_mhz: int
    source: str
    ceilings: Ceilings | None = None
    #: (cluster size, clusters resident at once with one CTA an SM) where known
    resident_clusters: tuple[tuple[int, int], ...] = field(default=())

    @property
    def read_tbps(self) -> float:
        """Read bandwidth: measured where known, else the datasheet's."""
        return self.ceilings.read_tbps if self.ceilings else self.hbm_tbps

    def tflops(self, dtype: str = "bf16") -> float:
        """Dense matrix rate for operands of `dtype`: the upper sustained figure where measured.

        e4m3 has no measured ceiling: its stated rate is scaled by what bf16 sustains.
        """
        stated = self.fp8_tflops if dtype == "e4m3" else self.bf16_tflops
        if self.ceilings is None:
            return stated
        return stated * self.ceilings.sustained_tflops[1] / self.bf16_tflops

    def ridge(self, dtype: str = "bf16") -> float:
        """Operations per byte above which the matrix units, not memory, are the limit."""
        return self.tflops(dtype) / self.read_tbps

    def roofline_time(self, problem: Problem) -> float:
        """The larger of the memory time and the matrix time of `problem`, in seconds, at the rates
        that the card sustains, or without `ceilings` at its datasheet's; at a higher clock a launch
        may take less."""
        return max(self.memory_time(problem), self.matrix_time(problem))

    def memory_time(self, problem: Problem) -> float:
        """Seconds to move the least traffic once."""
        return problem.bytes() / (self.read_tbps * 1e12)

    def matrix_time(self, problem: Problem) -> float:
        """Seconds of matrix work; e4m3 rates count only where both operands are e4m3."""
        both = problem.q_dtype == problem.kv_format == "e4m3"
        return problem.flops() / (self.tflops("e4m3" if both else "bf16") * 1e12)

    def bound(self, problem: Problem) -> str:
        """ "compute" or "memory": the side of the ridge that `problem` lies on."""
        return "compute" if self.matrix_time(problem) > self.memory_time(problem) else "memory"

    def workers(self, cluster: int = 1) -> int:
        """Clusters of `cluster` CTAs that run at once, one CTA an SM; a cluster is one worker.

        SMs // cluster unless `resident_clusters` says less: an SM left over in a GPC cannot join
        another GPC's cluster.
        """
        if not 1 <= cluster <= 16:
            raise invalid("cluster", cluster, "1 to 16 CTAs")
        return dict(self.resident_clusters).get(cluster, self.sms // cluster)

    @classmethod
    def preset(cls, name: str, arch: str | None = None) -> Gpu:
        """The preset called `name` (case and the space before SXM do not matter). Raises
        InvalidInput for an unknown name; `arch`: it lists presets of this architecture alone.
        """
        wanted = name.lower().replace(" ", "").replace("-", "").removesuffix("sxm")
        for gpu in PRESETS:
            if gpu.name.lower().replace(" ", "").removesuffix("sxm") == wanted:
                return gpu
        known = tuple(gpu.name for gpu in PRESETS if arch in (None, gpu.arch))
        raise invalid("gpu", repr(name), known)

    @classmethod
    def here(cls, index: int = 0) -> Gpu | None:
        """The card in this machine, or None without torch or a GPU.

        A known card comes back as its preset with the SM count that the device reports (a MIG
        slice has fewer); an unknown one with the device's own sizes and no rates to speak of.
        """
        try:
            import torch
        except ImportError:
            return None
        if not torch.cuda.is_available():
            return None
        return from_properties(torch.cuda.get_device_properties(index))


def from_properties(properties: Any) -> Gpu:
    """A Gpu from torch's device properties: the preset of that name, or one without rates. A board
    with a preset's die and other memory (GH200, H100 PCIe) has its own name and no rate of memory.
    """
    reported = properties.name.upper()
    for gpu in PRESETS:
        if gpu.name.split()[0] in reported:
            words = set(reported.replace("-", " ").split())
            if gpu.name.split()[0] not in words or words & OTHER_BOARDS:
                gpu = replace(
                    gpu,
                    name=properties.name,
                    hbm_tbps=float("nan"),
                    source=f"device properties and {gpu.name}: rate of memory unknown",
                    ceilings=None,
                )
            sms = properties.multi_processor_count
            whole = sms == gpu.sms
            return gpu if whole else replace(gpu, sms=sms, ceilings=None, resident_clusters=())
    return _unknown(properties)


def _unknown(properties: Any) -> Gpu:
    return Gpu(
        name=properties.name,
        # kernels of this package are compiled for sm_90a, which each card of 9.0 runs
        arch=f"sm_{properties.major}{properties.minor}".replace("sm_90", "sm_90a"),
        sms=properties.multi_processor_count,
        smem_per_block=getattr(properties, "shared_memory_per_block_optin", 48 * KIB),
        smem_per_sm=getattr(properties, "shared_memory_per_multiprocessor", 48 * KIB),
        registers_per_sm=getattr(properties, "regs_per_multiprocessor", 65536),
        l2_bytes=getattr(properties, "L2_cache_size", 0),
        hbm_tbps=float("nan"),
        bf16_tflops=float("nan"),
        fp8_tflops=float("nan"),
        clock_mhz=getattr(properties, "clock_rate", 0) // 1000,
        source="device properties: rates unknown",
    )


#: Clusters that fit at once, one CTA an SM: cudaOccupancyMaxActiveClusters for CTAs with 225 KB of
#: shared memory on one H200 (2026-11-20). An SM left over in a GPC cannot join, and which
#: SMs a die has differs from card to card.
HOPPER_CLUSTERS = ((4, 30), (8, 15), (16, 7))

H100 = Gpu(
    name="H100 SXM",
    arch="sm_90a",
    sms=132,
    smem_per_block=227 * KIB,
    smem_per_sm=228 * KIB,
    registers_per_sm=65536,
    l2_bytes=50 * KIB * KIB,
    hbm_tbps=3.35,
    bf16_tflops=989.4,
    fp8_tflops=1978.9,
    clock_mhz=1830,
    source="NVIDIA H100 datasheet and architecture white paper (SXM5)",
    resident_clusters=HOPPER_CLUSTERS,
)
H800 = replace(H100, name="H800", source="as H100 SXM; NVLink 400 GB/s")
H200 = replace(
    H100,
    name="H200",
    hbm_tbps=4.8,
    source="NVIDIA H200 datasheet (SXM)",
    ceilings=Ceilings(
        read_tbps=4.33,
        copy_tbps=4.24,
        burst_tflops=789.0,
        sustained_tflops=(675.0, 702.0),
        launch_us=0.7,
        cold_read_us=((4_700_000, 2.8), (9_400_000, 3.9), (18_900_000, 6.0), (37_700_000, 10.7)),
        card="one NVIDIA H200",
        date="2026-11-20",
    ),
)
B200 = Gpu(
    name="B200",
    arch="sm_100a",
    sms=148,
    smem_per_block=227 * KIB,
    smem_per_sm=228 * KIB,
    registers_per_sm=65536,
    l2_bytes=126 * KIB * KIB,
    hbm_tbps=8.0,
    bf16_tflops=2250.0,
    fp8_tflops=4500.0,
    clock_mhz=1855,
    source="NVIDIA HGX B200 and DGX B200 datasheets (1000 W)",
)
PRESETS = (H100, H800, H200, B200)
#: words of boards whose memory is not that of the preset with the same die
OTHER_BOARDS = {"PCIE", "NVL"}
