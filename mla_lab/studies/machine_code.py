"""Whether a change of source changed machine code: hashes of the kernels in all cubins of a folder.

    python -m mla_lab.studies.machine_code FOLDER > RECORD.json
    python -m mla_lab.studies.machine_code FOLDER --against data/records/machine_code_6277a6a.json

FOLDER is an unpacked `prebuilt` of a bundle or an artifact cache. A build is the set of
sha256 of its `.text.*` sections, which hold no line information, symbol names or build name, so
that moving and renaming source changes nothing. Builds of one configuration are compared with each
other, and those whose configuration has no counterpart as sets, independent of their names.
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
from ..jit.cache import METADATA
from ..jit.cubin import sections
from ..plan.config import KernelConfig

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
    """Configuration and architecture -> sorted hashes of a build's kernels. In place of a
    configuration that several builds have, or that no metadata name, stands the folder of each.

    Raises InvalidInput without a cubin.
    """
    cubins = sorted(folder.rglob("*.cubin"))
    if not cubins:
        raise invalid("folder", f"{folder} without a cubin", "an artifact cache or a prebuilt")
    names = [_name(cubin.parent) for cubin in cubins]
    times = Counter(names)
    found = {}
    for name, cubin in zip(names, cubins, strict=True):
        within = cubin.parent.relative_to(folder)
        own = name if name and times[name] == 1 else str(within if within.parts else folder.name)
        digests = (hashlib.sha256(code).hexdigest() for code in codes(cubin.read_bytes()))
        found[own] = sorted(digest[:DIGITS] for digest in digests)
    return found


def _name(folder: Path) -> str:
    """A build's configuration in full, and its architecture; "" without metadata of them."""
    path = folder / METADATA
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "config" not in facts:
        return ""
    return f"{KernelConfig.from_dict(facts['config']).name()}-{facts['arch']}"


@dataclass(frozen=True)
class Difference:
    """Two folders: how many builds have the same code, whose code changed, and the names of those
    that one alone has, by name and by code."""

    same: int
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @classmethod
    def of(
        cls, before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
    ) -> Difference:
        """Compares two dictionaries of builds by their hashes."""
        common = [name for name in before if name in now]
        changed = tuple(name for name in common if list(before[name]) != list(now[name]))
        old, fresh = (
            {name: tuple(codes) for name, codes in x.items() if name not in common}
            for x in (before, now)
        )
        left, right = Counter(old.values()), Counter(fresh.values())
        gone = tuple(name for name, codes in old.items() if codes in left - right)
        new = tuple(name for name, codes in fresh.items() if codes in right - left)
        return cls(len(common) - len(changed) + (left & right).total(), changed, gone, new)

    def __str__(self) -> str:
        counts = f"{len(self.changed)} changed, {len(self.gone)} gone, {len(self.new)} new"
        lines = [f"{self.same} builds with the same machine code, {counts}"]
        for word in ("changed", "gone", "new"):
            lines += [f"{word}: {name}" for name in getattr(self, word)]
        return "\n".join(lines)


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
    return int(bool(difference.changed or difference.gone or difference.new))


if __name__ == "__main__":
    sys.exit(main())
