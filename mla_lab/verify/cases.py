"""Factors and levels of a decode call, their constraints, and the inputs of a case.

A case names one level of each factor. `pairwise_cases` gives the cases of the table of
combinations: first a covering array of everything that the contract has, then one of what the
shipped CuTe builds run. Equal versions of this file give equal lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..call.form import Features
from ..core.kv_cache import POISON_BYTE
from ..core.problem import Problem
from ..reference.inputs import WILD_PAGE_IDS, DecodeInputs, make_inputs
from .pairwise import Case, cover

#: least occurrences of each pair of levels, in either list
TIMES = 3
#: bytes; e4m3 at batch 768 and 8192 keys needs 413 MB on the CUDA backend
WORKSPACE_BYTES = 512 << 20
#: bytes on a GPU; 40 batch-invariant requests of 64 x 128 rows with their own splits need 4.9 GB
CARD_WORKSPACE_BYTES = 5 << 30

FACTORS: dict[str, tuple[str, ...]] = {
    "format": (
        "bf16",
        "fp16",
        "fp16 to bf16",
        "bf16 to fp16",
        "bf16 on e4m3",
        "bf16 on 656",
        "e4m3",
        "e4m3 to e4m3",
    ),
    "layout": ("dense", "ragged", "ragged, bound"),
    "q_len": ("1", "2", "3", "5", "8", "33", "64"),
    "heads": ("1", "7", "16", "24", "64", "100", "128", "200"),
    "lengths": ("one", "edges", "mixed", "long", "longest", "equal", "many", "early"),
    "page_size": ("1", "2", "16", "32", "64", "128"),
    "cache": ("3-D", "4-D", "strided"),
    "tables": ("shared", "apart", "separate"),
    "mask": ("causal", "chain", "tree"),
    "sparse": ("dense", "top 5", "top 70", "top 700"),
    "sinks": ("none", "sinks"),
    "scales": ("floats", "device"),
    "lse": ("none", "natural", "base 2", "natural, 3-D"),
    "skip": ("none", "0", "1e-3"),
    "invariant": ("no", "yes"),
    "plan": ("own", "given"),
    "inputs": ("gauss", "heavy_tailed"),
    "slots": ("all", "of tokens", "of requests"),
    "query": ("whole", "apart", "heads first"),
    "bytes": ("uint8", "int8", "e4m3"),
    "bound": ("longest", "loose"),
    "sign": ("positive", "negative"),
    "ranks": ("1", "2"),
}

#: query, cache and out of a format
FORMATS: dict[str, tuple[str, str, str]] = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp16": ("fp16", "fp16", "fp16"),
    "fp16 to bf16": ("fp16", "fp16", "bf16"),
    "bf16 to fp16": ("bf16", "bf16", "fp16"),
    "bf16 on e4m3": ("bf16", "e4m3", "bf16"),
    "bf16 on 656": ("bf16", "fp8_656", "bf16"),
    "e4m3": ("e4m3", "e4m3", "bf16"),
    "e4m3 to e4m3": ("e4m3", "e4m3", "e4m3"),
}
#: names in `inputs.FEATURES` by level
_WORDS = {
    ("layout", "ragged"): "ragged",
    ("layout", "ragged, bound"): "max_q_len",
    ("cache", "4-D"): "cache_4d",
    ("cache", "strided"): "page_gap",
    ("tables", "separate"): "separate_tables",
    ("mask", "chain"): "chain_mask",
    ("mask", "tree"): "tree_mask",
    ("sinks", "sinks"): "sinks",
    ("scales", "device"): "device_scales",
    ("slots", "of tokens"): "top_k_lens",
}
#: dtypes of a cache of 656-byte tokens
BYTES = {"uint8": torch.uint8, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
#: a bound of all lengths, as an engine passes its longest context; its tables are wider, too
LOOSE_BOUND, LOOSE_TABLES = 131_072, 4


def whole(case: Mapping[str, str]) -> Case:
    """The case with the first level of each factor that it lacks: a record may be older than a
    factor, whose first level is what calls were before it.
    """
    return {name: case.get(name, levels[0]) for name, levels in FACTORS.items()}


def allowed(case: Mapping[str, str]) -> bool:
    """True if the contract has the call and it fits the memory; other calls are in the tests of
    errors.
    """
    case = _implied(case)
    if case.get("plan") == "given" and not _takes_plan(case):
        return False
    if case.get("sparse", "dense") != "dense" and not _takes_slots(case):
        return False
    if case.get("slots", "all") != "all" and case["sparse"] == "dense":
        return False
    if case.get("bytes", "uint8") != "uint8" and case["format"] != "bf16 on 656":
        return False
    if case.get("ranks", "1") != "1" and not _takes_ranks(case):
        return False
    if case.get("lse") == "natural, 3-D" and case.get("layout", "dense") != "dense":
        return False
    large = case.get("lengths") in ("long", "longest") or case.get("sparse") == "top 700"
    return not (large and int(case.get("q_len", "1")) > 8)


def _implied(case: Mapping[str, str]) -> Mapping[str, str]:
    """The case with levels of open factors that its others require, so that a case which no call
    completes is excluded before it is complete.
    """
    required = {}
    if case.get("slots", "all") != "all":
        required["sparse"] = "top 5"
    if case.get("bytes", "uint8") != "uint8":
        required["format"] = "bf16 on 656"
    return {**required, **case} if required else case


def for_kernels(case: Mapping[str, str]) -> Mapping[str, str]:
    """`_implied` of a case that a CuTe kernel runs: a negative scale lies in memory."""
    negative = case.get("sign") == "negative"
    return _implied({"scales": "device", **case} if negative else case)


def _is(case: Mapping[str, str], **levels: str) -> bool:
    """True if the case has these levels wherever it has chosen one."""
    return all(case.get(name, level) == level for name, level in levels.items())


def _is_plain(case: Mapping[str, str]) -> bool:
    """True without a mask, sinks, scales in memory and ranks."""
    return _is(case, mask="causal", sinks="none", scales="floats", ranks="1")


def _takes_slots(case: Mapping[str, str]) -> bool:
    """True unless a sparse call has a mask, ranks, skip-softmax, or tables that are separate or
    have gaps.
    """
    return _is(case, mask="causal", tables="shared", skip="none", ranks="1")


def _takes_ranks(case: Mapping[str, str]) -> bool:
    """True if the call may be a rank's: ranks are merged by lse and take their sinks there."""
    return case.get("sinks", "none") == "none" and case.get("lse") != "none"


def _takes_plan(case: Mapping[str, str]) -> bool:
    """True if a plan may be given: not where tokens are gathered one by one (a static grid), nor
    for batch-invariant requests of two kinds.
    """
    one_kind = case.get("invariant", "no") == "no" or case.get("layout", "dense") == "dense"
    by_page = case.get("sparse", "dense") == "dense" and int(case.get("page_size", "64")) >= 16
    return one_kind and by_page and case.get("skip", "none") == "none"


def has_kernel(case: Mapping[str, str]) -> bool:
    """True if a shipped CuTe build runs the case. 16-bit formats: everything but separate tables
    for values, queries with gaps and a negative number as scale, by a build for the page size or by
    gathering tokens; skip-softmax for the commonest pages. A caller's plan needs a build for the
    page size. fp8 caches: whole pages, sparse calls, and skip-softmax over e4m3.
    """
    case = for_kernels(case)
    if case.get("tables") == "separate" or case.get("query", "whole") != "whole":
        return False
    if case.get("sign") == "negative" and case["scales"] == "floats":
        return False
    if "e4m3" in FORMATS[case.get("format", "bf16")] or "656" in case.get("format", ""):
        return _has_eight_bits(case)
    if case.get("plan") == "given":
        bf16, page_64 = _is(case, format="bf16"), _is(case, page_size="64")
        some = bf16 or (case["format"] != "bf16 to fp16" and page_64)
        if not (bf16 and page_64) and not (some and _is_plain(case)):
            return False
    if case.get("skip", "none") in ("none", "0"):
        return True
    return _is(case, format="bf16", page_size="64", invariant="no")


def _has_eight_bits(case: Mapping[str, str]) -> bool:
    """True if a build over an fp8 cache has the case's features and page size. A case whose
    sparsity is not chosen yet may still become sparse.
    """
    sparse = case.get("sparse", "dense") != "dense"
    still_open = "sparse" not in case and _takes_slots(case) and case.get("plan", "own") == "own"
    if case["format"] != "e4m3 to e4m3" and (sparse or still_open):
        return True
    if sparse or int(case.get("page_size", "64")) < 16:
        return False
    if case.get("skip", "none") not in ("none", "0"):
        return _is(case, format="e4m3", page_size="64", invariant="no")
    page_64 = _is(case, page_size="64")
    if not _is(case, invariant="no"):
        return page_64 and _is_plain(case)
    if case["format"] == "e4m3":
        return True
    return page_64 or (case["format"] != "e4m3 to e4m3" and _is_plain(case))


@lru_cache(maxsize=1)
def pairwise_cases() -> tuple[Case, ...]:
    """The cases of both lists; every allowed pair of levels is in at least `TIMES` of each."""
    by_contract = cover(FACTORS, allowed, times=TIMES)
    by_kernels = cover(FACTORS, lambda case: allowed(case) and has_kernel(case), times=TIMES)
    return tuple(by_contract + [case for case in by_kernels if case not in by_contract])


def problem_of(case: Mapping[str, str]) -> Problem:
    """The case's Problem."""
    q_len = int(case["q_len"])
    kv_lens = _kv_lens(case["lengths"], q_len)
    some = (q_len, 0, max(1, q_len // 2), 1)
    q_lens = tuple(
        q_len if case["layout"] == "dense" else some[b % len(some)] for b in range(len(kv_lens))
    )
    q_dtype, kv_format, out_dtype = FORMATS[case["format"]]
    sparse = case["sparse"]
    return Problem(
        q_lens=q_lens,
        kv_lens=kv_lens,
        heads=int(case["heads"]),
        q_dtype=q_dtype,
        kv_format=kv_format,
        out_dtype=out_dtype,
        page_size=int(case["page_size"]),
        top_k=0 if sparse == "dense" else int(sparse.split()[1]),
    )


def _kv_lens(name: str, q_len: int) -> tuple[int, ...]:
    return {
        "one": (777,),
        "edges": (0, 1, 63, 64, 65, 128, 129),
        "mixed": (700, 0, 129, 5, 1),
        "long": (9000, 3, 260),
        "longest": (70_001, 2),
        "equal": (512,) * 4,
        "many": tuple(37 * b % 301 for b in range(40)),
        "early": (q_len - 1, 0, 1, q_len, q_len + 1, 2 * q_len + 60),
    }[name]


def inputs_of(
    case: Mapping[str, str], seed: int, device: torch.device | str = "cpu"
) -> DecodeInputs:
    """Seeded inputs of a case, with NaN in every slot that must not be read."""
    words = [word for (name, level), word in _WORDS.items() if case[name] == level]
    if case["lse"] != "none":
        words.append("lse")
    inputs = make_inputs(
        problem_of(case),
        seed,
        words,
        distribution=case["inputs"],
        device=device,
        workspace_bytes=256,
    )
    if case["slots"] == "of requests":
        inputs = _slots_of_requests(inputs, seed)
    if case["bound"] == "loose":
        inputs = _loosely_bounded(inputs)
    if case["tables"] == "apart":
        inputs = replace(inputs, block_tables=_rows_apart(inputs.block_tables))
    if case["ranks"] != "1":
        inputs = _of_rank(inputs, int(case["ranks"]), seed)
    if inputs.problem.kv_format == "fp8_656":
        inputs = replace(inputs, kv_cache=inputs.kv_cache.view(BYTES[case["bytes"]]))
    return replace(
        inputs,
        query=_laid_out(inputs.query, case["query"]),
        bmm1_scale=-inputs.bmm1_scale if case["sign"] == "negative" else inputs.bmm1_scale,
        bmm2_scale=inputs.bmm2_scale if case["scales"] == "device" else 0.7,
        return_lse_base="base2" if case["lse"] == "base 2" else None,
        skip_softmax_threshold_scale_factor=None if case["skip"] == "none" else float(case["skip"]),
    )


def _rows_apart(tables: Tensor) -> Tensor:
    """The block table as a view of a wider one, whose other columns hold invalid page ids."""
    shape = (*tables.shape[:-1], tables.shape[-1] + 3)
    wide = torch.full(shape, WILD_PAGE_IDS[0], dtype=torch.int32, device=tables.device)
    wide[..., : tables.shape[-1]] = tables
    return wide[..., : tables.shape[-1]]


def _slots_of_requests(inputs: DecodeInputs, seed: int) -> DecodeInputs:
    """The inputs with one number of slots for each request, and invalid slots behind those."""
    p = inputs.problem
    some = (p.top_k // 2 + 1, 0, p.top_k, 1)
    lens = [some[(b + seed) % len(some)] for b in range(p.batch)]
    # as many requests as query tokens: the numbers are of query tokens
    counts = [n for n, q_len in zip(lens, p.q_lens, strict=True) for _ in range(q_len)]
    counts = lens if p.batch == p.total_q else counts
    column = torch.arange(p.top_k)
    unused = (column >= torch.tensor(counts).unsqueeze(1)).view(inputs.block_tables.shape)
    slots = inputs.block_tables.masked_fill(unused.to(inputs.block_tables.device), WILD_PAGE_IDS[0])
    return replace(
        inputs,
        block_tables=slots,
        sparse_mla_top_k_lens=torch.tensor(lens, dtype=torch.int32, device=slots.device),
    )


def _loosely_bounded(inputs: DecodeInputs) -> DecodeInputs:
    """The inputs with `LOOSE_BOUND`, and block tables of `LOOSE_TABLES` times as many columns."""
    tables = inputs.block_tables
    if not inputs.sparse:
        unused = torch.full_like(tables, WILD_PAGE_IDS[0])
        tables = torch.cat([tables, *[unused] * (LOOSE_TABLES - 1)], dim=-1)
    return replace(inputs, block_tables=tables, max_seq_len=LOOSE_BOUND)


def _of_rank(inputs: DecodeInputs, ranks: int, seed: int) -> DecodeInputs:
    """The inputs as those of one rank of decode context parallel, which holds these tokens."""
    rank = seed % ranks
    # of a request's n tokens here the last is at position (n - 1) x ranks + rank, and the request
    # is up to ranks - 1 tokens longer
    of_all = [(n - 1) * ranks + rank + 1 + n % ranks if n else rank for n in inputs.problem.kv_lens]
    return replace(
        inputs,
        enable_dcp=True,
        cp_world=ranks,
        cp_rank=rank,
        causal_seqlens_kv_global=torch.tensor(
            of_all, dtype=torch.int32, device=inputs.seq_lens.device
        ),
    )


def _laid_out(query: Tensor, layout: str) -> Tensor:
    """The query as a view of a tensor with NaN between its rows: with gaps behind each head and
    each token, or with all tokens of a head before the next head.
    """
    if layout == "whole":
        return query
    rows = query.flatten(0, -3)
    tokens, heads, width = rows.shape
    size = (heads, tokens) if layout == "heads first" else (tokens, heads + 1)
    raw = torch.full(
        (*size, (width + 64) * rows.itemsize), POISON_BYTE, dtype=torch.uint8, device=rows.device
    )
    wide = raw.view(rows.dtype)[..., :width]
    apart = wide.transpose(0, 1) if layout == "heads first" else wide[:, :heads]
    apart.copy_(rows)
    return apart if query.dim() == 3 else apart.unflatten(0, query.shape[:2])


def form_features(case: Mapping[str, str]) -> Features:
    """What the form of a case's call says, as a backend's `supports` takes it."""
    ragged, dense, mask = case["layout"] != "dense", case["sparse"] == "dense", case["mask"]
    # of a ragged call a request may have all query tokens
    several = (problem_of(case).total_q if ragged else int(case["q_len"])) > 1
    return Features(
        ragged=ragged,
        causal=several and mask == "causal" and dense,
        mask=mask != "causal",
        sinks=case["sinks"] == "sinks",
        lse=case["lse"] != "none",
        sparse=not dense,
        top_k_lens=case["slots"] != "all",
        skip_softmax=case["skip"] not in ("none", "0"),
        tensor_scales=case["scales"] == "device",
        nonpositive_scale=(case["sign"], case["scales"]) == ("negative", "floats"),
        separate_tables=case["tables"] == "separate",
        context_parallel=case["ranks"] != "1" and (several or mask != "causal"),
        batch_invariant=case["invariant"] == "yes",
        strided_query=case["query"] != "whole",
        strided_pages=case["cache"] == "strided",
        strided_tables=case["tables"] == "apart",
        planned=case["plan"] == "given",
    )


def features_of(case: Mapping[str, str]) -> tuple[str, ...]:
    """Features of a case beyond the plain call, by their names in the table of pairs."""
    return tuple(name for name, is_used in uses(case).items() if is_used)


def uses(case: Mapping[str, str]) -> dict[str, bool]:
    """Whether a case uses each feature, in the order of the tables."""
    case = whole(case)
    q_len = int(case["q_len"])
    return {
        "ragged": case["layout"] != "dense",
        "drafts": q_len > 1 and case["mask"] == "causal",
        "tree mask": case["mask"] != "causal",
        "sparse": case["sparse"] != "dense",
        "sinks": case["sinks"] != "none",
        "lse": case["lse"] != "none",
        "device scales": case["scales"] == "device",
        "skip-softmax": case["skip"] not in ("none", "0"),  # a factor of 0 skips no tile
        "batch invariant": case["invariant"] == "yes",
        "plan": case["plan"] == "given",
        "strided": case["cache"] == "strided" or case["tables"] == "apart",
        "separate tables": case["tables"] == "separate",
        "pages below 16": int(case["page_size"]) < 16,
        "numbers of slots": case["slots"] != "all",
        "query apart": case["query"] != "whole",
        "loose bound": case["bound"] == "loose",
        "negative scale": case["sign"] == "negative",
        "ranks": case["ranks"] != "1",
    }


def choices_of(case: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of the call besides its inputs."""
    return {"batch_invariant": case["invariant"] == "yes"}
