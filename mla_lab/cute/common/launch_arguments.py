"""Arguments of the exported functions by name, in their order: the one list of all families.

The host passes its tensors in this order (`backends.cute.launch`). Kernels are compiled with the
fake ones made here, in which every count of a launch is a symbol, and take them apart by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...core.dims import FP8_656_BYTES
from .feature_operands import mask_words

HEAD_DIM, LATENT_DIM = 576, 512
#: the last three numbers, of a launch with a schedule and of one by formula
WALK_NUMBERS = ("num_workers", "q_len", "costs")
GRID_NUMBERS = ("num_splits", "row_tiles", "q_len")


@dataclass(frozen=True)
class LaunchForm:
    """What the list depends on."""

    #: element types; of 656-byte tokens the cache is bytes
    q: Any
    kv: Any
    out: Any
    #: query rows of a work tile
    tile_rows: int
    #: KV tokens of a page; None: any number
    page_size: int | None
    #: query, out and lse as callers have them, [batch, q_len, heads, ...], [tokens, heads]: a view
    #: costs the host a microsecond; else rows
    shaped: bool
    #: softmax stats of a partial, and the alignment of their rows in bytes
    stats: int
    stats_align: int
    #: 656-byte tokens
    kv_656: bool = False
    #: work follows from block indices
    grid: bool = False
    #: room for the LL merge of the other mainloop
    dual: bool = False
    #: int64 words of a CTA's profile events
    events: int = 0
    features: bool = False
    tree: bool = False
    skip: bool = False

    def arguments(self) -> dict[str, Any]:
        """Fake arguments by name."""
        rows = [None] * (3 if self.shaped else 1)
        args: dict[str, Any] = {
            "q": tensor(self.q, 16, *rows, HEAD_DIM),
            "kv": self._cache(),
            "out": tensor(self.out, 16, *rows, LATENT_DIM),
            "lse": tensor(Float32, 4, *[None] * (2 if self.shaped else 1)),
            "partial_out": tensor(Float32, 16, None, self.tile_rows, LATENT_DIM),
            "partial_lse": tensor(Float32, self.stats_align, None, self.stats),
            "counters": tensor(Int32, 4, None),
            "block_table": make_fake_tensor(
                Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int(), 1), assumed_align=4
            ),
            "seq_lens": tensor(Int32, 4, None),
            "q_begin": tensor(Int32, 4, None),
        }
        if not self.grid:
            args |= {"tiles": tensor(Int32, 16, None, 8), "schedule": tensor(Int32, 4, None)}
        if self.dual:
            args["ll_partials"] = tensor(Float32, 16, None)
        if self.events:
            args["profile"] = tensor(Int64, 8, None, self.events)
        args |= {"heads": Int32(1), "scale_log2": Float32(1.0), "out_scale": Float32(1.0)}
        args |= {name: Int32(1) for name in (GRID_NUMBERS if self.grid else WALK_NUMBERS)}
        if self.features:
            args["features"] = self._features()
        return args | {"stream": make_fake_stream(use_tvm_ffi_env_stream=True)}

    def _cache(self) -> cute.Tensor:
        """Pages at multiples of 16 bytes, tokens of a page dense."""
        dtype, width = (Uint8, FP8_656_BYTES) if self.kv_656 else (self.kv, HEAD_DIM)
        page = cute.sym_int() if self.page_size is None else self.page_size
        return make_fake_tensor(
            dtype,
            (cute.sym_int(), page, width),
            stride=(cute.sym_int64(divisibility=128 // dtype.width), width, 1),
            assumed_align=16,
        )

    def _features(self) -> tuple[Any, ...]:
        """See `feature_operands`; skip-softmax's threshold is the last one."""
        features: list[Any] = [tensor(Float32, 4, None) for _ in range(3)]
        if self.tree:
            features.append(tensor(Uint16, 4, *[None] * (3 if self.shaped else 2)))
        if self.skip:
            features.append(Float32(1.0))
        return tuple(features)


def tensor(dtype: Any, align: int, *shape: int | None) -> cute.Tensor:
    """A compact row-major tensor; None: a size of the launch."""
    sizes = tuple(cute.sym_int() if size is None else size for size in shape)
    order = tuple(reversed(range(len(sizes))))
    return make_fake_compact_tensor(dtype, sizes, stride_order=order, assumed_align=align)


def exported(name: str, launch: Callable[..., None], names: tuple[str, ...]) -> Any:
    """`launch(q, kv, stream, the others by name)` as a function of arguments in the list's order.
    Messages of the DSL quote the names."""

    def function(*values: Any) -> None:
        args = dict(zip(names, values, strict=True))
        launch(args.pop("q"), args.pop("kv"), args.pop("stream"), args)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    return cute.jit(preprocess=False)(function)


def operand_fields(args: dict[str, Any], *, tree: Any, skip: Any) -> dict[str, Any]:
    """Arguments as fields of a family's `Globals`: lse as rows, features one by one."""
    fields = dict(args)
    lse, features = fields.pop("lse"), fields.pop("features", ())
    fields |= dict(zip(("sinks", "bmm1", "bmm2"), features, strict=False))
    if tree:
        fields["mask"] = mask_words(features[3])
    if skip:
        fields["skip"] = features[-1]
    return fields | {
        "mO": fields.pop("out"),
        "mLSE": cute.make_tensor(lse.iterator, cute.make_layout(cute.size(lse.shape))),
        "mO_partial": fields.pop("partial_out"),
        "mLSE_partial": fields.pop("partial_lse"),
    }
