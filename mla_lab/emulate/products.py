"""A wgmma as it is written, and as it is issued."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Row = np.ndarray


class Product(NamedTuple):
    """Static facts of a wgmma.mma_async: rows of registers, m64 n k, types, and where it stands."""

    d_rows: tuple[int, ...]
    #: empty where A is in shared memory
    a_rows: tuple[int, ...]
    n: int
    k: int
    kind: str
    a_transposed: bool
    b_transposed: bool
    pc: int


class Issued(NamedTuple):
    """One issue of a product: its operands, and whether it adds to what D held."""

    product: Product
    #: fp32 [rows of this gang, k] from registers, or a descriptor
    a: Row | int
    b: int
    keep: bool
