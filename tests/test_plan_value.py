"""A plan as a value: equality, printing, JSON, rows and keys of a tile, its workspace."""

from __future__ import annotations

import numpy as np
import pytest

from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import (
    POLICIES,
    RULES,
    KernelConfig,
    Plan,
    WorkspaceLayout,
    make_plan,
    plan_without,
)
from mla_lab.plan.workspace import ALIGNMENT, MAX_GROUPS

RAGGED = Problem((2, 0, 3), (700, 50, 1), heads=40)


def test_equality_is_by_value():
    plan = make_plan(RAGGED, policy="greedy")
    assert plan == make_plan(RAGGED, policy="greedy")
    assert hash(plan) == hash(make_plan(RAGGED, policy="greedy"))
    assert plan != make_plan(RAGGED, policy="none")
    assert plan != make_plan(RAGGED, policy="greedy", num_workers=7)
    assert plan != "greedy"


def test_tables_cannot_be_changed():
    plan = make_plan(RAGGED)
    with pytest.raises(ValueError, match="read-only"):
        plan.tiles[0, 0] = 1


def test_rows_and_keys_of_tiles():
    plan = make_plan(RAGGED, policy="fixed", num_splits=2)
    tiles = {(t.request, t.row_tile, t.split_idx): t for t in plan}
    # 2 x 40 rows are 64 and 16; 3 x 40 rows are 64 and 56; no query rows, no tile
    assert sorted(tiles) == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (2, 0, 0),
        (2, 1, 0),
    ]
    assert plan.rows(tiles[0, 1, 0]) == (64, 80)
    assert plan.rows(tiles[2, 1, 0]) == (64, 120)
    # 700 keys are 11 blocks: 5 and 6, the last one cut at 700
    assert [plan.kv_range(tiles[0, 0, s]) for s in (0, 1)] == [(0, 320), (320, 700)]
    assert plan.splits().tolist() == [2, 0, 1]


def test_sparse_row_tiles_stay_inside_a_token():
    plan = make_plan(Problem((2,), (9,), heads=40, top_k=100), tile_rows=32, policy="none")
    assert [plan.rows(t) for t in sorted(plan)] == [(0, 32), (32, 40), (40, 72), (72, 80)]
    assert {plan.kv_range(t) for t in plan} == {(0, 100)}


def test_a_request_without_keys_has_one_empty_tile():
    for policy in POLICIES:
        (tile,) = make_plan(Problem((1,), (0,), heads=8), policy=policy)
        assert (tile.block_begin, tile.block_end, tile.num_splits, tile.slot) == (0, 0, 1, -1)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_query_rows_no_tiles(policy):
    plan = make_plan(Problem((0, 0), (9, 0), heads=8), policy=policy)
    assert plan.num_tiles == plan.num_slots == plan.workspace.nbytes == 0
    assert "0 busy of 132" in plan.summary()


def test_printing():
    plan = make_plan(Problem((1, 1), (8192, 100), heads=128), policy="greedy")
    text = str(plan)
    assert "plan greedy/persistent: batch 2, heads 128, kv 100 to 8192" in text
    assert f"{plan.num_slots} partials in {plan.num_groups} groups" in text
    assert f"workspace  {plan.workspace.nbytes:,} bytes" in text
    assert f"... {plan.num_tiles - 12} more tiles" in text
    assert len(text.splitlines()) == 5 + 1 + 12 + 1
    assert max(map(len, text.splitlines())) <= 110


def changed(plan: Plan, row: int, column: int, value: int) -> dict[str, object]:
    values = plan.to_dict()
    values["tiles"][row][column] = value
    return values


@pytest.mark.parametrize(
    ("column", "value"), [(0, 2), (1, 1), (2, 1), (3, 1), (4, 3), (5, 1), (6, 3), (7, 2)]
)
def test_a_damaged_plan_is_refused(column, value):
    plan = make_plan(RAGGED, policy="fixed", num_splits=2, schedule="grid")
    first = sorted(range(plan.num_tiles), key=lambda i: plan.tiles[i].tolist())[0]
    assert Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(InvalidInput, match="plan: got inconsistent"):
        Plan.from_dict(changed(plan, first, column, value))


def test_a_missing_or_doubled_tile_is_refused():
    plan = make_plan(RAGGED, policy="fixed", num_splits=2, schedule="grid")
    for tiles in (plan.tiles[1:], np.concatenate([plan.tiles, plan.tiles[:1]])):
        values = plan.to_dict() | {
            "tiles": tiles.tolist(),
            "worker_begin": list(range(len(tiles) + 1)),
        }
        with pytest.raises(InvalidInput, match="plan: got inconsistent"):
            Plan.from_dict(values)
    with pytest.raises(InvalidInput, match="plan: got inconsistent worker_begin"):
        Plan.from_dict(plan.to_dict() | {"worker_begin": [0, 2]})
    with pytest.raises(InvalidInput, match="plan: got ValueError"):
        Plan.from_dict(plan.to_dict() | {"tiles": ["a"] * 8})
    with pytest.raises(InvalidInput, match="kv_lens: got"):
        Plan.from_dict(plan.to_dict() | {"problem": {"q_lens": (1,), "kv_lens": (), "heads": 1}})
    with pytest.raises(InvalidInput, match="plan: got KeyError 'tiles'"):
        Plan.from_dict({k: v for k, v in plan.to_dict().items() if k != "tiles"})


@pytest.mark.parametrize("rule", RULES)
def test_what_a_call_without_a_plan_finds_is_written_and_read(rule):
    lengths = tuple(1000 + 777 * (b * 37 % 40) for b in range(40))
    plan = plan_without(Problem((1,) * 40, lengths, heads=128), rule)
    assert Plan.from_dict(plan.to_dict()) == plan
    partials = sum(tile.slot >= 0 for tile in plan)
    groups = len({tile.group for tile in plan if tile.group >= 0})
    assert plan.num_partials == partials
    assert f"{partials} partials in {groups} groups" in plan.summary()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tile_rows": 0}, "plan.tile_rows: got 0; supported: 1 or more"),
        ({"tile_rows": -64}, "plan.tile_rows: got -64; supported: 1 or more"),
        ({"tile_kv": 0}, "plan.tile_kv: got 0; supported: 1 or more"),
        ({"tile_rows": 64.5}, "plan: got TypeError"),
        ({"tile_rows": 16}, "plan.tile_rows: got 16; supported: 64, as in its config"),
    ],
)
def test_a_plan_of_other_sizes_than_its_kernel_s_is_refused(sizes, message):
    """As JSON may give them: a kernel would leave rows out without a word."""
    config = KernelConfig("cute/keep_ab_sm90")
    values = make_plan(Problem((1,), (700,), heads=16)).to_dict() | {"config": config.as_dict()}
    assert Plan.from_dict(values).config == config
    with pytest.raises(InvalidInput, match=message):
        Plan.from_dict(values | sizes)


def test_two_row_tiles_share_no_slot_and_no_group():
    plan = make_plan(Problem((1, 1), (700, 700), heads=16), policy="fixed", num_splits=2)
    for column in (6, 7):
        tiles = plan.tiles.copy()
        tiles[:, column] = tiles[:, 4] * (column == 6)
        with pytest.raises(InvalidInput, match="plan: got inconsistent slots or groups"):
            Plan.from_dict(plan.to_dict() | {"tiles": tiles.tolist()})


def test_sizes_must_be_positive():
    with pytest.raises(InvalidInput, match="tile_rows: got 0; supported: 1 or more"):
        make_plan(RAGGED, tile_rows=0)
    with pytest.raises(InvalidInput, match="tile_kv: got -1; supported: 1 or more"):
        make_plan(RAGGED, tile_kv=-1)
    with pytest.raises(InvalidInput, match="num_workers: got 0; supported: 1 or more"):
        make_plan(RAGGED, num_workers=0)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"num_workers": True}, "num_workers: got bool; supported: an int"),
        ({"tile_rows": True}, "tile_rows: got bool; supported: an int"),
        ({"model": "cheap"}, "model: got str; supported: a mla_lab CostModel, or None"),
        ({"problem": [700, 50]}, "problem: got list; supported: a mla_lab Problem"),
    ],
)
def test_what_is_of_another_type_is_named(named, message):
    with pytest.raises(InvalidType, match=message):
        make_plan(**{"problem": RAGGED, **named})


def test_unknown_schedule():
    with pytest.raises(InvalidInput, match="schedule: got 'cooperative'; supported"):
        make_plan(RAGGED, schedule="cooperative")


def test_workspace_layout():
    plan = make_plan(Problem((1,), (8192,), heads=128), policy="greedy")
    layout = plan.workspace
    assert [part.name for part in layout.slices] == [
        "counters",
        "ll_partials",
        "schedule",
        "partial_out",
        "partial_lse",
    ]
    assert layout["counters"].offset == 0
    assert layout["counters"].nbytes == 65536
    partials = layout["ll_partials"].nbytes
    assert partials == 19 * 2**19
    kept = layout["schedule"].nbytes
    assert kept == 256 * 576 * 4
    assert layout["partial_out"].offset == 65536 + partials + kept
    assert layout["partial_out"].shape == (86, 64, 512)
    assert layout["partial_lse"].shape == (86, 64)
    assert layout.nbytes == 65536 + partials + kept + 86 * 64 * 512 * 4 + 86 * 64 * 4
    assert str(layout).startswith(f"workspace: {layout.nbytes:,} bytes\n")
    assert make_plan(RAGGED, policy="none").workspace.slices == ()
    assert str(make_plan(RAGGED, policy="none").workspace) == "workspace: 0 bytes"


def test_workspace_slices_are_aligned_and_apart():
    layout = WorkspaceLayout.of(3, 1, 7, 512, device_tiles=11, device_workers=132)
    assert [part.name for part in layout.slices][5:] == [
        "tiles",
        "worker_begin",
        "counts",
    ]
    assert layout["tiles"].shape == (11, 8)
    assert layout["worker_begin"].shape == (133,)
    end = 0
    for part in layout.slices:
        assert part.offset % ALIGNMENT == 0
        assert end <= part.offset < end + ALIGNMENT
        end = part.offset + part.nbytes
    assert layout.nbytes == end


def test_workspace_refuses_what_it_cannot_use():
    layout = WorkspaceLayout.of(1, 1, 64, 512)
    layout.check(layout.nbytes, 512)
    with pytest.raises(InvalidInput, match=f"got 10 bytes; supported: {layout.nbytes} bytes"):
        layout.check(10)
    with pytest.raises(InvalidInput, match="address 0x110, 16 past a boundary"):
        layout.check(layout.nbytes, 272)
    with pytest.raises(InvalidInput, match="slice: got 'tiles'"):
        layout["tiles"]
    with pytest.raises(Unsupported, match=f"{MAX_GROUPS + 1} split row tiles"):
        WorkspaceLayout.of(2, MAX_GROUPS + 1, 64, 512)
    WorkspaceLayout.of(0, 0, 64, 512).check(0, 3)
