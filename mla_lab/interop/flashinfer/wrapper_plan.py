"""What the paged wrapper plans: numbers and tensors of one step, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...call.checks import tensors as argument
from ...call.checks.shapes import DIMS
from ...core import masks
from ...core.errors import invalid, invalid_type, unsupported

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
CACHE_DTYPES = (*SIXTEEN_BITS, torch.float8_e4m3fn)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
#: page ids have 32 bits in a block table
LAST_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Planned:
    """What `plan` keeps for `run`: its numbers by their names there, and tensors on the wrapper's
    device.
    """

    #: numbers of one step that `run` compares its tensors with
    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    #: entries of kv_indices that the plan uses
    pages: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    sm_scale: float
    total_q: int
    batch: int
    #: query tokens of each request where all have the same number, else 0
    q_len: int
    max_q_len: int
    #: a bound of the lengths, tokens
    max_seq_len: int
    #: int32 [batch, pages of the longest request], [batch] and [batch + 1]
    block_tables: Tensor
    seq_lens: Tensor
    cum_seq_lens_q: Tensor
    #: uint16 [total_q, words]: all drafts of a request see each other; None where causal
    mask: Tensor | None


def side_by_side(left: Tensor, right: Tensor) -> Tensor | None:
    """The tensor whose first columns are `left` and whose others are `right`, or None.

    Both are views of one storage, and a step of the dimension before the last is one whole row.
    """
    width = left.shape[-1] + right.shape[-1]
    begin = left.storage_offset() + left.shape[-1]
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return None
    if right.storage_offset() != begin or {left.stride(-1), right.stride(-1)} != {1}:
        return None
    strides = [1]
    whole = width
    steps = (left.shape, left.stride(), right.stride())
    for size, a, b in zip(*(reversed(values[:-1]) for values in steps), strict=True):
        if size > 1 and (a != b or (len(strides) == 1 and a != width)):
            return None
        strides.append(a if size > 1 else whole)
        whole = strides[-1] * size
    return left.as_strided((*left.shape[:-1], width), strides[::-1])


def joined(ckv: Tensor, kpe: Tensor) -> Tensor:
    """A copy of both caches in one; bytes, since not every device joins 8-bit floats."""
    if ckv.dtype is not torch.float8_e4m3fn:
        return torch.cat([ckv, kpe], -1)
    return torch.cat([ckv.view(torch.uint8), kpe.view(torch.uint8)], -1).view(ckv.dtype)


def block_table(starts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """int32 [batch, columns] from page lists in CSR form; 0 behind a request's pages."""
    column = torch.arange(columns, dtype=torch.int32, device=starts.device)
    at = starts[:-1, None] + column
    if not len(indices):
        return torch.zeros_like(at)
    found = indices[at.clamp_max(len(indices) - 1).long()]
    return torch.where(at < starts[1:, None], found, 0)


def all_drafts(q_lens: list[int], columns: int, device: torch.device) -> Tensor:
    """The mask in which the query tokens of a request see each other, uint16 [total_q, words].

    Made word by word: a bit for each pair of tokens, in memory too.
    """
    own = torch.tensor(q_lens, device=device)
    own = own.repeat_interleave(own).int()
    first = masks.WORD_BITS * torch.arange(
        masks.words_per_row(columns), dtype=torch.int32, device=device
    )
    bits = (own[:, None] - first).clamp_(0, masks.WORD_BITS)
    # torch has few uint16 kernels: the low half of 2^bits - 1
    return ((1 << bits) - 1).to(torch.int16).view(torch.uint16)


def steps(name: str, sums: list[int]) -> list[int]:
    """Differences of prefix sums, each 0 or more; there is at least one."""
    found = [after - before for before, after in pairwise(sums)]
    if not found:
        raise invalid(name, f"{len(sums)} entries", "batch + 1, at least two")
    if sums[0] != 0 or min(found) < 0:
        raise invalid(name, sums[:8], "prefix sums: the first 0, none below the one before")
    return found


def write(kept: Tensor, value: Tensor) -> Tensor:
    """`kept`, which then holds `value`; where inference mode made it, it is written in it alone."""
    with torch.inference_mode():
        kept.copy_(value, non_blocking=True)
    return kept


def check_lists(given: Mapping[str, Tensor]) -> None:
    """Prefix sums, page ids and lengths of a step: integers, one dimension each."""
    for name, value in given.items():
        checked = argument.tensor(name, value)
        argument.dtype(name, checked, INTEGERS)
        argument.shape(name, checked, ("n",))
        if checked.is_meta:
            raise invalid(name, "device meta, which has no values", "a CPU or a GPU")


def check_pages(used: Tensor) -> None:
    """Page ids that a plan uses fit a block table. Those on a GPU are not read."""
    if used.device.type != "cpu" or not used.numel():
        return
    low, high = (int(value) for value in torch.aminmax(used))
    if low < 0 or high > LAST_PAGE:
        raise invalid("kv_indices", low if low < 0 else high, f"page ids from 0 to {LAST_PAGE}")


def check_same(old: Planned, numbers: Mapping[str, Any]) -> None:
    """A captured call keeps the numbers of the first plan."""
    for name, number in numbers.items():
        before = getattr(old, name)
        if number != before:
            raise invalid(name, number, f"{before}, as in the first plan, with CUDA graphs")


def check_workspace(name: str, buffer: object) -> None:
    """1-D bytes. Its size is checked against the plan of the contract's call."""
    found = argument.tensor(name, buffer)
    argument.array(name, found, [torch.uint8, torch.int8], [("bytes",)], found.device)


def check_buffer(name: str, buffer: Tensor | None, device: torch.device) -> None:
    """A buffer of the constructor for CUDA graphs: int32, one dimension, on `device`."""
    if not isinstance(buffer, Tensor):
        raise invalid_type(name, type(buffer).__name__, "a torch.Tensor with use_cuda_graph")
    if buffer.dtype is not torch.int32 or buffer.dim() != 1 or buffer.device != device:
        got = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        raise invalid(name, got, f"int32, one dimension, on {device}")


def check_dtypes(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """16-bit queries over their own dtype, or bf16 over e4m3."""
    if kv_dtype not in CACHE_DTYPES:
        raise invalid_type("kv_data_type", kv_dtype, CACHE_DTYPES)
    if kv_dtype is torch.float8_e4m3fn and q_dtype is not torch.bfloat16:
        supported = "q_data_type=torch.bfloat16 over a cache of e4m3"
        raise invalid_type("q_data_type", q_dtype, supported)
    if q_dtype not in SIXTEEN_BITS:
        raise invalid_type("q_data_type", q_dtype, SIXTEEN_BITS)


def check_dims(latent: int, rope: int) -> None:
    """Columns of ckv and kpe."""
    argument.any_integer("head_dim_ckv", latent)
    argument.any_integer("head_dim_kpe", rope)
    if (latent, rope) not in DIMS:
        raise unsupported("head_dim_ckv, head_dim_kpe", (latent, rope), DIMS)


def check_lengths(
    kv_lens: list[int], pages: list[int], page_size: int, used: int, indices: int
) -> None:
    """One length a request, within the pages that it has."""
    if len(kv_lens) != len(pages):
        raise invalid("kv_len_arr", f"{len(kv_lens)} lengths", f"one a request: {len(pages)}")
    if used > indices:
        raise invalid("kv_indices", f"{indices} pages", f"at least kv_indptr[-1] = {used}")
    for kv_len, count in zip(kv_lens, pages, strict=True):
        if not 0 <= kv_len <= count * page_size:
            raise invalid("kv_len_arr", kv_len, f"0 to {count} pages of {page_size} tokens")


def check_tensors(planned: Planned, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> None:
    """Types, dtypes, shapes and devices as planned, before anything is copied."""
    rows, device = (planned.total_q, planned.num_heads), planned.seq_lens.device
    tokens = (*argument.tensor("ckv_cache", ckv).shape[:1], planned.page_size)
    expected = {
        "q_nope": (q_nope, planned.q_data_type, (*rows, planned.head_dim_ckv)),
        "q_pe": (q_pe, planned.q_data_type, (*rows, planned.head_dim_kpe)),
        "ckv_cache": (ckv, planned.kv_data_type, (*tokens, planned.head_dim_ckv)),
        "kpe_cache": (kpe, planned.kv_data_type, (*tokens, planned.head_dim_kpe)),
    }
    for name, (value, dtype, shape) in expected.items():
        tensor = argument.tensor(name, value)
        if tensor.dtype is not dtype:
            raise invalid_type(f"{name}.dtype", tensor.dtype, f"the planned {dtype}")
        if tuple(tensor.shape) != shape:
            raise invalid(name, f"shape {list(tensor.shape)}", f"{list(shape)}, as planned")
        if tensor.device != device:
            raise invalid(name, f"device {tensor.device}", f"the wrapper's device, {device}")


def check_results(planned: Planned, out: Tensor | None, lse: Tensor | None) -> None:
    """The caller's out and lse, before anything is copied."""
    rows, device = (planned.total_q, planned.num_heads), planned.seq_lens.device
    if out is not None:
        argument.array("out", out, SIXTEEN_BITS, [(*rows, planned.head_dim_ckv)], device)
    if lse is not None:
        dense = (planned.batch, planned.q_len, planned.num_heads)
        shapes = [rows, dense] if planned.q_len else [rows]
        argument.array("lse", lse, [torch.float32], shapes, device)


def scales(
    planned: Planned, ckv_scale: float | None, kpe_scale: float | None
) -> tuple[float, float]:
    """Scale of the latent part, and of the rope part by it."""
    given = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}
    eight_bits = planned.kv_data_type is torch.float8_e4m3fn
    for name, value in given.items():
        if (value is not None) is not eight_bits:
            raise invalid(name, value, "a number for a cache of e4m3, else None")
        if value is not None and argument.number(name, value) <= 0:
            raise invalid(name, value, "a finite number above 0")
    if ckv_scale is None or kpe_scale is None:
        return 1.0, 1.0
    return float(ckv_scale), float(kpe_scale) / float(ckv_scale)
