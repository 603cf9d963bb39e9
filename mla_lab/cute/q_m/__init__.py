"""Query rows on the M side: 64 rows a CTA, 128 a cluster of two; see `kernel` for the roles."""

from __future__ import annotations

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...errors import unsupported
from ...plan.config import KernelConfig
from ..registry import CuteEntry
from .kernel import QueryRowsOnM
from .storage import DTYPES, HEAD, LATENT, Config

PAGE_SIZES = (16, 32, 64, 128)


def static_facts(config: KernelConfig) -> Config:
    """Check what this family compiles, and pick what it reads."""
    if config.q_dtype not in DTYPES:
        raise unsupported("q_dtype", config.q_dtype, tuple(DTYPES))
    if config.kv_format != config.q_dtype or config.out_dtype != config.q_dtype:
        raise unsupported(
            "kv_format, out_dtype", (config.kv_format, config.out_dtype), "both q_dtype"
        )
    if (config.tile_rows, config.cluster) not in ((64, 1), (128, 2)):
        raise unsupported(
            "tile_rows, cluster", (config.tile_rows, config.cluster), "(64, 1) or (128, 2)"
        )
    if config.page_size not in PAGE_SIZES:
        raise unsupported("page_size", config.page_size, PAGE_SIZES)
    return Config(
        dtype=config.q_dtype,
        cluster=config.cluster,
        page_size=config.page_size,
        pdl=config.option("pdl", 1),
        go=config.option("go", 8),
        lse=config.option("lse", 1),
        fused_merge=config.option("fused_merge", 1),
    )


def entry(config: KernelConfig) -> CuteEntry:
    """Arguments in the order of `QueryRowsOnM.__call__`; all counts are symbols."""
    facts = static_facts(config)

    def dense(dtype, shape, align=16):  # type: ignore[no-untyped-def]
        order = tuple(range(len(shape) - 1, -1, -1))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    symbols = [cute.sym_int() for _ in range(12)]
    rows, pages, outs, lses, slots, slots2, counters, batch, width, ends, tiles, workers = symbols
    cache = make_fake_tensor(
        facts.element,
        (pages, facts.page_size, HEAD),
        stride=(cute.sym_int64(divisibility=8), HEAD, 1),
        assumed_align=16,
    )
    table = make_fake_tensor(Int32, (batch, width), stride=(cute.sym_int(), 1), assumed_align=4)
    args = (
        dense(facts.element, (rows, HEAD)),
        cache,
        dense(facts.element, (outs, LATENT)),
        dense(Float32, (lses,), 4),
        dense(Float32, (slots, config.tile_rows, LATENT)),
        dense(Float32, (slots2, config.tile_rows), 4),
        dense(Int32, (counters,), 4),
        table,
        dense(Int32, (cute.sym_int(),), 4),
        dense(Int32, (ends,), 4),
        dense(Int32, (tiles, 8)),
        dense(Int32, (workers,), 4),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return CuteEntry(QueryRowsOnM(facts), args, "q_m")
