"""Builds for real: both compilers, several processes at once, and launch paths without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_lab import jit
from mla_lab.cli import main
from mla_lab.core.resources import kernels_dir
from mla_lab.cute import registry
from mla_lab.jit import artifact, cuda_build, cute_link, host_cpu, source
from mla_lab.jit.bundle import bundle, size_of
from mla_lab.jit.cache import Cache
from mla_lab.jit.cute_build import CuteWorker
from mla_lab.jit.unpack import extract
from mla_lab.plan.config import KernelConfig

from .needs import needs_cxx, needs_nvcc

EMPTY, PLANNER = KernelConfig("cute/empty"), KernelConfig("cuda/planner")
ROOT = source.PACKAGE.parent

pytestmark = [needs_cxx, needs_nvcc]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two kernels, one by each compiler."""
    out = tmp_path_factory.mktemp("bundle") / "out"
    messages: list[str] = []
    bundle(out, [EMPTY, PLANNER], progress=messages.append)
    if not list((out / "wheels").glob("*.whl")):
        assert any("apache-tvm-ffi" in message for message in messages)
    return out


def unpack(made: Path, folder: Path) -> Path:
    """The artifacts of a bundle, as `setup.sh` lays them out."""
    with tarfile.open(made / "prebuilt.tar.xz") as archive:
        extract(archive, folder)
    return folder / "prebuilt"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that sees no compiler and none of this process's settings."""
    bare = {"PATH": "/nowhere", "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**bare, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


LAUNCH_PATH = """
import os, sys
from mla_lab import jit
from mla_lab.plan.config import KernelConfig
COMPILERS = ("nvcc", "g++", "gcc", "c++", "cc", "ninja", "ptxas", "ld", "nm")
def refuse(event, args):
    if event == "subprocess.Popen" and os.path.basename(str(args[0])) in COMPILERS:
        raise RuntimeError(f"started {args}")
sys.addaudithook(refuse)
for name in ("cute/empty", "cuda/planner"):
    kernel = jit.load(jit.compile(KernelConfig(name)))
    try:
        kernel.launch()
    except TypeError:
        pass
    else:
        raise SystemExit("a launch without arguments must be refused")
print([name for name in sys.modules if name.split(".")[0] in ("cutlass", "mla_lab")])
"""


def test_a_bundle_launches_without_dsl_or_compilers(made: Path, tmp_path: Path) -> None:
    prebuilt = unpack(made, tmp_path)
    for path in prebuilt.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    prebuilt.chmod(0o500)
    cache = tmp_path / "cache"
    done = run_python(
        LAUNCH_PATH,
        PYTHONPATH=str(made),
        MLA_LAB_PREBUILT=str(prebuilt),
        MLA_LAB_CACHE_DIR=str(cache),
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.replace("'", '"'))
    assert "mla_lab.jit.loader" in loaded
    assert not [
        name for name in loaded if name.startswith(("cutlass", "mla_lab.cute.compile_worker"))
    ]
    assert not cache.exists()


def test_a_bundle_is_small_and_says_what_made_it(made: Path, tmp_path: Path) -> None:
    assert size_of(made) < 40e6
    manifest = json.loads((unpack(made, tmp_path) / "manifest.json").read_text())
    assert manifest["kernels"] == ["cuda_planner sm_90a", "cute_empty sm_90a"]
    assert set(manifest["toolchain"]) == {"cuda", "cute"}


@pytest.fixture
def prebuilt(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle's kernels, the only ones that are there."""
    folder = unpack(made, tmp_path)
    monkeypatch.setenv("MLA_LAB_PREBUILT", str(folder))
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(made / "absent"))
    return folder


def test_kernels_for_a_higher_processor_are_not_used_and_are_told_once(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = json.loads((prebuilt / "manifest.json").read_text())["toolchain"]["cute"]["cpu"]
    assert level == host_cpu.host_cpu()
    monkeypatch.setattr(host_cpu, "host_cpu", lambda: "x86-64")
    with pytest.warns(UserWarning, match=f"{prebuilt}.* compiled for {level} and is not used"):
        assert jit.find(EMPTY, "sm_90a") is None
    assert jit.find(EMPTY, "sm_90a") is None  # a second warning would be an error
    assert jit.find(PLANNER, "sm_90a") is not None


def test_sources_that_differ_from_the_bundle_find_nothing_and_are_told_once(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jit.find(EMPTY, "sm_90a") is not None
    assert jit.find(KernelConfig("cuda/ladder"), "sm_90a") is None  # not in the bundle
    monkeypatch.setattr(source, "source_hash", lambda kernel: "other")
    with pytest.warns(UserWarning, match=f"{prebuilt}.* compiled from other sources"):
        assert jit.find(EMPTY, "sm_90a") is None
    assert jit.find(PLANNER, "sm_90a") is None  # a second warning would be an error


def test_several_processes_build_once(tmp_path: Path) -> None:
    code = (
        "from mla_lab import jit\n"
        "from mla_lab.plan.config import KernelConfig\n"
        "print('got', jit.compile(KernelConfig('cute/empty'), progress=print).functions)\n"
    )
    environment = {**os.environ, "MLA_LAB_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("MLA_LAB_PREBUILT", None)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    lines = [line for out, _ in said for line in out.splitlines()]
    assert sum(line.startswith("compiling cute_empty") for line in lines) == 1
    assert sum(line == "got ('empty',)" for line in lines) == 3
    assert not list(tmp_path.glob("tmp-*"))


def test_without_the_static_runtime_the_shared_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute_link, "STATIC_RUNTIME", "absent.a")
    worker = CuteWorker("sm_90a")
    facts = worker.build(EMPTY, tmp_path)
    worker.close()
    assert facts["needs"] == ["libcute_dsl_runtime.so"]
    built = jit.Artifact(EMPTY, "sm_90a", tmp_path, ("empty",), tuple(facts["needs"]), (), {})
    with pytest.raises(TypeError):
        jit.load(built).launch()


def test_a_killed_build_leaves_nothing_to_trust(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from mla_lab.jit.cache import Cache\n"
        "from pathlib import Path\n"
        "def make(folder):\n"
        "    (folder / 'kernel.so').write_bytes(b'half')\n"
        "    os._exit(9)\n"
        f"Cache(Path({str(tmp_path)!r})).build('entry', make)\n"
    )
    done = run_python(code, PYTHONPATH=str(ROOT))
    assert done.returncode == 9
    cache = Cache(tmp_path)
    assert cache.find("entry") is None

    def make(folder: Path) -> dict[str, object]:
        (folder / "kernel.so").write_bytes(b"whole")
        return {}

    cache.build("entry", make)
    assert cache.find("entry")


def test_the_key_covers_everything_that_decides_the_code() -> None:
    base = KernelConfig("cute/empty")
    versions = {"cutlass-dsl": "4.8.1"}
    others = {
        "kernel": "cute/other",
        "q_dtype": "fp16",
        "kv_format": "e4m3",
        "out_dtype": "fp16",
        "tile_rows": 16,
        "tile_kv": 32,
        "page_size": 16,
        "cluster": 2,
        "mask": "causal",
        "options": (("stages", 3),),
    }
    assert set(others) == set(base.as_dict())
    keys = {artifact.key(base, "sm_90a", "hash", versions)}
    keys |= {
        artifact.key(replace(base, **{name: value}), "sm_90a", "hash", versions)  # type: ignore[arg-type]
        for name, value in others.items()
    }
    keys.add(artifact.key(base, "sm_100a", "hash", versions))
    keys.add(artifact.key(base, "sm_90a", "other", versions))
    keys.add(artifact.key(base, "sm_90a", "hash", {"cutlass-dsl": "4.8.2"}))
    assert len(keys) == len(others) + 4


@pytest.mark.parametrize(
    ("kernel", "module", "name"),
    [("cute/any", registry, "OPTIONS"), ("cuda/any", cuda_build, "NINJA")],
)
def test_compiler_flags_are_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch, kernel: str, module: ModuleType, name: str
) -> None:
    def keys() -> dict[str, str]:
        configs = map(KernelConfig, ("cute/any", "cuda/any"))
        return {c.kernel: artifact.key(c, "sm_90a", "hash", {}) for c in configs}

    before = keys()
    monkeypatch.setattr(module, name, getattr(module, name).replace("-lineinfo", "-G") + " ")
    after = keys()
    assert {each for each in before if before[each] != after[each]} == {kernel}


def test_error_texts_are_no_part_of_a_kernel() -> None:
    for kernel in ("cute/keep_ab_sm90", "cute/swap_ab_sm90"):
        names = {p.relative_to(source.PACKAGE).as_posix() for p in source.source_files(kernel)}
        assert "core/dims.py" in names
        assert not names & {"core/errors.py", "core/problem.py", "plan/config.py"}
        assert "cute/registry.py" not in names
    assert all(path.is_file() for path in source.INTERFACE)


def test_imports_are_found_in_every_kind_of_block(tmp_path: Path) -> None:
    blocks = [
        "if x:\n    import a0\nelse:\n    import a1",
        "try:\n    import a2\nexcept E:\n    import a3\n"
        "else:\n    import a4\nfinally:\n    import a5",
        "for x in y:\n    import a6\nwhile x:\n    with y:\n        import a7",
        "match x:\n    case 1:\n        import a8",
        "class C:\n    async def f(self):\n        import a9",
        "from ..p import a, b",
    ]
    path = tmp_path / "module.py"
    path.write_text("\n".join(blocks))
    found = source._statements(path, None)
    assert {name for level, name, _ in found if not level} == {f"a{i}" for i in range(10)}
    assert (2, "p", ("a", "b")) in found


def test_a_changed_header_is_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(kernels_dir(), tmp_path / "kernels")
    monkeypatch.setattr(source, "kernels_dir", lambda: tmp_path / "kernels")
    names = {path.name for path in source.source_files("cuda/planner")}
    own = {"planner.cu", "planner.h", "launch.h", "plan.h", "scratch.h", "team.h"}
    assert {*own, "binding.cc", "words.h", "tensors.h"} == names
    before = {name: source.source_hash(name) for name in ("cuda/planner", "cuda/ladder")}
    header = tmp_path / "kernels" / "planner" / "planner.h"
    header.write_text(header.read_text() + "\n")
    assert source.source_hash("cuda/planner") != before["cuda/planner"]
    assert source.source_hash("cuda/ladder") == before["cuda/ladder"]


def test_a_module_that_comes_later_is_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash is kept while nothing that it looked at has changed, files that were not there too."""
    monkeypatch.setattr(source, "PACKAGE", tmp_path)
    kernel, steps = tmp_path / "cute" / "empty.py", tmp_path / "cute" / "steps.py"
    kernel.parent.mkdir()
    kernel.write_text("from .steps import first\n")
    hashes = [source.source_hash("cute/empty")]
    for path in (steps, steps.with_suffix("") / "__init__.py", steps.with_suffix("") / "first.py"):
        assert source.source_hash("cute/empty") == hashes[-1]
        path.parent.mkdir(exist_ok=True)
        path.write_text("STAGES = 3\n")
        hashes.append(source.source_hash("cute/empty"))
        assert path in source.source_files("cute/empty")
    steps.write_text("STAGES = 4\n")
    hashes.append(source.source_hash("cute/empty"))
    assert len(set(hashes)) == len(hashes)


def test_other_architectures_compile_without_their_gpu() -> None:
    """For sm_100a `test_cute_mla_sm100` compiles one."""
    for built in jit.compile_all([EMPTY, PLANNER], "sm_120a", progress=quiet):
        assert ".target sm_120a" in built.ptx.read_text()
        assert built.resources[0].stack == 0


def test_the_commands_list_compile_and_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--list"]) == 0
    assert {"cute_empty", "cuda_planner"} <= set(capsys.readouterr().out.split())
    assert main(["compile", "--kernel", "cute/empty"]) == 0
    assert "1 kernels for sm_90a" in capsys.readouterr().out
    assert main(["bundle", str(tmp_path / "out"), "--kernel", "cuda/planner"]) == 0
    assert f"source {tmp_path}/out/setup.sh" in capsys.readouterr().out
    assert main(["compile", "--arch", "sm_80"]) == 2
    assert "arch: got 'sm_80'; supported: " in capsys.readouterr().err


def test_a_tensor_is_converted_once_for_an_entry_and_for_no_other_callable() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    seen: list[Any] = []
    entry, tensor = tvm_ffi.convert(lambda *values: seen.extend(values)), torch.arange(6.0)
    made = jit.converted(entry, tensor)
    tensor[0] = 7.0
    entry(made, tensor)
    assert made is not tensor
    assert [torch.utils.dlpack.from_dlpack(value).tolist() for value in seen] == [
        tensor.tolist()
    ] * 2
    assert jit.converted(entry, 3) == 3 and jit.converted(entry, None) is None
    assert jit.converted(print, tensor) is tensor
