"""Wheels and the source distribution in an empty environment, run from elsewhere."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import mla_lab
from mla_lab.core.errors import BuildError
from mla_lab.jit.build import kernels_package
from mla_lab.jit.wheel import kernels_wheel
from mla_lab.plan.config import KernelConfig

from .house import ROOT, tracked_files

KERNELS = kernels_package("sm_90a")

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


@pytest.fixture(scope="module")
def with_kernels(installed, tmp_path_factory) -> Path:
    """The environment with a wheel of two kernels, one by each compiler."""
    if shutil.which("g++") is None or shutil.which("nvcc") is None:
        pytest.skip("needs a C++ compiler and nvcc")
    folder = tmp_path_factory.mktemp("kernels")
    configs = [KernelConfig("cute/empty"), KernelConfig("cuda/planner")]
    built = kernels_wheel(folder, configs)
    assert built.name.startswith(f"mla_lab_kernels_sm90-{mla_lab.__version__}-py3-none-manylinux")
    python = installed / "bin" / "python"
    # group-writable, as many systems have new files: pip's own modes are no reason to refuse
    before = os.umask(0o002)
    try:
        pip("--python", str(python), "install", "--no-deps", "--no-index", str(built))
    finally:
        os.umask(before)
    return installed


LAUNCH = """
import json, os, sys
from mla_lab import jit
from mla_lab.plan.config import KernelConfig
sys.modules["cutlass"] = None
folders = []
for name in ("cute/empty", "cuda/planner"):
    found = jit.find(KernelConfig(name), "sm_90a")
    try:
        jit.load(found).launch()
    except TypeError:
        folders.append(str(found.folder))
print(json.dumps(folders))
"""


def test_a_wheel_of_kernels_launches_without_dsl_and_compilers(with_kernels, tmp_path):
    done = subprocess.run(
        [str(with_kernels / "bin" / "python"), "-c", LAUNCH],
        cwd=tmp_path,
        env={"PATH": "/nowhere", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folders = [Path(folder) for folder in json.loads(done.stdout)]
    assert len(folders) == 2, "each refuses a launch without arguments"
    assert all(f.is_relative_to(with_kernels) and f.parts[-3] == KERNELS for f in folders)
    assert not (tmp_path / ".cache").exists()


def test_the_x_ray_says_what_a_wheel_of_kernels_lacks(with_kernels, tmp_path):
    done = subprocess.run(
        [str(with_kernels / "bin" / "mla-lab"), "xray", "--kernel", "cute/empty"],
        env={"PATH": "/nowhere", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("mla-lab xray: xray: ") and "has no PTX" in done.stderr


def test_an_empty_wheel_is_refused(tmp_path):
    with pytest.raises(BuildError, match="got no kernel"):
        kernels_wheel(tmp_path, [])


def test_the_source_distribution_makes_the_same_wheel(wheel, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (source,) = tmp_path.glob("mla_lab-*.tar.gz")
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    pip("wheel", *offline, "--wheel-dir", str(tmp_path), str(source))
    (built,) = tmp_path.glob("mla_lab-*.whl")
    assert zipfile.ZipFile(built).namelist() == zipfile.ZipFile(wheel).namelist()


def test_metadata_names_the_pythons_and_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(name))
    classifiers = fields.get_all("Classifier", [])
    for minor in (11, 12, 13, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    required = fields.get_all("Requires-Dist", [])
    assert {r.split(">")[0] for r in required if "extra" not in r} == {"numpy", "rich", "torch"}
    assert not [r for r in required if "nbmake" in r and "lab" in r.split("extra")[1]]
    extras = {"browser", "compile", "dev", "lab", "ray", "sglang", "vllm"}
    assert set(fields.get_all("Provides-Extra", [])) == extras


#: bytes of the wheel, and of the data in it unpacked
MOST_BYTES, MOST_DATA = 3_000_000, 4_720_000


def test_wheel_carries_kernels_and_what_notebooks_show(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    for folder, inside in (("kernels", "_kernels"), ("data/runtime", "_data/runtime")):
        files = [
            p.relative_to(ROOT / folder) for p in tracked_files() if ROOT / folder in p.parents
        ]
        assert files
        assert {f"mla_lab/{inside}/{f.as_posix()}" for f in files} <= set(sizes)
    assert "mla_lab/py.typed" in sizes
    assert not [n for n in sizes if n.startswith(("tests/", "notebooks/", "mla_lab/studies/"))]
    assert wheel.stat().st_size <= MOST_BYTES
    data = sum(size for name, size in sizes.items() if name.startswith("mla_lab/_data/"))
    assert data <= MOST_DATA


def test_records_that_notebooks_show_are_in_the_wheel(wheel):
    """Every data file that the modules behind notebooks name; `documents` fills pages of a
    checkout, and records of sweeps are what constants in `runtime` came from.
    """
    lab = [p for p in (ROOT / "mla_lab/lab").rglob("*.py") if p.stem != "documents"]
    behind = [*lab, *(ROOT / "mla_lab/simulate").glob("[!f]*.py"), ROOT / "mla_lab/bench/ladder.py"]
    texts = [p.read_text() for p in [*behind, *(ROOT / "notebooks").glob("*.ipynb")]]
    named = {n for t in texts for n in re.findall(r"(?:records|runtime|notes)/\w+\.jsonl?\b", t)}
    assert len(named) >= 6
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in named if f"mla_lab/_data/{n}" not in inside} == set()


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


def test_recorded_figures_are_found(installed):
    code = (
        "from mla_lab.bench import ladder; from mla_lab.bench.report import headline;"
        "from mla_lab.verify.target_figures import ANCHOR, rows_of;"
        "from mla_lab.simulate.anatomy import read; assert all(read()) and ladder.recorded();"
        "print(headline(rows_of(ANCHOR)))"
    )
    assert run(installed, "python", "-c", code).startswith("mla-lab")
