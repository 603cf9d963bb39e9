"""Where each element of S and O lies: a thread's registers on Hopper, tensor memory on Blackwell.

Both maps are computed. Hopper's is the accumulator layout of wgmma (PTX ISA, wgmma register
fragments), Blackwell's follows from the products as the emulator places them (`emulate.tcgen05`),
which a run of the kernel agrees with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ..core.errors import invalid
from ..emulate.tcgen05 import Issued, Multiply, Shape
from ..emulate.tensor_memory import LANES, places_of
from .layout import Layout

#: rows of a wgmma's accumulator, and the threads that share it
ROWS, THREADS = 64, 128
#: columns of tensor memory in `cute/mla_sm100`: S of even and odd tiles, O
S_COLUMNS, O_COLUMN, LATENT = 64, 128, 512
#: most columns of a product, and those of O that one product of a pair makes in each CTA
MOST_COLUMNS, O_STEP = 256, 128


class Register(NamedTuple):
    """Hopper: CTA of 64 rows, warp group in it, thread of the warp group, accumulator register."""

    cta: int
    group: int
    thread: int
    value: int


class Place(NamedTuple):
    """Blackwell: CTA of the pair, and lane and column of its tensor memory."""

    cta: int
    lane: int
    column: int


@dataclass(frozen=True)
class Tile:
    """A tile of accumulators, and how both cards make it."""

    name: str
    rows: int
    columns: int
    #: columns of a warp group's accumulator on Hopper
    group_columns: int
    #: CTAs that one tcgen05.mma uses
    ctas: int
    #: first column in tensor memory
    first: int

    @property
    def registers(self) -> int:
        """Accumulator registers a thread on Hopper."""
        return ROWS * self.group_columns // THREADS


TILES = {
    tile.name: tile
    for tile in (
        Tile("S, 64 rows x 64 tokens", 64, 64, 64, 1, 0),
        Tile("S, 128 rows x 128 tokens", 128, 128, 128, 2, 0),
        Tile("O, 128 rows x 512 columns", 128, LATENT, MOST_COLUMNS, 2, O_COLUMN),
    )
}


def _inside(tile: Tile, row: int, column: int) -> None:
    if not (0 <= row < tile.rows and 0 <= column < tile.columns):
        raise invalid("row, column", (row, column), f"inside {tile.name}")


def accumulator(columns: int) -> Layout:
    """(thread, value) -> row + 64 * column of a 64 x `columns` accumulator tile."""
    if columns % 8 or not 8 <= columns <= 256:
        raise invalid("columns", columns, "a multiple of 8 from 8 to 256")
    return Layout(((4, 8, 4), (2, 2, columns // 8)), ((128, 1, 16), (64, 8, 512)))


@cache
def owners(columns: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, column) -> (thread, value)."""
    layout = accumulator(columns)
    owner = {}
    for thread in range(THREADS):
        for value in range(columns // 2):
            element = layout(thread, value)
            owner[element % ROWS, element // ROWS] = (thread, value)
    return owner


def hopper(tile: Tile, row: int, column: int) -> Register:
    """The register that holds an element: 64 rows a CTA, warp groups beside each other."""
    _inside(tile, row, column)
    group, inside = divmod(column, tile.group_columns)
    return Register(row // ROWS, group, *owners(tile.group_columns)[row % ROWS, inside])


def _products(tile: Tile) -> list[tuple[Issued, np.ndarray]]:
    """The products of a tile, each with the matrix columns that its N columns are."""
    if tile.columns < LATENT:
        columns = [np.arange(tile.columns)]
    else:
        half = np.arange(O_STEP)
        columns = [np.r_[at + half, LATENT // 2 + at + half] for at in (0, O_STEP)]
    made, multiply = [], Multiply("f16", tile.ctas == 2, False, 0)
    for i, some in enumerate(columns):
        shape = Shape(tile.rows, len(some), 16, "bf16", "bf16", False, False)
        issued = Issued(multiply, shape, [], tile.first + i * O_STEP, 0, 0, False, 0)
        made.append((issued, some))
    return made


@cache
def lanes_and_columns(tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column in tensor memory of each element, two arrays [rows, columns]."""
    lanes = np.full((tile.rows, tile.columns), -1)
    columns = lanes.copy()
    every = np.arange(LANES)
    for issued, some in _products(tile):
        for part in issued.parts():
            mine = some[part.first : part.last]
            for cta in range(tile.ctas):
                rows = np.arange(len(every[part.lanes])) + cta * ROWS
                lanes[np.ix_(rows, mine)] = every[part.lanes][:, None]
                columns[np.ix_(rows, mine)] = issued.column + np.arange(len(mine))
    return lanes, columns


def blackwell(tile: Tile, row: int, column: int) -> Place:
    """Where an element lies in the tensor memory of a pair of CTAs, or of one."""
    _inside(tile, row, column)
    lanes, columns = lanes_and_columns(tile)
    cta = row // ROWS if tile.ctas == 2 else 0
    return Place(cta, int(lanes[row, column]), int(columns[row, column]))


def reader(place: Place) -> int:
    """The thread of the softmax warp group whose `tcgen05.ld` of shape 32x32b reads a lane."""
    lane_of, _ = places_of("32x32b", 1, 0)
    (thread,) = np.flatnonzero(lane_of[0] == place.lane % 32)
    return place.lane // 32 * 32 + int(thread)


def of_thread(tile: Tile, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    """What the holder of an element holds too: masks [rows, columns] of Hopper and Blackwell."""
    one, place = hopper(tile, row, column), blackwell(tile, row, column)
    theirs = np.zeros((tile.rows, tile.columns), bool)
    for (r, c), (thread, _) in owners(tile.group_columns).items():
        if thread == one.thread:
            theirs[r + one.cta * ROWS, c + one.group * tile.group_columns] = True
    lanes, _ = lanes_and_columns(tile)
    ours = lanes == place.lane
    if tile.ctas == 2:
        ours &= (np.arange(tile.rows) // ROWS == place.cta)[:, None]
    return theirs, ours
