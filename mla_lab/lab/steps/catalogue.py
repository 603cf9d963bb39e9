"""The ten steps: module, functions that the reader writes, and the step before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...core.errors import invalid

FOLDER = Path(__file__).resolve().parents[2] / "cute" / "steps"


@dataclass(frozen=True)
class Step:
    """One step. `functions` are the reader's."""

    number: str
    module: str
    functions: tuple[str, ...]
    #: schedules of the emulator under which it must be right
    schedules: tuple[str, ...] = ("fair",)

    @property
    def path(self) -> Path:
        """The author's module."""
        return FOLDER / f"{self.module}.py"

    @property
    def before(self) -> str:
        """Number of the step before; empty for the first one."""
        return "" if self.number == "60" else str(int(self.number) - 1)


_BOTH = ("fair", "late")

STEPS = {
    made.number: made
    for made in (
        Step("60", "empty_kernel", ("element_of", "producer_registers", "consumer_registers")),
        Step("61", "tile_copy", ("threads_over_tile", "numbers_of_thread", "box_of")),
        Step("62", "swizzled_tile", ("swizzled", "swizzle_numbers")),
        Step("63", "page_load", ("page_of", "tile_bytes")),
        Step("64", "one_barrier", ("full_arrivals", "full_parity", "announce"), _BOTH),
        Step("65", "stage_ring", ("stage_of", "full_parity", "empty_parity"), _BOTH),
        Step("66", "scores", ("multiply", "place_of"), _BOTH),
        Step("67", "online_softmax", ("new_max", "rescale", "lse_of")),
        Step("68", "values", ("transposed_layout", "rescale_rows")),
        Step("69", "split_keep_ab", ("first_of_share", "nonzero_word", "merge_factors"), _BOTH),
    )
}


def step(number: str) -> Step:
    """Step `number` ("61"). Raises InvalidInput for no step."""
    if number not in STEPS:
        raise invalid("number", repr(number), tuple(STEPS))
    return STEPS[number]
