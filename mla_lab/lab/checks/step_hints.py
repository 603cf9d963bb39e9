"""Hints of the exercises 60 to 69: by what the emulator found, or by the output that is wrong."""

from __future__ import annotations

_BYTES = "Count the bytes of a tile: rows, numbers of a row, bytes of a number."
_HUNG = "Somebody waits for a phase that never completes: count arrivals, and bytes."

#: step -> kind of finding or fault, name of a wrong output, or "wrong" -> hint
HINTS: dict[str, dict[str, str]] = {
    "60": {"wrong": "Each thread of each CTA has an element of its own: where does a CTA begin?"},
    "61": {
        "out of bounds": "Threads x what each copies at once must divide the tile of 64 x 64: how "
        "many rows do your threads cover in one go?",
        "compiler": "Two layouts that `cute.make_layout` made are wanted, and a tile of one page",
        "race": "Two threads or two CTAs write the same place: does each have a part of its own?",
        "wrong": "Some places are copied twice or never: which rows and columns does a thread get?",
    },
    "62": {
        "misaligned": "A vector is torn apart: leave the lowest three bits of the offset alone.",
        "unwritten": "A place is read that no row was written to.",
        "wrong": "The tile is written at one place and read at another: in (bits, base, shift), "
        "numbers of a vector come first, and each unit here is one number of 2 bytes.",
    },
    "63": {
        "deadlock": f"The barrier does not open with the copies of a tile. {_BYTES}",
        "race": f"The barrier opens before all bytes are there. {_BYTES}",
        "compiler": "The block table is that of one request: it has one index",
        "bytes left": f"More or fewer bytes land than were announced. {_BYTES}",
        "out of bounds": "That page does not exist: where does the request keep its page numbers?",
        "wrong": "Rows of another page arrive: which entry of the block table is tile t?",
    },
    "64": {
        "parity alias": "The wait looks for a phase that is two behind: how does parity go on from "
        "tile to tile?",
        "unwritten": "The wait ends before the first tile is there: the first phase is phase 0.",
        "race": "A wait ends at once, for a phase that was complete before: tile and phase have to "
        "go on together. And the phase has to know of the bytes.",
        "deadlock": _HUNG,
        "wrong": "The tiles come in another order than they are awaited.",
    },
    "65": {
        "parity alias": "The producer laps the consumers, so that a phase is missed: what has to "
        "be free before tile t is copied?",
        "unwritten": "A wait ends before the tile is there: of which phase is it?",
        "race": "A stage is filled while it is read: how many tiles lie between two uses of a "
        "stage, and which phase of `empty` stands between them?",
        "deadlock": "Producer and consumers wait for each other. A stage is used once in every "
        "STAGES tiles, and only then does its phase go on; on a fresh barrier a wait for parity 1 "
        "passes at once.",
        "wrong": "A tile is read from a stage in which another one lies.",
    },
    "66": {
        "race": "The products read a stage that is not theirs: which stage holds tile t?",
        "divergence": "All four warps of the group have to issue the same product.",
        "deadlock": _HUNG,
        "wrong": "Is the first k-step of each tile told to overwrite the accumulator, are all "
        "k-steps of 192 numbers there, and which row and column has register 2?",
    },
    "67": {
        "wrong": "One row lies in four lanes, and its max may only grow; sums that were taken "
        "relative to an old max become smaller when it grows; and the result is a natural log.",
    },
    "68": {
        "race": "Products read bytes that are not theirs: how many numbers is a stage long?",
        "unwritten": "Products read bytes that nobody wrote: check the strides of the view.",
        "lse": "The scores are wrong already: step 67 has to stay as it was.",
        "wrong": "In one box 64 columns lie beside each other, tokens are 64 numbers apart, and "
        "the next 64 columns begin in the next box; of four registers two belong to row r, two to "
        "row r + 8.",
    },
    "69": {
        "livelock": "A worker polls a word that stays 0: what travels where a sum is +0.0?",
        "deadlock": "A worker waits for a piece that no worker sends.",
        "out of bounds": "A share leads beyond the tiles or the workers.",
        "mailbox": "The mailbox is not zero again, so that the next launch would read old words.",
        "lse": "Pieces of a request have row maxes of their own: both are brought to the greater "
        "one before sums are added.",
        "wrong": "The pieces are added with wrong weights: which row max are they relative to?",
    },
}

PRAISE: dict[str, str] = {
    "60": "Every thread has written its role, with the registers of its role.",
    "61": "The tile went through shared memory and back, 16 bytes at a time.",
    "62": "Rows in, columns out, and no bank serves two vectors in a turn.",
    "63": "Three boxes a tile, and the barrier opened when the last byte was there.",
    "64": "One barrier, five phases, no race.",
    "65": "The producer runs ahead as far as the ring is long, and no further.",
    "66": "Twelve products a tile, 64 x 64 scores, each in its place.",
    "67": "Row max and row sum are right, though one tile is hundreds above the others.",
    "68": "V was read where K lies, and no byte was copied.",
    "69": "Three requests on four workers, split, merged, and the mailbox is zero again.",
}
