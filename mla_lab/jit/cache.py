"""The artifact cache: private to its user, checksummed, atomic, safe for several processes.

    ROOT/                     0700, owned by this user (or root)
      NAME-ARCH-KEY/          one artifact: kernel.so, kernel.ptx, kernel.cubin, metadata.json
      lock/NAME-ARCH-KEY      locked while an artifact is built
      log/NAME-ARCH-KEY.log   the compiler's output of a failed build
      tmp-XXXX/               being built; becomes an entry by rename, metadata written last

A cached library is executed: an entry that another user could have written is refused, and one
whose files do not match their checksums counts as absent and is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import BuildError, InvalidInput
from ..core.files import MIB, lock, read_json

METADATA = "metadata.json"
#: what a killed build left is swept after so many seconds; a build takes seconds, at most minutes
LEFT_OVER_S = 3600.0


def default_root() -> Path:
    """$MLA_LAB_CACHE_DIR, else $XDG_CACHE_HOME/mla-lab, else ~/.cache/mla-lab."""
    if os.environ.get("MLA_LAB_CACHE_DIR"):
        return Path(os.environ["MLA_LAB_CACHE_DIR"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mla-lab"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_private(path: Path) -> None:
    """`BuildError` unless only this user or root could have written `path`."""
    info = os.lstat(path)
    if not hasattr(os, "getuid"):  # Windows has neither user ids nor these modes
        return
    if info.st_uid not in (os.getuid(), 0):
        raise BuildError(
            f"cache: {path} belongs to user id {info.st_uid}; supported: files of this user or "
            "root; set MLA_LAB_CACHE_DIR to a directory of your own"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(info.st_mode):
        raise BuildError(
            f"cache: others may write {path} (mode {stat.S_IMODE(info.st_mode):o}); supported: "
            f"private files; delete it or run `chmod -R go-w {path}`"
        )


def private_folder(path: Path) -> Path:
    """The folder itself, or where this user's own link leads; `BuildError` unless private."""
    if path.is_symlink():
        owner = os.lstat(path).st_uid
        if owner not in (os.getuid(), 0):
            raise BuildError(
                f"cache: {path} is a link of user id {owner}; supported: a directory or a link of "
                "your own"
            )
        path = path.resolve()
    check_private(path)
    return path


def sweep(root: Path, pattern: str, seconds: float) -> None:
    """Delete the folders of `root` that match and have not changed for so many seconds."""
    for folder in root.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > seconds:
                shutil.rmtree(folder, ignore_errors=True)


class Busy(Exception):
    """Another process is building the entry."""


class Cache:
    """One cache directory. Reading needs no write access; only `build` creates anything.

    `installed`: the directory is part of an installed package, and no less to be trusted than the
    Python files beside it, whatever their modes.
    """

    def __init__(self, root: Path | None = None, *, installed: bool = False) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.installed = installed

    def find(self, name: str) -> dict[str, object] | None:
        """Metadata of the entry if it is whole, None if it is absent or damaged.

        Raises `BuildError` if somebody else could have written it.
        """
        entry = self.root / name
        if not (entry / METADATA).is_file():
            return None
        try:
            if not self.installed:
                private_folder(self.root)
                for path in (entry, *entry.iterdir()):
                    check_private(path)
            metadata: dict[str, object] = read_json(entry / METADATA, "cache", MIB)
            sums: dict[str, str] = metadata["files"]  # type: ignore[assignment]
            whole = all(checksum(entry / file) == value for file, value in sums.items())
        except (OSError, InvalidInput, KeyError, TypeError, AttributeError):
            return None
        return metadata if whole and sums else None

    def build(
        self,
        name: str,
        make: Callable[[Path], dict[str, object]],
        waiting: Callable[[], None] | None = None,
    ) -> dict[str, object]:
        """The entry, built by `make(folder) -> metadata` unless another process just did so.

        While another process builds it: call `waiting` once and wait, or raise `Busy` without.
        """
        self._prepare()
        sweep(self.root, "tmp-*", LEFT_OVER_S)
        with self._locked(name, waiting):
            found = self.find(name)
            if found is not None:
                return found
            work = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
            try:
                metadata = make(work)
                self._publish(work, name, metadata)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        published = self.find(name)
        if published is None:
            raise BuildError(f"cache: {self.root / name} changed while it was written; try again")
        return published

    def log_path(self, name: str) -> Path:
        """The file that holds the compiler's output of a failed build."""
        return self.root / "log" / f"{name}.log"

    def _prepare(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            private_folder(self.root)
            for folder in ("lock", "log"):
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
            writable = os.access(self.root, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise BuildError(
                f"cache: {self.root} is not writable; supported: a directory of your own; "
                "set MLA_LAB_CACHE_DIR to one"
            )

    @contextlib.contextmanager
    def _locked(self, name: str, waiting: Callable[[], None] | None) -> Iterator[None]:
        with open(self.root / "lock" / name, "w") as held:
            if not lock(held.fileno()):
                if waiting is None:
                    raise Busy(name)
                waiting()
                lock(held.fileno(), wait=True)
            yield

    def _publish(self, work: Path, name: str, metadata: dict[str, object]) -> None:
        files = sorted(p.name for p in work.iterdir())
        complete = {**metadata, "files": {file: checksum(work / file) for file in files}}
        for file in files:
            (work / file).chmod(0o600)
        (work / METADATA).write_text(json.dumps(complete, indent=1, sort_keys=True))
        (work / METADATA).chmod(0o600)
        final = self.root / name
        if final.exists():
            damaged = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
            final.rename(damaged / name)
            shutil.rmtree(damaged, ignore_errors=True)
        work.rename(final)
