"""CuTe's layouts of tcgen05 as numbers: traced, never launched; JSON on standard output."""

from __future__ import annotations

import json
import warnings
from itertools import product
from typing import Any

#: (pair, M): kinds of accumulator layouts, of so many columns
LAYOUTS = [(False, 64), (False, 128), (True, 128), (True, 256)]
N = 64
#: shape of a tcgen05.ld -> registers of .x1
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def layouts() -> dict[str, Any]:
    """Index of each register of each thread of a load, and of each element of an accumulator."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
    from cutlass.utils import blackwell_helpers

    found: dict[str, Any] = {}

    def at(layout: Any, rows: int, columns: int) -> list[list[int]]:
        flat = [cute.crd2idx(i, layout) for i in product(range(rows), range(columns))]
        return [flat[i : i + columns] for i in range(0, len(flat), columns)]

    @cute.jit  # type: ignore[untyped-decorator]
    def trace() -> None:
        for shape, repeat in product(REGISTERS, (1, 4)):
            op = getattr(tcgen05, f"Ld{shape}Op")(getattr(tcgen05.Repetition, f"x{repeat}"))
            atom = cute.make_copy_atom(op, cutlass.Float32)
            found[f"{shape}.x{repeat}"] = at(atom.layout_dst_tv, 32, REGISTERS[shape] * repeat)
        for pair, m in LAYOUTS:
            group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
            kinds = (cutlass.BFloat16, OperandMajorMode.K, OperandMajorMode.K, cutlass.Float32)
            mma = blackwell_helpers.make_trivial_tiled_mma(*kinds, group, (m, N))
            c = mma.make_fragment_C(mma.partition_shape_C((m, N)))
            found[f"C {pair} {m}"] = at(cute.get(c.layout, mode=[0]), m // (1 + pair), N)

    cute.compile(trace)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(layouts()))
