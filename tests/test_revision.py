"""The commit of the code: from git, from a bundle, and the records that must name a clean one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mla_lab.bench.records import Record
from mla_lab.core import revision
from mla_lab.core.errors import InvalidInput
from mla_lab.core.resources import own_data_dir
from mla_lab.core.revision import FORCE, Revision, check_record


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@x.y"]
    done = subprocess.run(
        ["git", *who, "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    for name in ("mla_lab/a.py", "kernels/b.cu", "data/c.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path / "mla_lab"


@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        ("mla_lab/a.py", True),
        ("mla_lab/new.py", True),
        ("kernels/b.cu", True),
        ("data/c.jsonl", False),
        ("README.md", False),
    ],
)
def test_code_is_what_counts(package: Path, name: str, dirty: bool) -> None:
    head = git(package, "rev-parse", "HEAD")
    assert Revision.here(package) == Revision(head, False)
    (package.parent / name).write_text("2\n")
    assert Revision.here(package) == Revision(head, dirty)


def test_a_bundle_names_its_commit_whatever_repository_is_around_it(package: Path) -> None:
    here = Revision("a" * 40, False)
    inside = package.parent / "out" / "mla_lab"
    inside.mkdir(parents=True)
    here.write(inside.parent)
    assert Revision.here(inside) == here


def test_without_git_a_commit_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("MLA_LAB_COMMIT", raising=False)
    (tmp_path / "mla_lab").mkdir()
    assert Revision.here(tmp_path / "mla_lab") == Revision(None, None)
    monkeypatch.setenv("MLA_LAB_COMMIT", "b" * 40)
    assert Revision.here(tmp_path / "mla_lab") == Revision("b" * 40, None)


def test_of_another_commit_git_does_not_know_what_differs(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(package, "rev-parse", "HEAD")
    (package / "a.py").write_text("2\n")
    monkeypatch.setenv("MLA_LAB_COMMIT", head)
    assert Revision.here(package) == Revision(head, True)
    monkeypatch.setenv("MLA_LAB_COMMIT", "b" * 40)
    assert Revision.here(package) == Revision("b" * 40, None)


@pytest.mark.parametrize("here", [Revision("a", True), Revision(None, None)])
def test_a_record_in_data_names_a_clean_commit(
    here: Revision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORCE, raising=False)
    monkeypatch.setattr(revision.Revision, "here", lambda: here)
    new = own_data_dir() / "records" / "nothing.jsonl"
    with pytest.raises(InvalidInput, match=r"nothing\.jsonl: got c.*supported: a clean commit"):
        Record(new)
    Record(tmp_path / "records" / "nothing.jsonl")
    monkeypatch.setenv(FORCE, "1")
    check_record(new)
    monkeypatch.delenv(FORCE)
    monkeypatch.setattr(revision.Revision, "here", lambda: Revision("a", False))
    check_record(new)
