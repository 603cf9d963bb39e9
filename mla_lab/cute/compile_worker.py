"""A process that compiles CuTe kernels: the only place where the DSL runs.

It serves one architecture, since the DSL reads CUTE_DSL_ARCH when it is imported. Jobs come
as JSON lines on stdin ({"config": ..., "folder": ...}), answers leave as JSON lines on the
descriptor that stdout was at the start; what compilers print goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ..plan.config import KernelConfig
from . import registry

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def dynamic_shared(ir_text: str) -> list[int | None]:
    """Bytes of dynamic shared memory of each launch, from the generated host code.

    The launch configuration is a struct (grid[3], block[3], shared bytes, ...); None where the
    size is not a constant.
    """
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i64\)", ir_text))
    field = re.compile(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\s+"
        r"llvm\.store (%\w+), \1 : "
    )
    stored = [value for _, value in field.findall(ir_text)]
    return [int(constants[v]) if v in constants else None for v in stored]


def build(config: KernelConfig, folder: Path) -> dict[str, Any]:
    """Compile one kernel into `folder`: kernel.o (tvm-ffi ABI), kernel.ptx, kernel.cubin."""
    import cutlass.cute as cute

    entry = registry.entry(config)
    options = f"{registry.OPTIONS} {entry.options}".strip()
    compiled = cute.compile(entry.jit, *entry.args, options=options)
    compiled.export_to_c(str(folder / "kernel.o"), function_name=entry.function)
    (folder / "kernel.ptx").write_text(compiled.__ptx__)
    (folder / "kernel.cubin").write_bytes(compiled.__cubin__)
    return {
        "functions": [entry.function],
        "libraries": cute.runtime.find_runtime_libraries(enable_tvm_ffi=True),
        "dynamic_shared": dynamic_shared(str(compiled.ir_module)),
    }


def remember_frames() -> None:
    """Keep the file, line and origin of a frame that the DSL computes for the position of an op. It
    does so anew for each of some 40,000 ops of a kernel, although ops of a loop come from the same
    instruction of a function: 2 to 3 of 14 s (two cores, 2026-11-28). Both functions are private to
    the DSL; one without them is left as it is."""
    from cutlass._mlir_helpers import op

    def kept(find: Callable[[FrameType], Any], by_instruction: bool) -> Callable[[FrameType], Any]:
        found: dict[tuple[int, int], tuple[Any, CodeType]] = {}

        def look_up(frame: FrameType) -> Any:
            code = frame.f_code
            at = id(code), frame.f_lasti if by_instruction else 0
            if at not in found:
                found[at] = find(frame), code  # held, so that its id stays its own
            return found[at][0]

        return look_up

    for name, by_instruction in (("_fast_frameinfo", True), ("_is_framework_stack_frame", False)):
        if find := getattr(op, name, None):
            setattr(op, name, kept(find, by_instruction))


def main() -> None:
    """Serve jobs until stdin closes."""
    # tvm-ffi imports torch where it can: 2 to 3 of 17 s of a first build (two cores, 2026-11-28);
    # nothing here needs it
    sys.modules["torch"] = None  # type: ignore[assignment]
    # tracing makes millions of objects that live until its end; to go through them again and again
    # was a fifth of the time (three builds 38.6 s, without it 30.2 s; two cores, 2026-11-27)
    gc.disable()
    remember_frames()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        fields = job["config"]
        fields["options"] = tuple(tuple(pair) for pair in fields["options"])
        reply: dict[str, Any]
        try:
            reply = {"ok": build(KernelConfig(**fields), Path(job["folder"]))}
        except Exception as error:  # the worker survives any failure of the compiler
            words = COLOURS.sub("", f"{type(error).__name__}: {error}")
            reply = {"error": words, "traceback": COLOURS.sub("", traceback.format_exc())}
        print(json.dumps(reply), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
