"""Notebook 56: the maps of both cards, the film of a pair of CTAs, and its pictures."""

from __future__ import annotations

import numpy as np
import pytest

from mla_lab import lab
from mla_lab.core.errors import InvalidInput
from mla_lab.emulate.tiles import accumulator_registers
from mla_lab.lab import pair_film, tile_homes
from mla_lab.lab.film import barrier_name

PAIR = tile_homes.TILES["S, 128 rows x 128 tokens"]


@pytest.mark.parametrize("name", tile_homes.TILES)
def test_hopper_registers_are_those_of_the_emulator(name: str) -> None:
    tile = tile_homes.TILES[name]
    columns = tile.group_columns
    registers = accumulator_registers(np.arange(64 * columns).reshape(64, columns))
    for row, column in ((0, 0), (19, 30), (63, columns - 1), (tile.rows - 1, tile.columns - 1)):
        at = tile_homes.hopper(tile, row, column)
        assert registers[at.value, at.thread] == row % 64 * columns + column % columns
        assert (at.cta, at.group) == (row // 64, column // columns)


def test_tensor_memory_has_the_regions_of_the_kernel() -> None:
    wide = tile_homes.TILES["O, 128 rows x 512 columns"]
    assert tile_homes.blackwell(PAIR, 70, 100) == (1, 70, 36)
    assert tile_homes.blackwell(wide, 70, 300) == (1, 70, 128 + 300 - 256)
    assert tile_homes.blackwell(wide, 5, 200) == (0, 5, 328)
    alone = tile_homes.TILES["S, 64 rows x 64 tokens"]
    assert tile_homes.blackwell(alone, 35, 7) == (0, 67, 7)
    assert tile_homes.reader(tile_homes.blackwell(PAIR, 70, 100)) == 70
    with pytest.raises(InvalidInput, match="inside S"):
        tile_homes.blackwell(PAIR, 128, 0)


def test_the_recorded_call_writes_each_region_in_turn() -> None:
    film = pair_film.film_of()
    assert film.right and not film.findings and film.tiles == 4
    assert [h.what for h in film.held("S1") if h.state == "written"] == ["tile 1", "tile 3"]
    sums = [h.what for h in film.held("O") if h.state == "written"]
    assert sums == ["tile 0", "tiles 0 to 1", "tiles 0 to 2", "tiles 0 to 3"]
    first, second = (film.writes(name) for name in ("S0", "S1"))
    assert first[0][1] <= second[0][0] <= film.writes("O")[0][0], "QK of the next tile, then PV"
    assert film.at("S0", 0) is None


def test_barriers_are_named_as_in_the_kernel() -> None:
    names = [barrier_name(8 * i, pair_film.BARRIERS) for i in range(23)]
    assert len(set(names)) == 23 and names[16:20] == ["s_full[0]", "s_full[1]", "p_full", "o_full"]
    with pytest.raises(InvalidInput, match="mbarrier"):
        barrier_name(8 * 23, pair_film.BARRIERS)
    waits = {pair_film.named(s.name) for s in pair_film.film_of().spans if s.kind == "wait"}
    assert {"s_full[0]", "s_full[1]", "p_full", "o_full", "k.full[0]"} <= waits


def test_pictures_follow_their_sliders() -> None:
    homes, pair = lab.HomeExplorer(), lab.PairExplorer()
    assert "lane 83, column 10" in homes.title() and "column 511" in homes.title(
        tile="O, 128 rows x 512 columns", column=511
    )
    assert "not written yet" in pair.picture(step=0)._repr_html_()
    last = len(pair_film.film_of().steps()) - 1
    assert "not written yet" not in pair.picture(step=last)._repr_html_()
    assert pair.picture(step=0) != pair.picture(step=last)


def test_the_facts_of_the_note_and_the_times_on_paper() -> None:
    assert "speed" in lab.card_facts().column("fact")
    times = lab.paper_times()
    assert times.source.kind == "predicted" and "no card" in times.source.label
