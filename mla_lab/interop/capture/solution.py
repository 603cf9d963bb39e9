"""A definition's solution: our call, as FlashInfer-Bench builds and times it."""

from __future__ import annotations

from typing import Any

import torch

from ...call.decode_args import DecodeArgs
from ...call.form import Form
from ...core.version import __version__

#: read as other dtypes than the schema has
_VIEWED = (torch.uint8, torch.uint16)
#: flags that a definition fixes, and their default
_FLAGS = {
    "sparse_mla_top_k": 0,
    "uses_shared_paged_kv_idx": True,
    "return_lse_base": None,
    "batch_invariant": False,
}


def solution_of(definition: dict[str, Any], args: DecodeArgs, form: Form) -> dict[str, Any]:
    """The solution of the definition of a checked call, as JSON's plain values.

    It returns its results. The workspace is its own: a caller's need not be zeroed.
    """
    name = definition["name"]
    return {
        "name": f"mla_lab_{name}",
        "definition": name,
        "author": "mla-lab",
        "description": f"mla-lab {__version__}: the native call, its backend chosen by itself.",
        "spec": {
            "language": "python",
            "target_hardware": ["cpu", "NVIDIA H200"],
            "entry_point": "main.py::run",
            "dependencies": [f"mla-lab=={__version__}"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": _source(definition, args, form)}],
    }


def _source(definition: dict[str, Any], args: DecodeArgs, form: Form) -> str:
    """`run` of the definition's inputs in their order."""
    inputs = [name for name in definition["inputs"] if name != "workspace_buffer"]
    lines = ["import torch", "from mla_lab.api.decode import decode", "", ""]
    lines += [f"def run({', '.join(definition['inputs'])}):"]
    for name in ("kv_cache", "mask"):
        dtype = getattr(getattr(args, name), "dtype", None)
        if dtype in _VIEWED:
            lines.append(f"    {name} = {name}.view({dtype})")
    lines += [
        f"    shape = (*query.shape[:-1], {args.kv_lora_rank})",
        f"    out = torch.empty(shape, dtype={form.out_dtype}, device=query.device)",
    ]
    given = [f"{name}={name}" for name in inputs]
    given += [f"kv_lora_rank={args.kv_lora_rank}", f"qk_rope_head_dim={args.qk_rope_head_dim}"]
    for name, default in _FLAGS.items():
        value = getattr(args, name)
        if value != default:
            given.append(f"{name}={value!r}")
    with_lse = "lse" in definition["outputs"]
    given += ["out=out", f"return_lse={with_lse}"]
    call = "decode(\n" + "".join(f"        {part},\n" for part in given) + "    )"
    if with_lse:
        lines += [f"    out, lse = {call}", "    return out, lse.reshape(query.shape[:-1])"]
    else:
        lines += [f"    return {call}"]
    return "\n".join(lines) + "\n"
