"""A folder that launches kernels where there is no compiler and no package registry.

OUT/mla_lab, OUT/kernels   the sources: what is imported, and what artifacts are found by
OUT/data/runtime           what a call reads: costs of kernels, the simulator's constants
OUT/prebuilt.tar.xz        artifacts and the versions of the toolchain that made them
OUT/wheels                 apache-tvm-ffi for the host's Python
OUT/revision.json          the commit that the sources are of
OUT/metadata.json          what was bundled
OUT/setup.sh               to be sourced on the host; OUT/unpack.py is its Python part
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ..core.errors import BuildError, invalid, unsupported
from ..core.resources import data_dir, kernels_dir
from ..core.revision import Revision
from ..core.version import __version__
from ..plan.config import KernelConfig
from .artifact import Artifact
from .build import MANIFEST, Built, Progress, compile_all, no_count
from .source import PACKAGE
from .unpack import ARCHIVE

#: what the loader needs on the host, beside torch
REQUIREMENTS = ("apache-tvm-ffi",)
MANYLINUX = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
METADATA = "metadata.json"

#: the packages stand without what their __init__ imports: NumPy may be among the bundle's wheels
UNPACK = """\
import sys
from pathlib import Path
from types import ModuleType

here = Path(__file__).resolve().parent
for name in ("mla_lab", "mla_lab.jit"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(here.joinpath(*name.split(".")))]

from mla_lab.jit.unpack import main

sys.exit(main([str(here)]))
"""
#: nothing is exported where unpacking was refused; sourced, it then ends with status 1
SETUP = """\
# source this on the GPU host: bash, a Python with torch, nothing else
_bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if _place=$(python3 "$_bundle/unpack.py"); then
  export PYTHONPATH="$_bundle:$_place/site${PYTHONPATH:+:$PYTHONPATH}"
  export MLA_LAB_PREBUILT="$_place/prebuilt"
  export MLA_LAB_CACHE_DIR="${MLA_LAB_CACHE_DIR:-${_place%/*}/cache}"
  @COMMIT@
  python3 -P -c 'import tvm_ffi' 2>/dev/null ||
    echo "mla-lab: no apache-tvm-ffi for this Python; install it or bundle --python X.Y" >&2
  unset _bundle _place
else
  unset _bundle _place
  false
fi
"""


def bundle(
    out: Path,
    configs: Iterable[KernelConfig],
    arch: str = "sm_90a",
    *,
    python: str = "3.12",
    wheels: Iterable[str] = (),
    progress: Progress = lambda _: None,
    built: Built = no_count,
) -> list[Artifact]:
    """Compile `configs` for `arch` and collect the folder `out`, which must be new or a bundle.

    `python` is the host's minor version, for the wheels: apache-tvm-ffi and those named in
    `wheels`. Where the registry cannot be reached, the bundle goes without wheels and `progress`
    gets the reason. `progress` and `built` are those of `compile_all`.
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()) and not (out / "setup.sh").is_file():
        raise invalid("out", f"{out}, which holds other files", "a new folder, or an old bundle")
    made = compile_all(configs, arch, progress=progress, built=built)
    check_alone(made)
    _copy_sources(out)
    _pack_artifacts(out / ARCHIVE, made)
    _download_wheels(out / "wheels", python, [*REQUIREMENTS, *wheels], progress)
    _describe(out, arch, len(made), python)
    return made


def _describe(out: Path, arch: str, kernels: int, python: str) -> None:
    """What was bundled of which commit, and the scripts of the host.

    The host's shell gets MLA_LAB_COMMIT, for code that runs from a copy without its history; that
    of changed code has no name.
    """
    revision = Revision.here()
    revision.write(out)
    facts = {"mla_lab": __version__, **asdict(revision)}
    facts |= {"archs": [arch], "kernels": kernels, "python": python}
    (out / METADATA).write_text(json.dumps(facts, indent=1) + "\n")
    (out / "unpack.py").write_text(UNPACK)
    clean = revision.commit and not revision.dirty
    commit = f"export MLA_LAB_COMMIT={revision.commit}" if clean else "unset MLA_LAB_COMMIT"
    (out / "setup.sh").write_text(SETUP.replace("@COMMIT@", commit))


def check_alone(made: Iterable[Artifact]) -> None:
    """`Unsupported` for an artifact that needs a library of the compiler at run time."""
    for artifact in made:
        if artifact.needs:
            raise unsupported("bundle", f"{artifact.library} needing {artifact.needs}", "none")


def manifest(made: Iterable[Artifact]) -> str:
    """JSON text of a prebuilt folder's manifest: toolchain versions, and the kernels' names.

    Raises `BuildError` for kernels of one kind by several toolchains: a host would look for all of
    them by the versions of one.
    """
    made, toolchain = list(made), dict[str, dict[str, str]]()
    for one in made:
        kind = one.config.kernel.split("/")[0]
        known = toolchain.setdefault(kind, one.toolchain)
        if known != one.toolchain:
            raise BuildError(
                f"bundle: {one.config.name()} was compiled by {one.toolchain}, others by {known}; "
                "unset MLA_LAB_PREBUILT, and compile all with one toolchain"
            )
    names = sorted({f"{a.config.name()} {a.arch}" for a in made})
    return json.dumps({"toolchain": toolchain, "kernels": names}, indent=1, sort_keys=True)


def _copy_sources(out: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", "_kernels", "_data")
    shutil.rmtree(out / "data", ignore_errors=True)
    for source, name in (
        (PACKAGE, PACKAGE.name),
        (kernels_dir(), "kernels"),
        (data_dir() / "runtime", "data/runtime"),
    ):
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(source, out / name, ignore=skip)


def _pack_artifacts(archive: Path, made: list[Artifact]) -> None:
    """One archive: kernels are alike, so that together they take a tenth of their bytes."""
    text = manifest(made).encode()
    with tarfile.open(archive, "w:xz") as tar:
        for artifact in sorted(made, key=lambda a: a.folder.name):
            tar.add(artifact.folder, f"prebuilt/{artifact.folder.name}", filter=_anonymous)
        info = _anonymous(tarfile.TarInfo(f"prebuilt/{MANIFEST}"))
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))


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
