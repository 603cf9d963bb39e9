"""Everything that a compiled kernel depends on: the whole cache key of an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..core.errors import invalid


@dataclass(frozen=True)
class KernelConfig:
    """One compiled kernel. Batch, heads, q_len, lengths and page counts are run-time values.

    Frozen and hashable. `kernel` names the entry in the build registry (for example
    "cute/keep_ab_sm90" or "cuda/planner"); fields that a kernel does not read stay at
    their defaults, so that one kernel has one key.
    """

    kernel: str
    q_dtype: str = "bf16"
    kv_format: str = "bf16"
    out_dtype: str = "bf16"
    #: query rows of a work tile and KV tokens of a block
    tile_rows: int = 64
    tile_kv: int = 64
    page_size: int = 64
    #: CTAs that share one work tile
    cluster: int = 1
    #: causal or packed-tree mask code is compiled in
    mask: str = "none"
    #: switches of one kernel, for experiments and features, as sorted pairs; `static_facts` of the
    #: kernel's package reads them, and `jit.options` refuses one that it does not read
    options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.mask not in ("none", "causal", "tree"):
            raise invalid("mask", self.mask, ("none", "causal", "tree"))
        object.__setattr__(self, "options", tuple(sorted(self.options)))

    def option(self, name: str, default: int = 0) -> int:
        """The value of a kernel-specific switch."""
        return dict(self.options).get(name, default)

    def name(self) -> str:
        """Short file name: the kernel and every field that is not at its default."""
        parts = [self.kernel.replace("/", "_")]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "options":
                parts += [f"{k}{v}" for k, v in value]
            elif f.name != "kernel" and value != f.default:
                parts.append(f"{f.name}-{value}")
        return "_".join(parts)

    def as_dict(self) -> dict[str, object]:
        """Plain values, for metadata files."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelConfig:
        """The configuration that `as_dict` wrote, also after JSON made lists of its pairs."""
        options = tuple((str(name), int(value)) for name, value in values["options"])
        return cls(**{**values, "options": options})
