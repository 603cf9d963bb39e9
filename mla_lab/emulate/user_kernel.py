"""`run`: a `@cute.jit` function of one's own on the CPU, with tensors of torch."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import invalid
from ..cute.registry import OPTIONS
from ..jit.cute_link import link
from .device import DTYPES
from .host import HostCode
from .kernel import EmulatedKernel, Options, Run

#: torch dtype -> the DSL's name
NAMES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
    torch.float8_e4m3fn: "Float8E4M3FN",
    torch.int32: "Int32",
    torch.int64: "Int64",
    torch.uint8: "Uint8",
    torch.uint16: "Uint16",
}
#: what the DSL promises of a tensor's address, bytes
ALIGN = 16
FUNCTION = "emulated"


def run(
    kernel: Callable[..., Any], *args: Any, options: Options | None = None, arch: str = "sm_90a"
) -> Run:
    """Compile `kernel` for `arch`, run it on `args`, and say what it did.

    kernel: a `@cute.jit` function that launches `@cute.kernel` functions. args: CPU tensors, which
    it reads and writes in place, and numbers; a stream that it takes last is supplied. Raises
    InvalidInput for other arguments, Fault where a kernel cannot go on.
    """
    with tempfile.TemporaryDirectory(prefix="mla-lab-emulate-") as folder:
        build(kernel, args, Path(folder), arch)
        emulated = built(Path(folder), options)
    emulated(*args)
    return emulated.run


def built(folder: Path, options: Options | None = None) -> EmulatedKernel:
    """The emulated kernel that `build` left in `folder`."""
    text = (folder / "kernel.ptx").read_text()
    return EmulatedKernel(text, FUNCTION, HostCode(folder / "kernel.so"), options)


def build(
    kernel: Callable[..., Any], args: tuple[Any, ...], folder: Path, arch: str = "sm_90a"
) -> list[str]:
    """Compile a `@cute.jit` function for arguments like these into `folder`: kernel.so,
    kernel.ptx, kernel.cubin. Its tvm-ffi function is `FUNCTION`. Returns the names of libraries
    that a card's process loads first."""
    os.environ.setdefault("CUTE_DSL_ARCH", arch)
    from cutlass import cute

    shaped = [_like(arg, f"argument {i}") for i, arg in enumerate(args)]
    if len(inspect.signature(kernel).parameters) > len(args):
        shaped.append(cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
    with tempfile.TemporaryDirectory(prefix="mla-lab-emulate-") as dump:
        # the architecture is an option as well: the DSL read the variable when it was imported
        keep = f"--gpu-arch={arch} --keep-ptx --keep-cubin --dump-dir={dump}"
        compiled = cute.compile(kernel, *shaped, options=f"{OPTIONS} {keep}")
        obj = Path(dump) / "kernel.o"
        compiled.export_to_c(str(obj), function_name=FUNCTION)
        runtime = cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)
        needs = link(obj, folder / "kernel.so", runtime)
    (folder / "kernel.ptx").write_text(compiled.__ptx__)
    (folder / "kernel.cubin").write_bytes(compiled.__cubin__)
    return needs


def _like(arg: Any, name: str) -> Any:
    """What the DSL compiles for: a tensor's type and layout, a number's type."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    if isinstance(arg, Tensor):
        if arg.dtype not in DTYPES or arg.device.type != "cpu":
            raise invalid(name, f"{arg.dtype} on {arg.device}", f"CPU tensors of {list(DTYPES)}")
        element = getattr(cutlass, NAMES[arg.dtype])
        return make_fake_tensor(element, tuple(arg.shape), tuple(arg.stride()), assumed_align=ALIGN)
    if isinstance(arg, bool | int):
        return cutlass.Int32(int(arg))
    if isinstance(arg, float):
        return cutlass.Float32(arg)
    raise invalid(name, type(arg).__name__, "tensors and numbers")
