"""Whether a change of source changed machine code: hashes of the kernels in all cubins of a folder.

    python -m mla_lab.studies.machine_code FOLDER > RECORD.json
    python -m mla_lab.studies.machine_code FOLDER --against data/records/machine_code_6277a6a.json

FOLDER is an unpacked `prebuilt` of a bundle or an artifact cache. A build is the set of
sha256 of its `.text.*` sections, which hold no line information, symbol names or build name, so
that moving and renaming source changes nothing. Builds are compared as sets, independent of their
names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import invalid
from ..jit.cubin import sections

#: of a little-endian ELF64 file
MAGIC = b"\x7fELF\x02\x01"
#: hexadecimal digits of a sha256 that are kept
DIGITS = 32
Builds = dict[str, list[str]]


def codes(elf: bytes) -> list[bytes]:
    """Machine code of a cubin's kernels. Raises InvalidInput for another file."""
    if not elf.startswith(MAGIC):
        raise invalid("cubin", elf[:6].hex(), "a little-endian ELF64 file")
    kernels = (s for s in sections(elf) if s.name.startswith(".text."))
    return [elf[s.offset : s.offset + s.size] for s in kernels]


def hashes(folder: Path) -> Builds:
    """Folder of a cubin -> sorted hashes of its kernels. Raises InvalidInput without a cubin."""
    found = {
        cubin.parent.name: sorted(
            hashlib.sha256(code).hexdigest()[:DIGITS] for code in codes(cubin.read_bytes())
        )
        for cubin in sorted(folder.rglob("*.cubin"))
    }
    if not found:
        raise invalid("folder", f"{folder} without a cubin", "an artifact cache or a prebuilt")
    return found


@dataclass(frozen=True)
class Difference:
    """Two folders as sets of builds: the number in common, and the names of the others."""

    same: int
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @classmethod
    def of(
        cls, before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
    ) -> Difference:
        """Compares two dictionaries of builds by their hashes."""
        old, fresh = (Counter(tuple(codes) for codes in x.values()) for x in (before, now))
        gone = tuple(name for name, codes in before.items() if tuple(codes) in old - fresh)
        new = tuple(name for name, codes in now.items() if tuple(codes) in fresh - old)
        return cls((old & fresh).total(), gone, new)

    def __str__(self) -> str:
        lines = [
            f"{self.same} builds with the same machine code, {len(self.gone)} gone, "
            f"{len(self.new)} new or changed"
        ]
        lines += [f"gone: {name}" for name in self.gone]
        return "\n".join(lines + [f"new or changed: {name}" for name in self.new])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 1 if a compared build is missing, new or changed."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.studies.machine_code")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path, help="what this command wrote of another folder")
    args = parser.parse_args(argv)
    now = hashes(args.folder)
    if args.against is None:
        sys.stdout.write(json.dumps(now, indent=0, sort_keys=True) + "\n")
        return 0
    before = json.loads(args.against.read_text(encoding="utf-8"))
    difference = Difference.of(before, now)
    sys.stdout.write(f"{difference}\n")
    return int(bool(difference.gone or difference.new))


if __name__ == "__main__":
    sys.exit(main())
