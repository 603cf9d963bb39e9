"""The artifact cache: private, checksummed, atomic."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest

from mla_lab.core.errors import BuildError
from mla_lab.jit import cache as caches
from mla_lab.jit.artifact import artifact
from mla_lab.jit.cache import LEFT_OVER_S, METADATA, Busy, Cache, check_private, default_root
from mla_lab.jit.failure import CompileFailure
from mla_lab.plan.config import KernelConfig

NAME = "kernel-sm_90a-0123"


def make(folder: Path) -> dict[str, object]:
    (folder / "kernel.so").write_bytes(b"code")
    (folder / "kernel.ptx").write_text("ptx")
    return {"functions": ["f"]}


def never(folder: Path) -> dict[str, object]:
    raise AssertionError(f"built again in {folder}")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    filled = Cache(tmp_path / "cache")
    filled.build(NAME, make)
    return filled


def test_an_entry_is_built_once_and_found_again(cache: Cache) -> None:
    found = cache.build(NAME, never)
    assert found == cache.find(NAME)
    assert found["functions"] == ["f"]
    assert sorted(found["files"]) == ["kernel.ptx", "kernel.so"]  # type: ignore[call-overload]


def test_only_this_user_can_read_or_write_it(cache: Cache) -> None:
    paths = [cache.root, cache.root / NAME, *(cache.root / NAME).iterdir()]
    assert {path: oct(path.stat().st_mode & 0o077) for path in paths} == dict.fromkeys(paths, "0o0")


def test_finding_writes_nothing(cache: Cache) -> None:
    before = sorted(p for p in cache.root.rglob("*"))
    assert cache.find(NAME)
    assert cache.find("absent") is None
    assert sorted(p for p in cache.root.rglob("*")) == before


@pytest.mark.parametrize("file", ["kernel.so", "kernel.ptx"])
def test_a_changed_file_is_damage_and_is_built_again(cache: Cache, file: str) -> None:
    (cache.root / NAME / file).write_bytes(b"other")
    assert cache.find(NAME) is None
    cache.build(NAME, make)
    assert cache.find(NAME)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"files": {}}', '{"files": {"gone": "00"}}', '{"files": 3}']
)
def test_damaged_metadata_is_built_again(cache: Cache, text: str) -> None:
    (cache.root / NAME / METADATA).write_text(text)
    assert cache.find(NAME) is None
    cache.build(NAME, make)
    assert cache.find(NAME)


def test_a_missing_file_or_metadata_is_built_again(cache: Cache) -> None:
    for file in ("kernel.so", METADATA):
        (cache.root / NAME / file).unlink()
        assert cache.find(NAME) is None
        cache.build(NAME, make)
        assert cache.find(NAME)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def fail(folder: Path) -> dict[str, object]:
        (folder / "kernel.so").write_bytes(b"half")
        raise BuildError("no")

    with pytest.raises(BuildError, match="no"):
        cache.build(NAME, fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "log"]


@pytest.mark.parametrize("which", ["", NAME, f"{NAME}/kernel.so", f"{NAME}/{METADATA}"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_may_write_is_refused(cache: Cache, which: str, mode: int) -> None:
    (cache.root / which).chmod(mode)
    with pytest.raises(BuildError, match=r"others may write .*; supported: .*chmod"):
        cache.find(NAME)


def test_what_another_user_owns_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 4242
    if os.getuid() == 0:
        os.chown(cache.root / NAME / "kernel.so", other, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(BuildError, match=r"belongs to user id .*MLA_LAB_CACHE_DIR"):
        cache.find(NAME)


def test_a_link_in_place_of_a_file_is_refused(cache: Cache, tmp_path: Path) -> None:
    library = cache.root / NAME / "kernel.so"
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(BuildError, match="private files"):
        cache.find(NAME)


def test_an_own_link_to_the_cache_works(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache.root)
    linked = Cache(tmp_path / "link")
    assert linked.find(NAME) == cache.find(NAME)
    linked.build("another", make)
    assert cache.find("another")
    cache.root.chmod(0o770)
    with pytest.raises(BuildError, match="others may write"):
        linked.find(NAME)


def test_another_user_s_link_to_the_cache_is_refused(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(cache.root)
    if os.getuid() == 0:
        os.lchown(link, 4242, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(BuildError, match=r"is a link of user id .*; supported: .* your own"):
        Cache(link).find(NAME)


def test_what_killed_builds_left_is_swept(cache: Cache) -> None:
    for name, age in (("tmp-old", 2 * LEFT_OVER_S), ("tmp-new", 0.0)):
        (cache.root / name).mkdir()
        (cache.root / name / "kernel.so").write_bytes(b"half")
        then = (cache.root / name).stat().st_mtime - age
        os.utime(cache.root / name, (then, then))
    cache.build("another", make)
    assert [p.name for p in cache.root.glob("tmp-*")] == ["tmp-new"]


def test_metadata_too_deep_or_too_long_is_damage(cache: Cache) -> None:
    for text in ("[" * 100_000, " " * (2 << 20)):
        (cache.root / NAME / METADATA).write_text(text)
        assert cache.find(NAME) is None


@pytest.mark.parametrize(
    "change", [{"functions": None}, {"resources": [3]}, {"resources": [{"x": 1}]}, {"needs": 1}]
)
def test_metadata_of_another_form_is_one_sentence(cache: Cache, change: dict[str, object]) -> None:
    whole: dict[str, object] = {"functions": ["f"], "needs": [], "resources": [], "toolchain": {}}
    config = KernelConfig("cute/empty")
    assert artifact(cache.root, config, "sm_90a", whole).functions == ("f",)
    with pytest.raises(BuildError, match=r"delete .*, and it is built again"):
        artifact(cache.root, config, "sm_90a", whole | change)


def test_a_failed_compilation_travels_between_processes() -> None:
    failure = pickle.loads(pickle.dumps(CompileFailure("it did not compile", "line 1: error")))
    assert (str(failure), failure.log) == ("it did not compile", "line 1: error")


def test_an_entry_that_goes_while_it_is_read_is_absent(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # another process has found it damaged, and replaces it
    def check(path: Path) -> None:
        if path == cache.root / NAME:
            shutil.rmtree(path)
        check_private(path)

    monkeypatch.setattr(caches, "check_private", check)
    assert cache.find(NAME) is None


def test_an_unwritable_cache_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"not writable.*MLA_LAB_CACHE_DIR"):
        Cache(tmp_path / "file" / "cache").build(NAME, make)


def test_the_environment_names_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_LAB_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_root() == Path("/somewhere/mla-lab")
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", "/mine")
    assert default_root() == Path("/mine")
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", "~/mine")
    assert default_root() == Path.home() / "mine"


def test_one_builder_at_a_time_and_the_others_wait(tmp_path: Path) -> None:
    cache, begun, go, builds = Cache(tmp_path), threading.Event(), threading.Event(), []

    def slow(folder: Path) -> dict[str, object]:
        builds.append(folder)
        begun.set()
        go.wait(10)
        return make(folder)

    first = threading.Thread(target=cache.build, args=(NAME, slow))
    first.start()
    begun.wait(10)
    with pytest.raises(Busy):
        cache.build(NAME, never)
    waited: list[str] = []

    def waiting() -> None:
        waited.append(NAME)
        go.set()

    second = threading.Thread(target=cache.build, args=(NAME, never, waiting))
    second.start()
    first.join(10)
    second.join(10)
    assert len(builds) == len(waited) == 1
    assert json.loads((tmp_path / NAME / METADATA).read_text())["functions"] == ["f"]
