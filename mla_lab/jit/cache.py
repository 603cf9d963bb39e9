"""The artifact cache: private to its user, checksummed, atomic, safe for several processes.

    ROOT/                     0700, owned by this user (or root)
      NAME-ARCH-KEY/          one artifact: kernel.so, kernel.ptx, kernel.cubin, metadata.json
      lock/KEY                held while an artifact is built
      log/NAME-ARCH.log       what the compiler said when a build failed
      tmp-XXXX/               being built; becomes an entry by rename, metadata written last

A cached library is code that will run: an entry that another user could have written is
refused, one whose files do not match their checksums counts as absent and is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import BuildError

METADATA = "metadata.json"


def default_root() -> Path:
    """$MLA_LAB_CACHE_DIR, else $XDG_CACHE_HOME/mla-lab, else ~/.cache/mla-lab."""
    if os.environ.get("MLA_LAB_CACHE_DIR"):
        return Path(os.environ["MLA_LAB_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mla-lab"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_private(path: Path) -> None:
    """`BuildError` unless only this user or root could have written `path`."""
    info = os.lstat(path)
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


class Busy(Exception):
    """Another process is building the entry."""


class Cache:
    """One cache directory. Reading needs no write access; only `build` creates anything."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()

    def find(self, name: str) -> dict[str, object] | None:
        """Metadata of the entry if it is whole, None if it is absent or damaged.

        Raises `BuildError` if somebody else could have written it.
        """
        entry = self.root / name
        if not (entry / METADATA).is_file():
            return None
        for path in (self.root, entry, *entry.iterdir()):
            check_private(path)
        try:
            metadata: dict[str, object] = json.loads((entry / METADATA).read_text())
            sums: dict[str, str] = metadata["files"]  # type: ignore[assignment]
            whole = all(checksum(entry / file) == value for file, value in sums.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
        """Where the compiler's words about a failed build are kept."""
        return self.root / "log" / f"{name}.log"

    def _prepare(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.root)
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
        with open(self.root / "lock" / name, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise Busy(name) from None
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
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
