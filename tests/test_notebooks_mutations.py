"""A notebook that teaches a thing fails when that thing is broken; unbroken, it passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab.bench.cases import uniform_case
from mla_lab.bench.records import describe_case
from mla_lab.core import kv_cache, masks
from mla_lab.emulate.races import Checker
from mla_lab.lab import (
    banks,
    eight_bits,
    film_breaks,
    layout,
    measuring,
    pair_film,
    predicted,
    session,
    tile_homes,
)
from mla_lab.lab.explorers import anatomy as anatomy_explorer
from mla_lab.lab.explorers import merge as merge_explorer
from mla_lab.lab.explorers import transpose as transpose_explorer
from mla_lab.lab.layout import Layout, Swizzle
from mla_lab.plan import schedule
from mla_lab.plan.cuts import Cuts
from mla_lab.reference import mla as reference

from . import notebook_runner


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No plan of one test is remembered by the next, and no widget lives on."""
    predicted.planned.cache_clear()
    yield
    predicted.planned.cache_clear()
    for widget in session._instances():
        widget.close()


def breaks(number: str, message: str | None = None) -> None:
    with pytest.raises(AssertionError, match=message):
        notebook_runner.run(number)


def test_a_planner_that_forgets_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = schedule.POLICIES["cost"]

    def forgetful(shape: Any, **knobs: Any) -> Cuts:
        cuts = cost(shape, **knobs)
        end = cuts.end.copy()
        if end[-1] - cuts.begin[-1] > 1:
            end[-1] -= 1
        return replace(cuts, end=end)

    monkeypatch.setitem(schedule.POLICIES, "cost", forgetful)
    breaks("31", "cost misses or repeats a block")


def test_a_planner_that_looks_at_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3 = schedule.POLICIES["fa3"]

    def curious(
        shape: Any, split_blocks: int = 0, max_splits: int = 0, half_blocks: int = 0
    ) -> Cuts:
        return fa3(shape)

    monkeypatch.setitem(schedule.POLICIES, "fixed_size", curious)
    breaks("33", "must not look at the neighbours")


def test_a_merge_that_forgets_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(outs: torch.Tensor, lses: torch.Tensor) -> reference.Result:
        return reference.Result(outs.mean(0), torch.logsumexp(lses, dim=0))

    monkeypatch.setattr(reference, "merge_partials", unweighted)
    monkeypatch.setattr(merge_explorer, "merge_partials", unweighted)
    breaks("32", "the merge is not the softmax")


def test_a_merge_that_multiplies_garbage_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(outs: torch.Tensor, lses: torch.Tensor) -> reference.Result:
        lse = torch.logsumexp(lses, dim=0)
        weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
        return reference.Result((weights[..., None] * outs).sum(0), lse)

    monkeypatch.setattr(reference, "merge_partials", careless)
    breaks("32", "an empty piece changed the result")


def test_a_layout_that_swaps_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    tile_2d = layout.tile_2d

    def swapped(matrix: Layout, tiles: tuple[int, int]) -> Layout:
        tiled = tile_2d(matrix, tiles)
        inner, _ = tiled.stride  # type: ignore[misc]
        return Layout(tiled.shape, (inner, inner))

    monkeypatch.setattr(layout, "tile_2d", swapped)
    breaks("20", "not a bijection")


def test_a_swizzle_that_flips_a_bit_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Swizzle.__call__
    monkeypatch.setattr(
        Swizzle,
        "__call__",
        lambda self, offset: whole(replace(self, bits=min(self.bits, 2)), offset),
    )
    assert banks.worst_column(128, Swizzle(3, 4, 3)) == 2
    breaks("21")


def test_a_mask_with_one_bit_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = masks.pack

    def flipped(visible: torch.Tensor) -> torch.Tensor:
        packed = pack(visible)
        if visible.shape[-1] > 16:
            packed.view(torch.int16)[-1, 0] ^= 1
        return packed

    monkeypatch.setattr(masks, "pack", flipped)
    breaks("35", "a bit is wrong")


def test_a_query_that_is_scaled_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "TOP", 4.0)
    breaks("40", "does not split")


def test_a_selector_that_takes_a_byte_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transpose_explorer, "ORDERS", (0x6240, 0x7350))
    breaks("40", "a byte is lost")


def test_a_cache_that_rounds_its_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = kv_cache.pack

    def careless(tokens: torch.Tensor, kv_format: str) -> torch.Tensor:
        return pack(torch.cat([tokens[..., :512], pack(tokens[..., 512:], "e4m3").to(tokens)], -1),
                    kv_format)  # fmt: skip

    monkeypatch.setattr(kv_cache, "pack", careless)
    breaks("40", "rope was rounded")


def test_an_anatomy_that_loses_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_lab.simulate.anatomy import predicted

    def forgetful(case: str, problem: Any) -> Any:
        whole = predicted(case, problem)
        return replace(whole, phases=whole.phases[:-1])

    anatomy_explorer.predictions.cache_clear()
    monkeypatch.setattr(anatomy_explorer, "predicted", forgetful)
    breaks("90", "phases do not add up to their call")
    anatomy_explorer.predictions.cache_clear()


def test_a_recorded_anatomy_that_loses_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *others), spans = anatomy_explorer.recorded_rows()
    longest = max(first.phases, key=lambda phase: phase[1])
    broken = replace(first, phases=tuple(p for p in first.phases if p != longest))
    monkeypatch.setattr(anatomy_explorer, "recorded_rows", lambda: ((broken, *others), spans))
    breaks("90", "phases do not add up to their call")


def test_an_emulator_that_lets_a_stage_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checker, "note", lambda *_: None)
    monkeypatch.setattr(film_breaks, "_FILMS", {})
    breaks("54", "not reported")


def test_a_wait_that_lets_everybody_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_breaks, "_without", lambda pcs: {})
    monkeypatch.setattr(film_breaks, "_FILMS", {})
    film_breaks.broken_program.cache_clear()
    breaks("54", "a missing arrive must hang")
    film_breaks.broken_program.cache_clear()


def test_a_map_of_tensor_memory_that_swaps_the_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tile_homes.lanes_and_columns

    def swapped(tile: tile_homes.Tile) -> Any:
        lanes, columns = whole(tile)
        return lanes ^ 64, columns

    monkeypatch.setattr(tile_homes, "lanes_and_columns", swapped)
    breaks("56", "lies elsewhere in tensor memory")


def test_softmax_warps_that_leave_scores_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    film = pair_film.film_of()
    uses = tuple(u for u in film.uses if (u.warp, u.kind, u.region) != (2, "load", "S1"))
    monkeypatch.setattr(pair_film, "film_of", lambda: replace(film, uses=uses))
    breaks("56", "each warp reads each tile once")


def record(folder: Path, **changes: Any) -> None:
    """A benchmark record of one row, valid but for `changes`."""
    environment = {
        "device": "cuda", "card": {"name": "NVIDIA H200"}, "python": "3.12", "cuda": "13.0",
        "libraries": {}, "mla_lab": "0.1.0", "commit": "0" * 40, "dirty": False, "smi": None,
    }  # fmt: skip
    method = {
        "timer": "CUDA graph", "rounds": 9, "warmups": 2, "rotation_bytes": 240_000_000,
        "min_launches": 16, "parts": 1, "seed": 0,
    }  # fmt: skip
    head = {"schema": 1, "time": "2026-11-20T12:00:00+00:00"}
    run = {
        **head, "kind": "run", "environment": environment, "method": method,
        "peers": [], "cases": 1, "ceilings": None,
    }  # fmt: skip
    case = uniform_case(64, 1, 128, 8192, "anchor")
    row = {
        **head, "kind": "result", **describe_case(case), "peer": "mla-lab", "part": 0,
        "status": "ok", "reason": None, "us": 228.0, "rounds": {"us": [228.0] * 9},
        "kv_copies": 2, "kv_rotation_bytes": 1_200_000_000, "launches_per_replay": 16,
        "rel_error": 0.002,
    } | changes  # fmt: skip
    lines = [json.dumps(run), json.dumps(row)]
    (folder / measuring.ANCHOR).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": 180.0, "rounds": {"us": [180.0] * 9}}, "below the floor"),
        ({"rel_error": 0.3}, "b64_q1_h128_kv8192"),
    ],
)
def test_a_recorded_row_that_cannot_be(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "data_dir", lambda: tmp_path)
    record(tmp_path)
    notebook_runner.run("90", until="recorded rows checked")
    record(tmp_path, **changes)
    breaks("90", message)


def test_a_recorded_row_of_another_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fastjsonschema

    monkeypatch.setattr(measuring, "data_dir", lambda: tmp_path)
    record(tmp_path, status="perhaps")
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        notebook_runner.run("90")
