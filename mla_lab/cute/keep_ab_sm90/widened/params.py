"""Static configuration and shared-memory views of the widening kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8

from ....core.errors import unsupported
from ....core.problem import FP8_656_BYTES, LATENT_DIM
from ....plan.config import KernelConfig
from ...common.barriers import MBarriers, NamedBarrier
from ...common.pipeline import Pipeline
from ..params import BLOCK, BOX, RECORD_WORDS, RECORDS, STAGE, Config

#: bytes of a token: 512 e4m3, 4 fp32 scales, 64 bf16 of rope
TOKEN_BYTES, SCALES_BEGIN, ROPE_BEGIN = FP8_656_BYTES, LATENT_DIM, LATENT_DIM + 16
#: boxes of 64 columns under one scale each, and scales of a token
LATENT_BOXES, SCALES = LATENT_DIM // 64, 4
#: threads of the producer warp group, those that share a token, tokens they widen at once
PRODUCERS, TOKEN_THREADS = 128, 8
AT_ONCE = PRODUCERS // TOKEN_THREADS
#: bytes of a stage and of a row of 64 columns
STAGE_BYTES, BOX_BYTES, ROW_BYTES = STAGE * 2, BOX * 2, 128
#: how a token is found
PAGED, SPARSE = 1, 2
#: bits of `parts`, all of them in every build but a probe's
WIDEN, PUSH, PRODUCTS, ALL_PARTS = 1, 2, 4, 7

#: orders a record, written by the first producer warp, before the other producer warps read it
PRODUCER_BARRIER = NamedBarrier(3, PRODUCERS)


@dataclass(frozen=True)
class WidenedConfig(Config):
    """What is compiled in. `dtype` is that of the query, the widened rows and P."""

    #: PAGED or SPARSE
    gather: int = SPARSE
    #: parts of the kernel that run; fewer only to time them alone, which gives no result
    parts: int = ALL_PARTS
    #: registers of a PV thread (0: the default); a thread of the other roles has 256 minus that
    pv_registers: int = 0
    #: 1: widened rows go to the other CTA by bulk copies, not by `st.async`
    bulk: int = 0
    #: 1: PV releases the halves of a stage one after the other
    halves: int = 0
    #: 1: P of a tile is committed when QK of the next one is almost done
    qk_first: int = 0

    @property
    def widened(self) -> bool:
        return True

    @property
    def units(self) -> int:
        """Tokens of a tile that a producer thread widens an eighth of."""
        return BLOCK // (AT_ONCE * self.cluster)

    @property
    def sharers(self) -> int:
        """Producer threads that share a token of this CTA's part of a tile."""
        return PRODUCERS * self.cluster // BLOCK

    @property
    def parts_of_stage(self) -> int:
        """Parts of a stage that are released on their own."""
        return 2 if self.halves else 1

    def part_of(self, unit: int) -> int:
        """The part of a stage that a unit's tokens are in."""
        return unit * self.parts_of_stage // self.units

    @property
    def pushed_bytes(self) -> int:
        """Bytes of a stage that the other CTA writes."""
        return STAGE_BYTES // 2 if self.cluster == 2 and self.parts & PUSH else 0

    @property
    def shared_bytes(self) -> int:
        """KV stages, the query, 2,048 B of barriers, records and row values."""
        return self.ring_bytes + STAGE_BYTES + 2048


@dataclass(frozen=True)
class WidenedShared:
    """Views of shared memory; fields that `Shared` has mean the same."""

    sKV: cute.Tensor
    sVt: cute.Tensor
    sQ: cute.Tensor  # (64, 576), 128-byte swizzle
    sRescale: cute.Tensor
    records: cute.Tensor
    sRowSum: cute.Tensor
    sRowMax: cute.Tensor
    plan: cute.Tensor  # int32 (32), see `tile_scheduler.find_plan`
    sValid: cute.Tensor  # int32 (2, stage): bit t of word h says that token 32 h + t is one
    kv_pipe: Pipeline  # full[stage], empty[stage]
    p_pipe: Pipeline
    stats_read: MBarriers
    q_pipe: Pipeline  # full[0], empty[0]


@cute.jit
def allocate(cfg: cutlass.Constexpr[WidenedConfig], kv_layout, q_layout):
    """Shared memory: 222,208 B with two stages."""
    alloc = cutlass.memory.SmemAllocator()
    element, stages = BFloat16, cfg.stages

    def array(dtype, shape, align, stride=None):
        layout = (
            cute.make_layout(shape) if stride is None else cute.make_layout(shape, stride=stride)
        )
        return alloc.allocate_tensor(dtype, layout, byte_alignment=align)

    def tile(layout):
        return alloc.allocate_tensor(
            element, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    kv_full = alloc.allocate_array(Int64, (3 + cfg.parts_of_stage) * stages + 3)
    records = array(Int32, (RECORD_WORDS, RECORDS), 8)
    rescale = array(Uint8, (BLOCK, stages), 64, (1, BLOCK))
    row_sum, row_max = array(Float32, BLOCK, 64), array(Float32, BLOCK, 64)
    plan = array(Int32, 32, 64)
    valid = array(Int32, (2, stages), 16)
    kv, q = tile(kv_layout), tile(q_layout)
    v_t = cute.make_tensor(
        kv.iterator,
        cute.make_layout(((64, 8), BLOCK, stages), stride=((1, BOX), 64, STAGE)),
    )
    kv_empty = kv_full + stages
    p_full = kv_empty + stages * cfg.parts_of_stage
    p_empty = p_full + stages
    stats = p_empty + stages
    return WidenedShared(
        kv, v_t, q, rescale, records, row_sum, row_max, plan, valid,
        Pipeline(MBarriers(kv_full), MBarriers(kv_empty)),
        Pipeline(MBarriers(p_full), MBarriers(p_empty)),
        MBarriers(stats),
        Pipeline(MBarriers(stats + 1), MBarriers(stats + 2)),
    )  # fmt: skip


def check_widened(config: KernelConfig) -> None:
    """Raises Unsupported for what is not compiled with the option widen."""
    formats = (config.q_dtype, config.kv_format)
    if formats != ("bf16", "fp8_656"):
        raise unsupported("kv_format", f"{formats} with widen", ("bf16", "fp8_656"))
    if config.option("gather") not in (PAGED, SPARSE):
        raise unsupported("gather", config.option("gather"), (PAGED, SPARSE))
    if config.option("halves") and config.cluster == 1:
        raise unsupported("halves", "1 in one CTA", "a cluster of 2")
    if not 0 <= config.option("parts", ALL_PARTS) <= ALL_PARTS:
        raise unsupported("parts", config.option("parts"), f"0 to {ALL_PARTS}")
    if config.mask == "tree" or any(map(config.option, ("skip", "stamps", "stages"))):
        got = f"mask {config.mask!r}, {config.options} with widen"
        raise unsupported("options", got, "features, scales, parts")


def widened_facts(config: KernelConfig) -> dict[str, int]:
    """Facts that a build of this kind has beside those of `Config`."""
    return {
        "gather": config.option("gather"),
        "parts": config.option("parts", ALL_PARTS),
        "stages": 2,
        **{name: config.option(name) for name in ("pv_registers", "bulk", "halves", "qk_first")},
    }
