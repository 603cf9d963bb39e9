"""The merge of split partials on a GPU against a float64 merge."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mla_lab.backends.cuda.ops import Merge
from mla_lab.reference.mla import merge_partials

pytestmark = pytest.mark.gpu

SENTINEL = 7.0


@dataclass
class Case:
    """Row tiles of requests, some of them split, as a plan would leave them."""

    partials: tuple[torch.Tensor, torch.Tensor]
    items: torch.Tensor
    q_begin: torch.Tensor
    heads: int
    splits: list[int]

    @property
    def rows(self) -> int:
        return int(self.q_begin[-1]) * self.heads


def make_case(splits: list[int], heads: int, q_len: int, tile_rows: int, seed: int = 0) -> Case:
    """One request for each number of splits; 1 leaves the request to the attention kernel."""
    generator = torch.Generator("cuda").manual_seed(seed)
    row_tiles = -(-heads * q_len // tile_rows)
    items, slot = [], 0
    for request, number in enumerate(splits):
        for row_tile in range(row_tiles):
            if number > 1:
                items.append([request, row_tile, slot, number])
                slot += number
    items.append([0, 0, 0, 0])  # a row that is not in use
    shape = (max(slot, 1), tile_rows)
    out = torch.randn(*shape, 512, generator=generator, device="cuda")
    lse = 3 * torch.randn(shape, generator=generator, device="cuda")
    # partials without keys: lse -inf, and an out that must not be looked at
    empty = torch.rand(shape, generator=generator, device="cuda") < 0.15
    lse[empty], out[empty] = float("-inf"), float("nan")
    if slot:
        first, number = items[0][2], items[0][3]
        lse[first : first + number, 0] = float("-inf")  # one row without any key
    q_begin = torch.arange(len(splits) + 1, dtype=torch.int32, device="cuda") * q_len
    words = torch.tensor(items, dtype=torch.int32, device="cuda")
    return Case((out, lse), words, q_begin, heads, splits)


def expected(case: Case, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 out and natural lse; the sentinel where nothing is merged."""
    out = torch.full((case.rows, 512), SENTINEL, dtype=torch.float64, device="cuda")
    lse = torch.full((case.rows,), SENTINEL, dtype=torch.float64, device="cuda")
    tile_rows = case.partials[0].shape[1]
    for request, row_tile, first, number in case.items.tolist():
        begin, end = (case.q_begin[request : request + 2] * case.heads).tolist()
        at = begin + row_tile * tile_rows
        rows = min(tile_rows, end - at)
        if number == 0:
            continue
        outs, lses = (p[first : first + number, :rows].double() for p in case.partials)
        head = torch.arange(at - begin, at - begin + rows, device="cuda") % case.heads
        merged = merge_partials(outs, lses, None if sinks is None else sinks.double()[head])
        out[at : at + rows], lse[at : at + rows] = merged.out, merged.lse
    return out, lse


def run(
    case: Case,
    dtype: torch.dtype,
    sinks: torch.Tensor,
    scale: torch.Tensor | None = None,
    **settings: object,
):
    out = torch.full((case.rows, 512), SENTINEL, dtype=dtype, device="cuda")
    lse = torch.full((case.rows,), SENTINEL, device="cuda")
    merge = Merge(case.heads, **settings)  # type: ignore[arg-type]
    merge(case.partials, case.items, case.q_begin, out, lse, sinks, scale)
    return out, lse


def no_sinks() -> torch.Tensor:
    return torch.empty(0, device="cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("splits", "heads", "q_len", "tile_rows"),
    [
        ([2], 16, 1, 16),
        ([1, 3, 1, 2], 128, 1, 64),
        ([8, 9, 31, 32, 33], 7, 3, 8),
        ([64, 65, 132], 24, 2, 32),
        ([300], 100, 1, 128),
        ([1, 1], 16, 1, 16),
    ],
)
def test_against_float64(
    splits: list[int], heads: int, q_len: int, tile_rows: int, with_sinks: bool, dtype: str
) -> None:
    case = make_case(splits, heads, q_len, tile_rows)
    sinks = torch.randn(heads, device="cuda") if with_sinks else None
    given = no_sinks() if sinks is None else sinks
    out, lse = run(case, getattr(torch, dtype), given)
    want_out, want_lse = expected(case, sinks)
    tolerance = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 3e-6}[dtype]
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)


def test_scale_and_base() -> None:
    case = make_case([4, 2], 16, 1, 16)
    natural, base_e = run(case, torch.float32, no_sinks())
    halved, base_2 = run(case, torch.float32, no_sinks(), out_scale=0.5, lse_base2=True)
    torch.testing.assert_close(halved, natural * 0.5)
    in_memory, _ = run(case, torch.float32, no_sinks(), torch.full((1,), 0.5, device="cuda"))
    assert torch.equal(in_memory, halved)
    torch.testing.assert_close(base_2, base_e / torch.tensor(2.0).log().item())


def test_no_lse_is_written_where_none_is_wanted() -> None:
    case = make_case([4], 16, 1, 16)
    with_lse, _ = run(case, torch.bfloat16, no_sinks())
    out = torch.zeros_like(with_lse)
    none = torch.empty(0, device="cuda")
    Merge(case.heads)(case.partials, case.items, case.q_begin, out, none, no_sinks())
    assert torch.equal(out, with_lse)


def test_same_bits_alone_among_others_and_in_a_graph() -> None:
    many = make_case([5, 17, 40], 16, 1, 16)
    out, lse = run(many, torch.bfloat16, no_sinks())
    again, lse_again = run(many, torch.bfloat16, no_sinks(), programmatic_launch=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    alone = Case(many.partials, many.items[1:2], many.q_begin, 16, many.splits)
    single, _ = run(alone, torch.bfloat16, no_sinks())
    assert torch.equal(single[16:32], out[16:32])
    assert (single[:16] == SENTINEL).all()
    captured = torch.zeros_like(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        Merge(16)(many.partials, many.items, many.q_begin, captured, lse, no_sinks())
    graph.replay()
    assert torch.equal(captured, out)


@pytest.mark.parametrize("wrong", ["dtype", "device", "width"])
def test_wrong_tensors_are_refused_by_name(wrong: str) -> None:
    case = make_case([2], 16, 1, 16)
    out, lse = case.partials
    bad = {"dtype": out.half(), "device": out.cpu(), "width": out[..., :256].contiguous()}[wrong]
    case.partials = (bad, lse)
    with pytest.raises(ValueError, match="partial_out: got"):
        run(case, torch.bfloat16, no_sinks())
