"""A folder that launches kernels where there is no compiler and no package registry.

OUT/mla_lab, OUT/kernels   the sources: what is imported, and what artifacts are found by
OUT/revision.json          the commit that the sources are of
OUT/prebuilt               artifacts and the versions of the toolchain that made them
OUT/wheels                 apache-tvm-ffi for the host's Python
OUT/setup.sh               to be sourced on the host; copies what must be private
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from ..core.errors import BuildError, invalid, unsupported
from ..core.resources import kernels_dir
from ..core.revision import Revision
from ..plan.config import KernelConfig
from .artifact import Artifact
from .build import MANIFEST, Progress, compile_all
from .source import PACKAGE

#: what the loader needs on the host, beside torch
REQUIREMENTS = ("apache-tvm-ffi",)
MANYLINUX = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")

SETUP = """\
# source this on the GPU host: bash, a Python with torch, nothing else
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${MLA_LAB_BUNDLE_HOME:-${TMPDIR:-/tmp}/mla-lab-$(id -u)}
(umask 077 && mkdir -p "$home" && rm -rf "$home/prebuilt" &&
  python3 -m tarfile -e "$bundle/prebuilt.tar.xz" "$home")
[ -O "$home" ] || echo "mla-lab: $home belongs to somebody else; set MLA_LAB_BUNDLE_HOME" >&2
chmod -R go-w "$home"
if ls "$bundle"/wheels/*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade \\
    --target "$home/site" "$bundle"/wheels/*.whl
fi
export PYTHONPATH="$bundle:$home/site${PYTHONPATH:+:$PYTHONPATH}"
export MLA_LAB_PREBUILT="$home/prebuilt"
export MLA_LAB_CACHE_DIR="${MLA_LAB_CACHE_DIR:-$home/cache}"
python3 -c 'import tvm_ffi' 2>/dev/null ||
  echo "mla-lab: no apache-tvm-ffi for this Python; install it or bundle --python X.Y" >&2
"""


def bundle(
    out: Path,
    configs: Iterable[KernelConfig],
    archs: Iterable[str] = ("sm_90a",),
    *,
    python: str = "3.12",
    wheels: Iterable[str] = (),
    progress: Progress = lambda _: None,
) -> list[Artifact]:
    """Compile `configs` for `archs` and collect the folder `out`, which must be new or a bundle.

    `python` is the host's minor version, for the wheels: apache-tvm-ffi and those named in
    `wheels`. A registry that cannot be reached is told through `progress` and is no error.
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()) and not (out / "setup.sh").is_file():
        raise invalid("out", f"{out}, which holds other files", "a new folder, or an old bundle")
    wanted = list(configs)
    built = [a for arch in archs for a in compile_all(wanted, arch, progress=progress)]
    for artifact in built:
        if artifact.needs:
            raise unsupported("bundle", f"{artifact.library} needing {artifact.needs}", "none")
    _copy_sources(out)
    Revision.here().write(out)
    _pack_artifacts(out / "prebuilt.tar.xz", built)
    _download_wheels(out / "wheels", python, [*REQUIREMENTS, *wheels], progress)
    (out / "setup.sh").write_text(SETUP)
    return built


def _copy_sources(out: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", "_kernels", "_data")
    for source, name in ((PACKAGE, PACKAGE.name), (kernels_dir(), "kernels")):
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(source, out / name, ignore=skip)


def _pack_artifacts(archive: Path, built: list[Artifact]) -> None:
    """One archive: kernels are alike, so that together they take a tenth of their bytes."""
    toolchain = {a.config.kernel.split("/")[0]: a.toolchain for a in built}
    names = sorted({f"{a.config.name()} {a.arch}" for a in built})
    manifest = json.dumps({"toolchain": toolchain, "kernels": names}, indent=1, sort_keys=True)
    with tarfile.open(archive, "w:xz") as tar:
        for artifact in sorted(built, key=lambda a: a.folder.name):
            tar.add(artifact.folder, f"prebuilt/{artifact.folder.name}", filter=_anonymous)
        info = _anonymous(tarfile.TarInfo(f"prebuilt/{MANIFEST}"))
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest.encode()))


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without this machine's user; readable and writable by whoever unpacks it, by nobody else."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o700 if info.isdir() else 0o600
    return info


def _download_wheels(folder: Path, python: str, names: list[str], progress: Progress) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    platforms = [arg for tag in MANYLINUX for arg in ("--platform", f"manylinux_{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms]
    done = subprocess.run([*command, "-d", str(folder), *names], capture_output=True, text=True)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = words[0].removeprefix("ERROR: ") if words else "pip failed"
        progress(
            f"no wheels in the bundle ({reason}); the host needs {', '.join(names)} "
            f"for Python {python}"
        )


def size_of(out: Path) -> int:
    """Bytes of a bundle."""
    if not (out / "setup.sh").is_file():
        raise BuildError(f"bundle: {out} is none; make one with `mla-lab bundle {out}`")
    return sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
