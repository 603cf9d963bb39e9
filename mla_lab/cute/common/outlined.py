"""Functions that ptxas does not inline: their code lies behind a kernel's own.

A launch fetches the first 100 KB or so of a kernel's code ahead, and what lies behind them where it
is executed (see `jit.code_size`). What few launches execute should therefore not lie in front. The
DSL inlines each function that a kernel calls, and ptxas lays code out in the order of its control
flow, so that a branch that is rarely taken stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl.multi_stage_manager import isolated_region


def call_outlined(name: str, body: Callable[..., Int32], args: Sequence[Any]) -> Int32:
    """The int32 that `body` returns for Int32 and Int64 `args`, by a call of the function `name` of
    this module of device code, which the first call of that name defines. The body reads nothing
    but its arguments and constants. All threads of a warp call it together, or none."""
    values = [arg.ir_value() for arg in args]
    module = _device_code()
    if name not in _functions(module):
        with ir.InsertionPoint.at_block_begin(module):
            _define(name, body, args, [value.type for value in values])
    result = ir.IntegerType.get_signless(32)
    return Int32(llvm.call(result, values, [], [], callee=name, convergent=True, no_inline=True))


def _device_code() -> ir.Block:
    """The block of the module that the kernel stands in."""
    op = ir.InsertionPoint.current.block.owner
    while op.operation.name != "gpu.module":
        op = op.operation.parent
    return op.operation.regions[0].blocks[0]


def _functions(module: ir.Block) -> set[str]:
    functions = (op.operation for op in module.operations if op.operation.name == "llvm.func")
    return {ir.StringAttr(op.attributes["sym_name"]).value for op in functions}


def _define(name: str, body: Callable[..., Int32], args: Sequence[Any], types: list[Any]) -> None:
    signature = ir.Type.parse(f"!llvm.func<i32 ({', '.join(map(str, types))})>")
    function = llvm.LLVMFuncOp(
        name,
        ir.TypeAttr.get(signature),
        linkage=ir.Attribute.parse("#llvm.linkage<internal>"),
        CConv=ir.Attribute.parse("#llvm.cconv<ccc>"),
        convergent=True,
        no_inline=True,
    )
    entry = function.regions[0].blocks.append(*types)
    with ir.InsertionPoint(entry), isolated_region():
        given = [type(arg)(value) for arg, value in zip(args, entry.arguments, strict=True)]
        llvm.ReturnOp(arg=body(*given).ir_value())
