"""CuTe's own layout algebra, live on a CPU: what the DSL answers for one expression.

Layout algebra exists only while a `@cute.jit` function is traced, so each call traces one
(0.02 to 0.07 s). The explorers compare these answers with `mla_lab.lab.layout`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from ..core.errors import invalid, unsupported

#: expression by name; each takes CuTe layouts
OPERATIONS = ("layout", "coalesce", "composition", "complement", "logical_divide", "zipped_divide")


@dataclass(frozen=True)
class LiveLayout:
    """The DSL's answer: the expression as one would type it, the layout, all its offsets."""

    expression: str
    layout: str
    offsets: tuple[int, ...]


def available() -> str:
    """Why the DSL cannot answer here; "" where it can."""
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed (pip install nvidia-cutlass-dsl)"
    return ""


def evaluate(operation: str, *layouts: tuple[Any, Any], cosize: int = 0) -> LiveLayout:
    """Runs `operation` on `(shape, stride)` pairs; `cosize` is complement's second argument.

    Raises Unsupported without the DSL, InvalidInput where CuTe refuses the layouts.
    """
    if operation not in OPERATIONS:
        raise invalid("operation", repr(operation), OPERATIONS)
    _require()
    import cutlass.cute as cute

    def apply(*made: Any) -> Any:
        if operation == "layout":
            return made[0]
        extra = (cosize,) if operation == "complement" else ()
        return getattr(cute, operation)(*made, *extra)

    made = ", ".join(f"cute.make_layout({shape}, stride={stride})" for shape, stride in layouts)
    tail = f", {cosize}" if operation == "complement" else ""
    expression = made if operation == "layout" else f"cute.{operation}({made}{tail})"
    return _trace(apply, layouts, expression)


def swizzled(bits: int, base: int, shift: int, shape: Any, stride: Any) -> LiveLayout:
    """`Swizzle<bits, base, shift>` after a layout, as the DSL composes them."""
    _require()
    import cutlass.cute as cute

    def apply(layout: Any) -> Any:
        return cute.make_composed_layout(cute.make_swizzle(bits, base, shift), 0, layout)

    expression = (
        f"cute.make_composed_layout(cute.make_swizzle({bits}, {base}, {shift}), 0, "
        f"cute.make_layout({shape}, stride={stride}))"
    )
    return _trace(apply, ((shape, stride),), expression)


def smem_atom(row_bytes: int) -> LiveLayout:
    """CuTe's K-major bf16 atom of shared memory with rows of 16, 32, 64 or 128 bytes.

    The kernels of this package tile their KV stages with the one of 128 (`K_SW128`). Its swizzle
    acts on bytes, its layout counts elements.
    """
    kinds = {16: "K_INTER", 32: "K_SW32", 64: "K_SW64", 128: "K_SW128"}
    if row_bytes not in kinds:
        raise invalid("row_bytes", row_bytes, tuple(kinds))
    _require()
    import cutlass
    from cutlass.cute.nvgpu import warpgroup

    kind = getattr(warpgroup.SmemLayoutAtomKind, kinds[row_bytes])
    answer: list[str] = []

    def apply(plain: Any) -> Any:
        answer.append(str(warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)))
        return plain

    live = _trace(apply, (((8, row_bytes // 2), (row_bytes // 2, 1)),), "")
    expression = f"warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.{kinds[row_bytes]}, BFloat16)"
    return LiveLayout(expression, answer[0], live.offsets)


def _require() -> None:
    reason = available()
    if reason:
        raise unsupported("cute", reason, "the lab's own algebra, which needs nothing")


def _trace(apply: Any, layouts: tuple[tuple[Any, Any], ...], expression: str) -> LiveLayout:
    import cutlass.cute as cute

    answer: list[Any] = []

    @cute.jit
    def ask() -> None:
        result = apply(*[cute.make_layout(s, stride=d) for s, d in layouts])
        answer.append(str(result))
        answer.append(tuple(int(result(i)) for i in range(cute.size(result))))

    try:
        ask()
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise invalid(
            "layouts", reason[-1] if reason else repr(error), "what CuTe takes"
        ) from error
    return LiveLayout(expression, answer[0], answer[1])
