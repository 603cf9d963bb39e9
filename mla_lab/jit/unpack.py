"""A bundle's kernels and wheels, unpacked on the host that launches them.

What is unpacked will run, so it lies where no other user can put anything: below
$MLA_LAB_BUNDLE_HOME, by default `bundles` in the kernel cache. A folder that somebody else owns,
may write or has linked is refused, and nothing is exported.

    HOME/bundle-ID/prebuilt, HOME/bundle-ID/site     ID: SHA-256 of the bundle's files and Python

A bundle is unpacked once, into a temporary folder that takes its name when it is complete, so
that several processes may start at once.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ..core.errors import BuildError, MlaLabError
from .cache import LEFT_OVER_S, check_private, default_root, private_folder, sweep

#: a bundle that was not used for so many seconds gives its place back
UNUSED_S = 7 * 24 * 3600.0
ARCHIVE = "prebuilt.tar.xz"


def unpack(bundle: Path, home: Path | None = None) -> Path:
    """The private folder with the bundle's `prebuilt` and `site`, made if it is not there.

    Raises `BuildError` where another user could have put something there.
    """
    root = _home(home)
    place = root / f"bundle-{_identity(bundle)}"
    if place.exists():
        for path in (place, *place.rglob("*")):
            check_private(path)
        os.utime(place)
        return place
    sweep(root, "tmp-*", LEFT_OVER_S)
    sweep(root, "bundle-*", UNUSED_S)
    work = Path(tempfile.mkdtemp(prefix="tmp-", dir=root))
    try:
        with tarfile.open(bundle / ARCHIVE, "r:xz") as archive:
            extract(archive, work)
        _install(sorted((bundle / "wheels").glob("*.whl")), work / "site")
        work.rename(place)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        if not place.exists():  # else another process was first
            raise BuildError(f"bundle: {bundle} not unpacked in {root} ({error})") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def extract(archive: tarfile.TarFile, to: Path) -> None:
    """Files and folders that lie inside `to`, by Python's data filter. Python before 3.11.4 has
    none: there, `TarError` for anything else in the archive."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(to, filter="data")
        return
    for member in archive.getmembers():
        inside = not member.name.startswith("/") and ".." not in member.name.split("/")
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.ReadError(f"{member.name}: neither a file nor a folder inside")
    archive.extractall(to)


def _home(home: Path | None) -> Path:
    named = os.environ.get("MLA_LAB_BUNDLE_HOME")
    root = home or (Path(named).expanduser() if named else default_root() / "bundles")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"bundle: {root} cannot be made ({error.strerror}); set MLA_LAB_BUNDLE_HOME to a "
            "directory of your own"
        ) from None
    return private_folder(root)


def _identity(bundle: Path) -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in (bundle / ARCHIVE, *sorted((bundle / "wheels").glob("*.whl"))):
        try:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        except OSError as error:
            raise BuildError(f"bundle: {path}: {error.strerror}; bundle anew") from None
    return digest.hexdigest()[:16]


def _install(wheels: list[Path], site: Path) -> None:
    """Install the wheels into `site`; where pip refuses them, say why and go on."""
    site.mkdir()
    if not wheels:
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-compile", "--disable-pip-version-check", "--target", str(site)]
    done = subprocess.run(
        [*command, *map(str, wheels)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        sys.stderr.write(f"mla-lab: the bundle's wheels were not installed: {said}\n")


def main(arguments: list[str]) -> int:
    """Print the folder of the bundle in `arguments[0]`; 1 and one sentence where it is refused."""
    os.umask(0o077)
    try:
        sys.stdout.write(f"{unpack(Path(arguments[0]).resolve())}\n")
    except MlaLabError as error:
        sys.stderr.write(f"mla-lab: {error}\n")
        return 1
    return 0
