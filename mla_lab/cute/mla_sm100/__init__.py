"""MLA decode on SM100 and SM103 by tcgen05: a pair of CTAs takes 128 query rows, 64 each.

Emulated, never run on a card. Names, operands, plans, partials and merge are those of
`keep_ab_sm90`; its `tile_scheduler`, the merge of `split_merge` and `common` are used as they are.

    kernel        the launch: roles, barriers, tensor memory, timeline (read it first)
    producer      Q, K and V by TMA, by one warp
    mma           both products, by one thread of the pair's leader
    softmax       softmax, P, rescaled O: one warp group; mask: masked scores
    epilogue      results and partials from tensor memory
    query_terms   a bf16 query over e4m3
    params        static configuration, operands, shared memory

Why pairs. O of 128 rows is 128 lanes x 512 columns of fp32: all tensor memory of an SM, with no
column left for S. Of 64 rows in one CTA (`cta_group::1`, M = 64) the tensor core works at half its
rate. A pair with M = 128 (`cta_group::2`) keeps the full rate, gives each SM 64 rows in 256 columns
for O and 2 x 64 for S, and reads each K and V byte into one of the two SMs for S and O alone.

On paper, per tile of 128 tokens and pair, 16 bits (8 bits: half of each, but the exponentials)
    tensor core   1,152 clocks QK and 1,024 PV at 8,192 multiply-adds a clock of the pair
    memory        147,456 B: 2,540 clocks at 8 TB/s over 74 pairs at 1.85 GHz, the bound of 1 to
                  128 rows; with more rows the tensor core is
    TMA           K 73,728 B and V 65,536 B a CTA; half of V again from L2, because QK needs a CTA's
                  tokens and PV a CTA's columns: 64 B a clock at the tensor core's pace
    shared memory Q 73,728, K 73,728, V 65,536, P 16,384 B of 232,448: so K and V have one slot
                  each, released and filled again in 3 and 4 chunks behind the MMA that reads them
    softmax       8,192 exponentials a CTA: 512 clocks of 2,176
Fewer than 128 rows waste tensor clocks, which memory covers, so that one tile serves all calls.
P goes through shared memory: operand A of a pair in tensor memory has no confirmed layout, and P's
16,384 B fit. O is rescaled by the softmax warp group itself, when a row max has moved by 2^8
(2^2.75 of e4m3), by powers of two: rarely, so that no warp group is kept for it.

What only a card can settle, and what guards it: `data/notes/sm100.md`.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Uint16, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...core.errors import unsupported
from ...plan.config import KernelConfig
from ..registry import CuteEntry
from ..split_merge import SplitMerge
from .kernel import MlaSm100
from .params import ELEMENTS, HEAD, LATENT, SHARED_BYTES, Config

PAGE_SIZES = (16, 32, 64, 128)
#: (query, cache)
FORMATS = (("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("bf16", "e4m3"))
#: query rows of a pair of CTAs
TILE_ROWS = 128


def check(config: KernelConfig) -> None:
    """Raises Unsupported for what this family does not compile."""
    if (config.q_dtype, config.kv_format) not in FORMATS:
        raise unsupported("q_dtype, kv_format", (config.q_dtype, config.kv_format), FORMATS)
    outs = ELEMENTS if config.q_dtype == "e4m3" else ("bf16", "fp16")
    if config.out_dtype not in outs:
        raise unsupported("out_dtype", config.out_dtype, tuple(outs))
    tile = (config.tile_rows, config.cluster)
    if tile != (TILE_ROWS, 2):
        raise unsupported("tile_rows, cluster", tile, (TILE_ROWS, 2))
    if config.page_size not in PAGE_SIZES:
        raise unsupported("page_size", config.page_size, PAGE_SIZES)
    for option in ("skip", "stamps", "stages"):
        if config.option(option):
            raise unsupported(f"option {option}", config.option(option), "0")
    if config.option("fused_merge", 1) != 1:
        raise unsupported("fused_merge", config.option("fused_merge"), "1")


def static_facts(config: KernelConfig) -> Config:
    """What is compiled in for `config`; raises Unsupported."""
    check(config)
    tree = config.mask == "tree"
    facts = Config(
        dtype=config.q_dtype,
        kv_format=config.kv_format,
        out_dtype=config.out_dtype,
        page_size=config.page_size,
        pdl=config.option("pdl", 1),
        split_merge=SplitMerge.COOPERATIVE,
        features=int(tree or any(map(config.option, ("features", "scales")))),
        scales=config.option("scales"),
        tree=int(tree),
    )
    if facts.shared_bytes > SHARED_BYTES:
        raise unsupported("shared memory", f"{facts.shared_bytes} B", f"{SHARED_BYTES} B")
    return facts


def entry(config: KernelConfig) -> CuteEntry:
    """Operands in the order of keep_ab's `entry`; all counts are symbols.

    Query and out come as rows [rows, 576], or with the option `shaped` as callers have them,
    [batch, q_len, heads, 576], with lse [tokens, heads].
    """
    facts = static_facts(config)

    def dense(dtype, shape, align=16):
        order = tuple(range(len(shape) - 1, -1, -1))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def counts(number):
        return tuple(cute.sym_int() for _ in range(number))

    shaped = config.option("shaped")
    batch, ends = counts(2)
    cache = make_fake_tensor(
        facts.element,
        (*counts(1), facts.page_size, HEAD),
        stride=(cute.sym_int64(divisibility=128 // facts.element.width), HEAD, 1),
        assumed_align=16,
    )
    table = make_fake_tensor(
        Int32, (batch, *counts(1)), stride=(cute.sym_int(), 1), assumed_align=4
    )
    features = [dense(Float32, counts(1), 4) for _ in range(3)]
    if facts.tree:
        features.append(dense(Uint16, counts(3 if shaped else 2), 4))
    args = (
        dense(facts.q_element, (*counts(3 if shaped else 1), HEAD)),
        cache,
        dense(facts.out_element, (*counts(3 if shaped else 1), LATENT)),
        dense(Float32, counts(2 if shaped else 1), 4),
        dense(Float32, (*counts(1), TILE_ROWS, LATENT)),
        dense(Float32, (*counts(1), TILE_ROWS)),
        dense(Int32, counts(1), 4),
        table,
        dense(Int32, counts(1), 4),
        dense(Int32, (ends,), 4),
        dense(Int32, (*counts(1), 8)),
        dense(Int32, counts(1), 4),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        *(Int32(1) for _ in range(3)),
        *((tuple(features),) if facts.features else ()),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return CuteEntry(MlaSm100(facts), args, "mla_sm100")
