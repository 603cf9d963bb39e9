"""A wheel of compiled kernels, `mla-lab-kernels-sm90`, beside an mla-lab of the same sources.

    mla_lab_kernels_sm90/prebuilt/manifest.json
    mla_lab_kernels_sm90/prebuilt/NAME-ARCH-KEY/kernel.so, metadata.json

Where it is installed, `jit.find` looks into it, so that a GPU host needs neither the CuTe DSL nor
a compiler. PTX and cubin, which only the x-ray reads, stay behind: they double the size.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..core.errors import BuildError
from ..core.revision import Revision
from ..core.version import __version__
from ..plan.config import KernelConfig
from .artifact import Artifact
from .build import MANIFEST, Built, Progress, compile_all, kernels_package, no_count
from .bundle import check_alone, manifest
from .cache import METADATA

LIBRARY = "kernel.so"
#: zip's first moment: equal inputs give equal bytes
DATE = (1980, 1, 1, 0, 0, 0)

INIT = '''"""Kernels of mla-lab {version} for {arch}, commit {commit}: found by mla_lab.jit."""
'''
WHEEL = """Wheel-Version: 1.0
Generator: mla-lab {version}
Root-Is-Purelib: false
Tag: {tag}
"""
ABOUT = """Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Compiled MLA decode kernels of mla-lab for {arch}
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: mla-lab=={version}
Requires-Dist: apache-tvm-ffi>={tvm_ffi}
"""


def kernels_wheel(
    out: Path,
    configs: Iterable[KernelConfig],
    arch: str = "sm_90a",
    *,
    progress: Progress = lambda _: None,
    built: Built = no_count,
) -> Path:
    """Compile `configs` for `arch` and write their wheel into the folder `out`; returns its path.

    `progress` and `built` are those of `compile_all`. Raises `BuildError` without a configuration.
    """
    made = compile_all(configs, arch, progress=progress, built=built)
    if not made:
        raise BuildError("wheel: got no kernel to put in; supported: one or more")
    check_alone(made)
    package = kernels_package(arch)
    facts = {
        "name": package.replace("_", "-"),
        "version": __version__,
        "arch": arch,
        "commit": _commit(),
        "tvm_ffi": made[0].toolchain["tvm-ffi"],
        "tag": f"py3-none-{platform_tag(made)}",
    }
    info = f"{package}-{__version__}.dist-info"
    files = [
        (f"{package}/__init__.py", INIT.format(**facts).encode()),
        (f"{package}/prebuilt/{MANIFEST}", manifest(made).encode()),
        *((f"{package}/prebuilt/{name}", data) for name, data in _entries(made)),
        (f"{info}/METADATA", ABOUT.format(**facts).encode()),
        (f"{info}/WHEEL", WHEEL.format(**facts).encode()),
    ]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{package}-{__version__}-{facts['tag']}.whl"
    _write(path, files, f"{info}/RECORD")
    return path


def _commit() -> str:
    revision = Revision.here()
    return f"{revision.commit or 'unknown'}{' with changes' if revision.dirty else ''}"


def platform_tag(made: Iterable[Artifact]) -> str:
    """manylinux of the newest glibc symbol that a library asks for."""
    text = b"".join(artifact.library.read_bytes() for artifact in made)
    minor = max([17, *(int(n) for n in re.findall(rb"GLIBC_2\.(\d+)", text))])
    return f"manylinux_2_{minor}_x86_64"


def _entries(made: Iterable[Artifact]) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each library, and of metadata that lists it alone."""
    for artifact in sorted(made, key=lambda a: a.folder.name):
        metadata = json.loads((artifact.folder / METADATA).read_text())
        metadata["files"] = {LIBRARY: metadata["files"][LIBRARY]}
        text = json.dumps(metadata, indent=1, sort_keys=True)
        yield f"{artifact.folder.name}/{LIBRARY}", artifact.library.read_bytes()
        yield f"{artifact.folder.name}/{METADATA}", text.encode()


def _write(path: Path, files: list[tuple[str, bytes]], record: str) -> None:
    """A zip file with the checksums of the others in its last one, as PEP 427 has it."""
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files:
            archive.writestr(_info(name), data, zipfile.ZIP_DEFLATED, 9)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
        text = "\n".join([*lines, f"{record},,", ""])
        archive.writestr(_info(record), text, zipfile.ZIP_DEFLATED, 9)


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, DATE)
    info.external_attr = 0o644 << 16
    return info
