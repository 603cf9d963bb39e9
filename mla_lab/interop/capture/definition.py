"""A checked call -> its definition: axes, tensors, constraints, reference, input maker.

Dense, ragged and sparse calls have definitions of their own. A size that the model or a feature
fixes is a constant axis and part of the name; one that changes from step to step is a variable axis
(see `sizes_of`).
"""

from __future__ import annotations

from inspect import getsource
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor

from ...call.decode_args import PARAMETERS, DecodeArgs
from ...call.form import Form
from ...core.errors import unsupported
from . import attention, maker

OP_TYPE = "mla_paged"
#: the schema has signed integers only; bytes and mask words keep their bits
DTYPES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
    "torch.float64": "float64",
    "torch.float8_e4m3fn": "float8_e4m3fn",
    "torch.int32": "int32",
    "torch.int8": "int8",
    "torch.uint8": "int8",
    "torch.uint16": "int16",
}
#: axes that change from step to step
VARIABLE = {
    "batch_size": "Requests.",
    "batch_size_plus_1": "Entries of the prefix sums.",
    "q_len_per_request": "Query tokens of each request.",
    "num_tokens": "Query tokens in all.",
    "num_pages": "Pages of the cache.",
    "max_pages_per_seq": "Columns of the page table.",
    "mask_words": "16-bit words of a mask row.",
    "workspace_size": "Bytes of the workspace.",
}
Definition = dict[str, Any]


def definition_of(args: DecodeArgs, form: Form) -> Definition:
    """The definition that a checked call is an instance of, as JSON's plain values.

    Raises Unsupported for a context-parallel call, as the schema has no ranks, and for lengths of
    slot lists, whose axis depends on the call.
    """
    if args.sparse_mla_top_k_lens is not None:
        raise unsupported("sparse_mla_top_k_lens", "a tensor", "None in recorded calls")
    if args.enable_dcp:
        raise unsupported("enable_dcp", True, "False: the schema has no ranks")
    axes = _axes(args, form)
    shapes = _shapes(args, form)
    inputs = _inputs(args, shapes)
    outputs = _outputs(args, form)
    sizes = {name: size for name, size in axes.items() if name not in VARIABLE}
    kind = _kind(form)
    return {
        "name": _name(kind, args, form, sizes),
        "description": f"{kind.capitalize()} MLA decode over a paged cache, absorbed form.",
        "op_type": OP_TYPE,
        "tags": ["stage:decode", "status:verified", f"layout:{kind}", API_TAG],
        "axes": {
            name: {"type": "var", "description": VARIABLE[name]}
            if name in VARIABLE
            else {"type": "const", "value": size}
            for name, size in axes.items()
        },
        "constraints": _constraints(axes),
        "inputs": inputs,
        "outputs": outputs,
        "reference": _reference(args, form, inputs, outputs),
        "init": _init(args, inputs, axes),
    }


API_TAG = "fi_api:flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla"


def sizes_of(args: DecodeArgs, form: Form) -> dict[str, int]:
    """Sizes of the variable axes in a call."""
    axes = _axes(args, form)
    return {name: size for name, size in axes.items() if name in VARIABLE}


def _kind(form: Form) -> str:
    return "sparse" if form.features.sparse else "ragged" if form.features.ragged else "dense"


def _shapes(args: DecodeArgs, form: Form) -> dict[str, list[str]]:
    """Axes of each tensor that the call has."""
    ragged, separate = form.features.ragged, form.features.separate_tables
    rows = ["num_tokens"] if ragged else ["batch_size", "q_len_per_request"]
    words = {
        "rows": rows,
        "pages": ["num_pages"] + ["kv_pad_dim"] * (args.kv_cache.dim() == 4),
        "tables": ["batch_size"] + ["num_tables"] * separate + ["max_pages_per_seq"],
    }
    if form.features.sparse:
        words["tables"] = [*rows, "sparse_mla_top_k"]
    return {
        p.name: [axis for word in p.arg.axes.split() for axis in words.get(word, [word])]
        for p in PARAMETERS
        if p.arg.axes and _tensor(getattr(args, p.name)) is not None
    }


def _tensor(value: object) -> Tensor | None:
    """A tensor, or that of a list of one."""
    value = value[0] if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, Tensor) else None


def _axes(args: DecodeArgs, form: Form) -> dict[str, int]:
    """Every axis that some tensor has, and its size."""
    latent, rope = args.kv_lora_rank, args.qk_rope_head_dim
    known = {
        "batch_size": form.bounds.batch,
        "batch_size_plus_1": form.bounds.batch + 1,
        "q_len_per_request": form.bounds.q_lens[0],
        "num_tokens": form.total_q,
        "num_heads": form.bounds.heads,
        "head_dim_qk": latent + rope,
        "kv_width": args.kv_cache.shape[-1],
        "num_pages": args.kv_cache.shape[0],
        "kv_pad_dim": 1,
        "num_tables": 2,
        "one": 1,
        "page_size": form.bounds.page_size,
        "max_pages_per_seq": args.block_tables.shape[-1],
        "sparse_mla_top_k": args.sparse_mla_top_k,
        "mask_words": 0 if args.mask is None else args.mask.shape[-1],
        "workspace_size": 0 if args.workspace_buffer is None else args.workspace_buffer.numel(),
    }
    used = {axis for axes in _shapes(args, form).values() for axis in axes} | {"batch_size"}
    axes = {name: size for name, size in known.items() if name in used}
    return axes | {"kv_lora_rank": latent, "qk_rope_head_dim": rope}


def _inputs(args: DecodeArgs, shapes: dict[str, list[str]]) -> dict[str, Any]:
    """Tensors and scalars that the call gave, in the order of its parameters."""
    inputs: dict[str, Any] = {}
    for p in PARAMETERS:
        value = getattr(args, p.name)
        if p.name == "skip_softmax_threshold_scale_factor":
            value = value or None  # 0 skips nothing, and has no place in the name
        tensor = _tensor(value)
        if p.name in shapes and tensor is not None:
            inputs[p.name] = {"shape": shapes[p.name], "dtype": DTYPES[str(tensor.dtype)]}
        elif p.arg.recorded and value is not None:
            is_float = float in (p.type, *get_args(p.type))
            inputs[p.name] = {"shape": None, "dtype": "float32" if is_float else "int32"}
        else:
            continue
        if p.arg.note:
            inputs[p.name]["description"] = p.arg.note
    return inputs


def _outputs(args: DecodeArgs, form: Form) -> dict[str, Any]:
    rows = ["num_tokens"] if form.features.ragged else ["batch_size", "q_len_per_request"]
    outputs: dict[str, Any] = {
        "output": {
            "shape": [*rows, "num_heads", "kv_lora_rank"],
            "dtype": DTYPES[str(form.out_dtype)],
        }
    }
    if form.features.lse:
        base = "base 2" if args.return_lse_base == "base2" else "natural logarithm"
        outputs["lse"] = {
            "shape": [*rows, "num_heads"],
            "dtype": "float32",
            "description": f"Log-sum-exp of the scaled scores, without the sink; {base}.",
        }
    return outputs


def _constraints(axes: dict[str, int]) -> list[str]:
    found = ["head_dim_qk == kv_lora_rank + qk_rope_head_dim"]
    if axes["kv_width"] == axes["head_dim_qk"]:
        found.append("kv_width == head_dim_qk")
    if "batch_size_plus_1" in axes:
        found.append("batch_size_plus_1 == batch_size + 1")
    return found


def _name(kind: str, args: DecodeArgs, form: Form, sizes: dict[str, int]) -> str:
    """Everything that is fixed, in one file name."""
    bounds, used = form.bounds, form.features
    formats = [bounds.q_dtype, bounds.kv_format, bounds.out_dtype]
    short = {"num_heads": "h", "kv_lora_rank": "ckv", "qk_rope_head_dim": "kpe", "page_size": "ps"}
    parts = [f"mla_decode_{kind}", *(f"{short[axis]}{sizes[axis]}" for axis in short)]
    parts += [f"topk{bounds.top_k}"] if bounds.top_k else []
    parts += [formats[0]] if len(set(formats)) == 1 else ["_".join(formats)]
    words = {
        "4d": args.kv_cache.dim() == 4,
        "as_e4m3": bounds.kv_format == "fp8_656" and args.kv_cache.dtype is torch.float8_e4m3fn,
        "bound": args.max_q_len is not None,
        "mask": used.mask,
        "sinks": used.sinks,
        "lse": used.lse,
        "base2": used.lse and args.return_lse_base == "base2",
        "separate": used.separate_tables,
        "skip": used.skip_softmax,
        "scale1": isinstance(args.bmm1_scale, Tensor),
        "scale2": isinstance(args.bmm2_scale, Tensor),
        "nows": args.workspace_buffer is None,
        "nolen": args.max_seq_len is None,
        "invariant": args.batch_invariant,
    }
    return "_".join(parts + [word for word, is_used in words.items() if is_used])


def _reference(
    args: DecodeArgs, form: Form, inputs: dict[str, Any], outputs: dict[str, Any]
) -> str:
    """`run` of all inputs in their order, behind the source of `attention`."""
    passed = ["cum_seq_lens_q", "mask", "sinks", "bmm1_scale", "bmm2_scale"]
    keywords = [f"{name}={name}" for name in passed if name in inputs]
    keywords += [f"kv_lora_rank={args.kv_lora_rank}", f"sparse={form.features.sparse}"]
    keywords += [f"lse_base2={args.return_lse_base == 'base2'}", f"out_dtype={form.out_dtype}"]
    result = ["return out"]
    if "lse" in outputs:
        result = ["return out, lse.reshape(query.shape[:-1])"]
    lines = [
        getsource(attention),
        "",
        "@torch.no_grad()",
        f"def run({', '.join(inputs)}):",
        "    out, lse = attend(",
        f"        query, kv_cache, block_tables, seq_lens, {', '.join(keywords)}",
        "    )",
        *(f"    {line}" for line in result),
    ]
    return "\n".join(lines) + "\n"


def number(value: Any) -> int | float:
    """A number of any kind as Python's own, whose text needs no import to be read."""
    return int(value) if isinstance(value, Integral) else float(value)


def _init(args: DecodeArgs, inputs: dict[str, Any], axes: dict[str, int]) -> str:
    """`init` of the variable axes' sizes, behind the source of `maker`."""
    constants = {name: size for name, size in axes.items() if name not in VARIABLE}
    tensors = {name: (entry["shape"], entry["dtype"]) for name, entry in inputs.items()}
    scalars = {
        name: number(getattr(args, name))
        for name, entry in inputs.items()
        if entry["shape"] is None
    }
    sizes = [name for name in axes if name in VARIABLE]
    lines = [
        getsource(maker),
        "",
        f"def init(*, {', '.join(sizes)}, device='cuda', seed=0):",
        f"    sizes = {constants!r}",
        f"    sizes.update({', '.join(f'{name}={name}' for name in sizes)})",
        f"    return make({tensors!r}, sizes, {scalars!r}, device, seed)",
    ]
    return "\n".join(lines) + "\n"
