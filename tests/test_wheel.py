"""The wheel alone, in an empty environment, run from elsewhere: nothing leans on the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from .house import ROOT, tracked_files

pytestmark = pytest.mark.slow


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    pip("wheel", *offline, "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("mla_lab-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; torch and NumPy are lent by the one that tests."""
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # a path line adds that folder alone: the checkout's own editable hook in it stays asleep
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def run(installed: Path, *command: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd=installed.parent,
        env=clean | {"MLA_LAB_CACHE_DIR": str(installed.parent / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_carries_kernels_and_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("kernels", "_kernels"), ("data", "_data")):
        files = [
            p.relative_to(ROOT / folder) for p in tracked_files() if ROOT / folder in p.parents
        ]
        assert files
        assert {f"mla_lab/{inside}/{f.as_posix()}" for f in files} <= names
    assert "mla_lab/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "notebooks/"))]


def test_installed_package_stands_alone(installed):
    code = (
        "import mla_lab, mla_lab.core.resources as r;"
        "print(mla_lab.__file__, r.kernels_dir(), r.data_dir(), sep='\\n')"
    )
    for path in run(installed, "python", "-c", code).splitlines():
        assert Path(path).is_relative_to(installed)
        assert Path(path).exists()


def test_doctor(installed):
    found = {f["name"]: f for f in json.loads(run(installed, "mla-lab", "doctor", "--json"))}
    assert found["torch"]["there"]
    assert Path(found["kernels"]["detail"]).is_relative_to(installed)
    assert found["backend torch"]["there"]


def test_decode(installed):
    shape = ["--batch", "2", "--kv-len", "200", "--heads", "16", "--json"]
    result = json.loads(run(installed, "mla-lab", "decode", *shape))
    assert result["error"]["good"]
    assert 0 < result["error"]["relative"] < 0.01
