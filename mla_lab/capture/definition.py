"""A checked call -> its definition: axes, tensors, constraints, reference, input maker.

Dense, ragged and sparse calls are definitions of their own. What a model and its features fix is
a constant axis and part of the name; what a step changes is a variable axis (see `sizes_of`).
"""

from __future__ import annotations

from inspect import getsource
from typing import Any

from torch import Tensor

from ..call.decode_args import Arguments, Form
from ..core.errors import unsupported
from . import attention, maker

OP_TYPE = "mla_paged"
#: the schema knows signed integers only: bytes and mask words keep their bits
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
#: axes that a serving step changes
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
DESCRIPTIONS = {
    "query": "512 latent columns, then 64 rope.",
    "kv_cache": "Latent and rope of each token; 656 bytes: 512 e4m3, 4 fp32 scales, 64 bf16 rope.",
    "workspace_buffer": "Zeroed once before its first use.",
    "block_tables": "Page ids; with a dimension of 2 those of keys, then of values; if sparse, "
    "token slots, -1 for none.",
    "seq_lens": "Tokens of each request, the new ones included.",
    "bmm1_scale": "q_scale x k_scale x softmax scale, natural units.",
    "bmm2_scale": "v_scale x o_scale, on the output.",
    "sinks": "One more term exp(sink) in each head's denominator.",
    "mask": "Words of uint16: bit c of draft row r shows it draft column c.",
    "cum_seq_lens_q": "Prefix sums of query tokens.",
    "skip_softmax_threshold_scale_factor": "The reference skips nothing; dropped mass is at most "
    "this factor.",
    "lse": "Log-sum-exp of the scaled scores, without the sink.",
}
#: arguments that are scalars in a definition
SCALARS = {
    "max_seq_len": "int32",
    "bmm1_scale": "float32",
    "bmm2_scale": "float32",
    "skip_softmax_threshold_scale_factor": "float32",
    "max_q_len": "int32",
}
Definition = dict[str, Any]


def definition_of(given: Arguments, form: Form) -> Definition:
    """The definition that a checked call is an instance of, as JSON's plain values.

    Raises Unsupported for a context-parallel call, whose ranks the schema cannot say.
    """
    if given.enable_dcp:
        raise unsupported("enable_dcp", True, "False: the schema has no words for ranks")
    axes = _axes(given, form)
    shapes = _shapes(given, form)
    inputs = _inputs(given, shapes)
    outputs = _outputs(given, form)
    sizes = {name: size for name, size in axes.items() if name not in VARIABLE}
    kind = _kind(form)
    return {
        "name": _name(kind, given, form, sizes),
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
        "reference": _reference(given, form, inputs, outputs),
        "init": _init(given, inputs, axes),
    }


API_TAG = "fi_api:flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla"


def sizes_of(given: Arguments, form: Form) -> dict[str, int]:
    """Sizes of the variable axes in a call."""
    axes = _axes(given, form)
    return {name: size for name, size in axes.items() if name in VARIABLE}


def _kind(form: Form) -> str:
    return "sparse" if form.features.sparse else "ragged" if form.features.ragged else "dense"


def _shapes(given: Arguments, form: Form) -> dict[str, list[str]]:
    """Axes of each tensor that the call has."""
    features = form.features
    rows = ["num_tokens"] if features.ragged else ["batch_size", "q_len_per_request"]
    pages = ["num_pages"] + ["kv_pad_dim"] * (given.kv_cache.dim() == 4)
    tables = ["batch_size"] + ["num_tables"] * features.separate_tables + ["max_pages_per_seq"]
    shapes = {
        "query": [*rows, "num_heads", "head_dim_qk"],
        "kv_cache": [*pages, "page_size", "kv_width"],
        "workspace_buffer": ["workspace_size"],
        "block_tables": [*rows, "sparse_mla_top_k"] if features.sparse else tables,
        "seq_lens": ["batch_size"],
        "sinks": ["num_heads"],
        "cum_seq_lens_q": ["batch_size_plus_1"],
        "mask": [*rows, "mask_words"],
        "bmm1_scale": ["one"],
        "bmm2_scale": ["one"],
    }
    present = {name: getattr(given, name) for name in shapes}
    present["sinks"] = given.sinks
    return {
        name: axes
        for name, axes in shapes.items()
        if isinstance(present[name], Tensor) or (name == "sinks" and features.sinks)
    }


def _axes(given: Arguments, form: Form) -> dict[str, int]:
    """Every axis that some tensor has, and its size."""
    latent, rope = given.kv_lora_rank, given.qk_rope_head_dim
    known = {
        "batch_size": form.bounds.batch,
        "batch_size_plus_1": form.bounds.batch + 1,
        "q_len_per_request": form.bounds.q_lens[0],
        "num_tokens": form.total_q,
        "num_heads": form.bounds.heads,
        "head_dim_qk": latent + rope,
        "kv_width": given.kv_cache.shape[-1],
        "num_pages": given.kv_cache.shape[0],
        "kv_pad_dim": 1,
        "num_tables": 2,
        "one": 1,
        "page_size": form.bounds.page_size,
        "max_pages_per_seq": given.block_tables.shape[-1],
        "sparse_mla_top_k": given.sparse_mla_top_k,
        "mask_words": 0 if given.mask is None else given.mask.shape[-1],
        "workspace_size": 0 if given.workspace_buffer is None else given.workspace_buffer.numel(),
    }
    used = {axis for axes in _shapes(given, form).values() for axis in axes} | {"batch_size"}
    axes = {name: size for name, size in known.items() if name in used}
    return axes | {"kv_lora_rank": latent, "qk_rope_head_dim": rope}


def _inputs(given: Arguments, shapes: dict[str, list[str]]) -> dict[str, Any]:
    """Tensors and scalars that the call gave, in the order of its parameters."""
    inputs: dict[str, Any] = {}
    for name in Arguments._fields:
        value = getattr(given, name)
        if name in shapes:
            tensor = value if isinstance(value, Tensor) else value[0]
            inputs[name] = {"shape": shapes[name], "dtype": DTYPES[str(tensor.dtype)]}
        elif name in SCALARS and value is not None:
            inputs[name] = {"shape": None, "dtype": SCALARS[name]}
        else:
            continue
        if name in DESCRIPTIONS:
            inputs[name]["description"] = DESCRIPTIONS[name]
    return inputs


def _outputs(given: Arguments, form: Form) -> dict[str, Any]:
    rows = ["num_tokens"] if form.features.ragged else ["batch_size", "q_len_per_request"]
    outputs: dict[str, Any] = {
        "output": {
            "shape": [*rows, "num_heads", "kv_lora_rank"],
            "dtype": DTYPES[str(form.out_dtype)],
        }
    }
    if form.features.lse:
        base = "base 2" if given.return_lse_base == "base2" else "natural"
        outputs["lse"] = {
            "shape": [*rows, "num_heads"],
            "dtype": "float32",
            "description": f"{DESCRIPTIONS['lse']} Logarithm: {base}.",
        }
    return outputs


def _constraints(axes: dict[str, int]) -> list[str]:
    found = ["head_dim_qk == kv_lora_rank + qk_rope_head_dim"]
    if axes["kv_width"] == axes["head_dim_qk"]:
        found.append("kv_width == head_dim_qk")
    if "batch_size_plus_1" in axes:
        found.append("batch_size_plus_1 == batch_size + 1")
    return found


def _name(kind: str, given: Arguments, form: Form, sizes: dict[str, int]) -> str:
    """Everything that is fixed, in one file name."""
    bounds, used = form.bounds, form.features
    formats = [bounds.q_dtype, bounds.kv_format, bounds.out_dtype]
    short = {"num_heads": "h", "kv_lora_rank": "ckv", "qk_rope_head_dim": "kpe", "page_size": "ps"}
    parts = [f"mla_decode_{kind}", *(f"{short[axis]}{sizes[axis]}" for axis in short)]
    parts += [f"topk{bounds.top_k}"] if bounds.top_k else []
    parts += [formats[0]] if len(set(formats)) == 1 else ["_".join(formats)]
    words = {
        "4d": given.kv_cache.dim() == 4,
        "bound": given.max_q_len is not None,
        "mask": used.mask,
        "sinks": used.sinks,
        "lse": used.lse,
        "base2": used.lse and given.return_lse_base == "base2",
        "separate": used.separate_tables,
        "skip": used.skip_softmax,
        "scale1": isinstance(given.bmm1_scale, Tensor),
        "scale2": isinstance(given.bmm2_scale, Tensor),
        "nows": given.workspace_buffer is None,
        "nolen": given.max_seq_len is None,
    }
    return "_".join(parts + [word for word, is_used in words.items() if is_used])


def _reference(
    given: Arguments, form: Form, inputs: dict[str, Any], outputs: dict[str, Any]
) -> str:
    """`run` of all inputs in their order, behind the source of `attention`."""
    passed = ["cum_seq_lens_q", "mask", "sinks", "bmm1_scale", "bmm2_scale"]
    keywords = [f"{name}={name}" for name in passed if name in inputs]
    keywords += [f"kv_lora_rank={given.kv_lora_rank}", f"sparse={form.features.sparse}"]
    keywords += [f"lse_base2={given.return_lse_base == 'base2'}", f"out_dtype={form.out_dtype}"]
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


def _init(given: Arguments, inputs: dict[str, Any], axes: dict[str, int]) -> str:
    """`init` of the variable axes' sizes, behind the source of `maker`."""
    constants = {name: size for name, size in axes.items() if name not in VARIABLE}
    tensors = {name: (entry["shape"], entry["dtype"]) for name, entry in inputs.items()}
    scalars = {
        name: getattr(given, name) for name, entry in inputs.items() if entry["shape"] is None
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
