"""The commit that the code is of, and the rule that a record names a clean one."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import invalid
from .installed import output_of
from .resources import own_data_dir

#: beside the package of a bundle, which has no git
FILE = "revision.json"
#: set to write records of any code
FORCE = "MLA_LAB_FORCE_RECORD"
_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Revision:
    """A commit, None where it cannot be found out, and whether the code differs from it."""

    commit: str | None
    dirty: bool | None

    @classmethod
    def here(cls, package: Path = _PACKAGE) -> Revision:
        """Of the code that runs: what its bundle says, else what git says.

        Code means `mla_lab/` and `kernels/`, files that git does not track included.
        `MLA_LAB_COMMIT` names the commit where neither knows it, or where git has that of another
        checkout, such as a copy's; whether the code differs from it is then not known.
        """
        bundled = package.parent / FILE
        if bundled.is_file():
            return cls(**json.loads(bundled.read_text(encoding="utf-8")))
        git = ("git", "-C", str(package))
        status = output_of(*git, "status", "--porcelain", "--", ".", "../kernels")
        head, named = output_of(*git, "rev-parse", "HEAD"), os.environ.get("MLA_LAB_COMMIT")
        if status is None or (named and named != head):
            return cls(named or head, None)
        return cls(head, bool(status))

    def write(self, folder: Path) -> None:
        """Leaves it in a bundle."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def check_record(path: Path) -> None:
    """Raises InvalidInput where `path` is in this package's `data/records` and the code is not of
    a clean commit, unless `MLA_LAB_FORCE_RECORD` is set.
    """
    inside = (own_data_dir() / "records").resolve() in path.resolve().parents
    if not inside or os.environ.get(FORCE):
        return
    revision = Revision.here()
    if revision.dirty or revision.commit is None:
        got = "changed code" if revision.dirty else "code of no known commit"
        wanted = f"a clean commit; another folder; {FORCE}=1, which says so in the record"
        raise invalid(f"record {path.name}", got, wanted)
