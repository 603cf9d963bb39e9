"""A bundle on its host: what is unpacked where, what is refused, and a call from it alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from conftest import has_hopper
from mla_lab.core.errors import BuildError, InvalidInput
from mla_lab.core.revision import Revision
from mla_lab.jit import bundle as bundles
from mla_lab.jit.bundle import bundle
from mla_lab.jit.cache import LEFT_OVER_S
from mla_lab.jit.unpack import UNUSED_S, extract, unpack
from mla_lab.plan.config import KernelConfig

OTHER_USER = 4242

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without kernels and wheels: it needs neither compilers nor a registry."""
    out = tmp_path_factory.mktemp("bundle") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "_download_wheels", lambda folder, *_: folder.mkdir(exist_ok=True))
        bundle(out, [])
    return out


def source_setup(made: Path, after: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Source `setup.sh` in a bare shell whose python3 is this one, then run `after` regardless."""
    bin_folder = Path(environment["HOME"]) / "bin"
    bin_folder.mkdir(exist_ok=True)
    program = bin_folder / "python3"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", f"umask 000; source {made}/setup.sh; echo status $?; {after}"],
        env={"PATH": f"{bin_folder}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment},
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_setup_unpacks_into_a_private_place_of_this_user(made: Path, tmp_path: Path) -> None:
    tell = "stat -c %a $MLA_LAB_PREBUILT; echo $MLA_LAB_PREBUILT $PYTHONPATH"
    done = source_setup(made, tell, HOME=str(tmp_path))
    status, mode, places = done.stdout.splitlines()
    assert status == "status 0", done.stderr
    assert int(mode, 8) & 0o077 == 0
    prebuilt, path = places.split()
    assert Path(prebuilt).is_relative_to(tmp_path / ".cache" / "mla-lab")
    assert path.split(":")[0] == str(made)


def test_unpacking_needs_the_standard_library_alone(made: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(made / "unpack.py")],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()).parent == tmp_path / ".cache/mla-lab/bundles", done.stderr


def test_setup_refuses_before_anything_is_exported(made: Path, tmp_path: Path) -> None:
    home = tmp_path / "theirs"
    home.mkdir()
    home.chmod(0o777)
    tell = "echo ${MLA_LAB_PREBUILT-none} ${PYTHONPATH-none} ${MLA_LAB_COMMIT-none}"
    done = source_setup(made, tell, HOME=str(tmp_path), MLA_LAB_BUNDLE_HOME=str(home))
    assert done.stdout.split("\n")[:2] == ["status 1", "none none none"]
    assert "others may write" in done.stderr
    assert list(home.iterdir()) == []


CALL = """
import mla_lab, torch
from mla_lab.api.decode import prepare
from mla_lab.call.decode_args import DecodeArgs
from mla_lab import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, sdpa_error
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = make_inputs(Problem.uniform(2, 1, 200, 16), 0, device=device)
named = inputs.contract_args()
out = call(**named)
reference = decode_reference(inputs)
assert error(out, reference.out).within(sdpa_error(inputs, reference)), "wrong"
print(mla_lab.__file__, prepare(DecodeArgs(**named))[1].name)
"""


def test_a_call_runs_from_the_bundle_alone(made: Path, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(CALL)
    done = source_setup(made, "python3 call.py", HOME=str(tmp_path))
    assert not done.stderr.replace("mla-lab: no apache-tvm-ffi", "").strip() or done.stdout
    status, found = done.stdout.splitlines()[0], done.stdout.splitlines()[-1].split()
    assert status == "status 0", done.stderr
    assert Path(found[0]).is_relative_to(made), done.stderr
    assert found[1] == ("cute" if has_hopper() else "torch")


@pytest.mark.parametrize("dirty", [False, True, None])
def test_metadata_and_setup_name_the_clean_commit(
    dirty: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = Revision("0123abc", dirty)
    monkeypatch.setattr(Revision, "here", lambda: revision)
    out = tmp_path / "out"
    out.mkdir()
    bundles._describe(out, "sm_90a", 3, "3.12")
    facts = json.loads((out / "metadata.json").read_text())
    assert facts["commit"] == "0123abc" and facts["dirty"] == dirty
    assert (facts["kernels"], facts["archs"], facts["python"]) == (3, ["sm_90a"], "3.12")
    assert json.loads((out / "revision.json").read_text())["commit"] == "0123abc"
    exports = "export MLA_LAB_COMMIT=0123abc" in (out / "setup.sh").read_text()
    assert exports == (not dirty)


def test_it_is_unpacked_once_and_again_when_it_changed(made: Path, tmp_path: Path) -> None:
    first = unpack(made, tmp_path / "home")
    (first / "mark").write_text("")
    (first / "mark").chmod(0o600)
    assert unpack(made, tmp_path / "home") == first
    assert (first / "mark").exists()
    other = tmp_path / "other"
    (other / "wheels").mkdir(parents=True)
    (other / "empty").mkdir()
    with tarfile.open(other / "prebuilt.tar.xz", "w:xz") as archive:
        archive.add(other / "empty", "prebuilt")
    assert unpack(other, tmp_path / "home") != first


def test_its_home_may_begin_with_a_tilde(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLA_LAB_BUNDLE_HOME", "~/home")
    monkeypatch.chdir(tmp_path)
    assert unpack(made).parent == tmp_path / "home"


def test_what_was_left_over_is_swept(made: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name, age in (
        ("tmp-old", 2 * LEFT_OVER_S),
        ("tmp-new", 0.0),
        ("bundle-old", 2 * UNUSED_S),
        ("bundle-new", UNUSED_S / 2),
    ):
        (tmp_path / name).mkdir()
        then = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (then, then))
    place = unpack(made, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"tmp-new", "bundle-new", place.name}


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("inside", [False, True])
def test_a_place_that_others_may_write_is_refused(
    made: Path, tmp_path: Path, mode: int, inside: bool
) -> None:
    place = unpack(made, tmp_path / "home")
    (place / "site" if inside else tmp_path / "home").chmod(mode)
    with pytest.raises(BuildError, match="others may write"):
        unpack(made, tmp_path / "home")


@as_root
@pytest.mark.parametrize("which", ["home", "place", "file", "link"])
def test_a_place_that_somebody_else_prepared_is_refused(
    made: Path, tmp_path: Path, which: str
) -> None:
    home = tmp_path / "home"
    place = unpack(made, home)
    (place / "site" / "tvm_ffi.py").write_text("raise SystemExit('their code')")
    (place / "site" / "tvm_ffi.py").chmod(0o600)
    if which == "link":
        home.rename(tmp_path / "real")
        home.symlink_to(tmp_path / "real")
        os.lchown(home, OTHER_USER, -1)
    else:
        target = {"home": home, "place": place, "file": place / "site" / "tvm_ffi.py"}[which]
        os.chown(target, OTHER_USER, -1)
    with pytest.raises(BuildError, match=f"user id {OTHER_USER}"):
        unpack(made, home)


def test_an_own_link_to_a_private_folder_works(made: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "real")
    assert unpack(made, tmp_path / "home").parent == tmp_path / "real"


def test_a_torn_bundle_is_one_sentence(made: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    (torn / "wheels").mkdir(parents=True)
    with pytest.raises(BuildError, match=r"prebuilt.tar.xz: No such file"):
        unpack(torn, tmp_path / "home")
    (torn / "prebuilt.tar.xz").write_bytes((made / "prebuilt.tar.xz").read_bytes()[:40])
    with pytest.raises(BuildError, match="not unpacked in"):
        unpack(torn, tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InvalidInput, match=r"out: got .* which holds other files"):
        bundle(tmp_path, [KernelConfig("cute/empty")])


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python's tarfile has the filter")
def test_a_python_without_the_data_filter_unpacks_what_lies_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12 has 3.11.2; `tarfile.data_filter` came with 3.11.4."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "kernel").write_text("code")

    def packed(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarFile:
        with tarfile.open(tmp_path / "archive", "w:xz") as made:
            member = made.gettarinfo(tmp_path / "kernel")
            member.name = name
            member.type, member.linkname = kind, "/" if kind == tarfile.SYMTYPE else ""
            with (tmp_path / "kernel").open("rb") as file:
                made.addfile(member, file if kind == tarfile.REGTYPE else None)
        return tarfile.open(tmp_path / "archive", "r:xz")

    with packed("prebuilt/kernel") as archive:
        extract(archive, tmp_path / "to")
    assert (tmp_path / "to" / "prebuilt" / "kernel").read_text() == "code"
    for name, kind in (
        ("../kernel", tarfile.REGTYPE),
        ("/kernel", tarfile.REGTYPE),
        ("kernel", tarfile.SYMTYPE),
    ):
        with packed(name, kind) as archive, pytest.raises(tarfile.TarError, match="kernel"):
            extract(archive, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
