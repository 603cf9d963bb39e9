"""An artifact: the files of one kernel compiled for one architecture, and their metadata."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import BuildError, InvalidInput
from ..core.files import check
from ..cute import registry
from ..plan.config import KernelConfig
from . import cuda_build
from .cubin import KernelResources

#: layout of an entry; it is part of the key, so that entries of another layout are not found
FORMAT = 1
#: what the metadata of an entry holds
METADATA = {"functions": list, "needs": list, "resources": list, "toolchain": dict}


@dataclass(frozen=True)
class Artifact:
    """Files of a compiled kernel. `library` has the tvm-ffi ABI and exports `functions`.

    `ptx` and `cubin` are not there where the artifact comes from a wheel of kernels.
    """

    config: KernelConfig
    arch: str
    folder: Path
    functions: tuple[str, ...]
    #: shared libraries that must be in the process first (beside cudart and tvm-ffi)
    needs: tuple[str, ...]
    resources: tuple[KernelResources, ...]
    toolchain: dict[str, str]

    @property
    def library(self) -> Path:
        return self.folder / "kernel.so"

    @property
    def ptx(self) -> Path:
        return self.folder / "kernel.ptx"

    @property
    def cubin(self) -> Path:
        return self.folder / "kernel.cubin"


def key(config: KernelConfig, arch: str, source: str, toolchain: dict[str, str]) -> str:
    """SHA-256 in hex over configuration, architecture, sources, compiler flags and toolchain
    versions.
    """
    cute = config.kernel.startswith("cute/")
    flags = registry.OPTIONS if cute else cuda_build.flags(arch)
    facts = [FORMAT, config.as_dict(), arch, source, flags, sorted(toolchain.items())]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def entry_name(config: KernelConfig, arch: str, key_hex: str) -> str:
    """Name of a cache entry's folder: readable, and unique by the key's first 64 bits."""
    return f"{config.name()[:100]}-{arch}-{key_hex[:16]}"


def artifact(folder: Path, config: KernelConfig, arch: str, facts: dict[str, Any]) -> Artifact:
    """An `Artifact` from the metadata of a cache entry; `BuildError` where it has another form."""
    try:
        check(facts, METADATA, f"artifact {folder / 'metadata.json'}")
        return Artifact(
            config=config,
            arch=arch,
            folder=folder,
            functions=tuple(facts["functions"]),
            needs=tuple(facts["needs"]),
            resources=tuple(KernelResources(**r) for r in facts["resources"]),
            toolchain=dict(facts["toolchain"]),
        )
    except (InvalidInput, TypeError) as error:
        raise BuildError(f"{error}; delete {folder}, and it is built again") from None
