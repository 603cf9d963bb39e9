"""MLA decode on SM100 and SM103 by tcgen05: a pair of CTAs takes 128 query rows, 64 each.

Emulated, never run on a card. Operands, plans, records of work tiles, partials and merge are those
of `keep_ab_sm90`: `rows_on_m`, the merge of `split_merge` and `common` are used as they are.

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

from ...core.errors import unsupported
from ...plan.config import KernelConfig
from ..common.launch_arguments import LaunchForm, exported
from ..registry import CuteEntry
from ..rows_on_m.params import ELEMENTS, SHARED_BYTES
from .kernel import MlaSm100
from .params import Config

PAGE_SIZES = (16, 32, 64, 128)
#: (query, cache); as `backends.cute.blackwell.TAKEN`
TAKEN = (("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("bf16", "e4m3"))
#: query rows of a pair of CTAs
TILE_ROWS = 128


def check(config: KernelConfig) -> None:
    """Raises Unsupported for what this family does not compile."""
    if (config.q_dtype, config.kv_format) not in TAKEN:
        raise unsupported("q_dtype, kv_format", (config.q_dtype, config.kv_format), TAKEN)
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
        features=int(tree or any(map(config.option, ("features", "scales")))),
        scales=config.option("scales"),
        tree=int(tree),
    )
    if facts.shared_bytes > SHARED_BYTES:
        raise unsupported("shared memory", f"{facts.shared_bytes} B", f"{SHARED_BYTES} B")
    return facts


def entry(config: KernelConfig) -> CuteEntry:
    """The launch of `config` and its fake arguments."""
    facts = static_facts(config)
    form = LaunchForm(
        q=facts.q_element,
        kv=facts.element,
        out=facts.out_element,
        tile_rows=TILE_ROWS,
        page_size=facts.page_size,
        shaped=bool(config.option("shaped")),
        stats=TILE_ROWS,
        stats_align=16,
        features=bool(facts.features),
        tree=bool(facts.tree),
    )
    args = form.arguments()
    launch = exported("mla_sm100", MlaSm100(facts).launch, tuple(args))
    return CuteEntry(launch, tuple(args.values()), "mla_sm100")
