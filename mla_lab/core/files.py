"""Files that somebody else may have written, and files that a killed process must not tear.

Reading has limits and refuses in one sentence that names file and line; writing replaces a file
whole. A record's rows, a cache entry's metadata and a bundle's manifest are checked by `check`
against a table of keys: `jsonschema` is no dependency of the package, and a GPU host that runs a
bundle has no package registry to get it from.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import invalid

try:
    import fcntl
except ImportError:  # Windows: one writer at a time is then the caller's duty
    fcntl = None  # type: ignore[assignment]

#: key -> the type or types that its value may have
Keys = Mapping[str, type | tuple[type, ...]]

MIB = 1 << 20
#: bytes of one line, and of one JSON file, that are read
MAX_LINE = 4 * MIB
MAX_FILE = 64 * MIB


def lines_of(path: Path, argument: str) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, the newline kept; a long or unreadable file is refused."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    where = f"{argument} {path}:{number}"
                    raise invalid(where, "a longer line", f"lines up to {MAX_LINE // MIB} MiB")
                yield number, line
    except OSError as error:
        raise invalid(argument, f"{path}: {error.strerror}", "a readable file") from error


def read_json(path: Path, argument: str, limit: int = MAX_FILE) -> Any:
    """The value of a whole JSON file of at most `limit` bytes. Raises InvalidInput."""
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise invalid(argument, f"{path}: {error.strerror}", "a readable file") from error
    if len(text) > limit:
        raise invalid(argument, f"{path} of more than {limit} bytes", f"up to {limit} bytes")
    return parse_json(text, f"{argument} {path}")


def parse_json(text: bytes | str, argument: str) -> Any:
    """The value of a JSON text; InvalidInput for broken, too deep or non-UTF-8 text.

    argument: what is read, and from where, as the message begins.
    """
    try:
        return json.loads(text)
    except RecursionError:
        reason = "nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"broken JSON ({error.msg}, column {error.colno})"
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        reason = f"no JSON ({str(error)[:80]})"
    raise invalid(argument, reason, "valid JSON of moderate depth") from None


def check(value: Any, wanted: Keys, argument: str) -> dict[str, Any]:
    """`value` if it is a JSON object whose `wanted` keys have these types, else InvalidInput."""
    if not isinstance(value, dict):
        raise invalid(argument, f"a JSON {type(value).__name__}", "a JSON object")
    for name, types in wanted.items():
        allowed = types if isinstance(types, tuple) else (types,)
        if name not in value:
            raise invalid(argument, f"no {name}", f"an object with {', '.join(wanted)}")
        got = value[name]
        if not isinstance(got, allowed) or (isinstance(got, bool) and bool not in allowed):
            kinds = " or ".join(kind.__name__ for kind in allowed)
            raise invalid(argument, f"{name} {repr(got)[:60]}", f"{name} of type {kinds}")
    return value


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file for this process until it is closed; False where another process has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block ends without an error.

    At every moment `path` is the old file or the new one, also after a loss of power.
    """
    name = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with name.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            name.chmod(path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append(descriptor: int, data: bytes) -> None:
    """Append all of `data` durably, or nothing: what a full disk cut short is taken back."""
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
