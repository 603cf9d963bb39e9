"""Bad input to the toolchain: one sentence with the way out, before anything is built."""

from __future__ import annotations

import ast
import stat
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mla_lab import jit
from mla_lab.core.errors import BuildError, InvalidInput, MlaLabError, Unsupported
from mla_lab.jit import (
    build,
    bundle,
    cuda_build,
    cute_build,
    loader,
    options,
    shipped,
    source,
    toolchain,
)
from mla_lab.jit.arch import arch_of
from mla_lab.plan.config import KernelConfig

EMPTY, PLANNER = KernelConfig("cute/empty"), KernelConfig("cuda/planner")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with an empty PATH, no CUDA, no NVIDIA wheels and an empty cache."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "MLA_LAB_PREBUILT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "nvidia_file", lambda relative: None)
    toolchain._output.cache_clear()
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def program(folder: Path, name: str, says: str, status: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def sentence(error: pytest.ExceptionInfo[MlaLabError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_no_nvcc(bare: Path) -> None:
    with pytest.raises(BuildError) as error:
        jit.compile(PLANNER)
    text = sentence(error)
    assert text.startswith("nvcc: not found")
    assert "nvidia-cuda-nvcc" in text
    assert "bundle" in text


def test_nvcc_is_found_on_path_in_cuda_home_and_as_a_wheel(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "wheel" / "nvcc"
    home = tmp_path / "home" / "bin"
    for folder in (wheel.parent, home):
        folder.mkdir(parents=True)
        program(folder, "nvcc", "")
    monkeypatch.setattr(
        toolchain, "nvidia_file", lambda relative: wheel if relative == "cu*/bin/nvcc" else None
    )
    assert toolchain.find_nvcc() == wheel
    monkeypatch.setenv("CUDA_HOME", str(home.parent))
    assert toolchain.find_nvcc() == home / "nvcc"
    program(bare, "nvcc", "")
    assert toolchain.find_nvcc() == bare / "nvcc"


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("Cuda compilation tools, release 11.8, V11.8.89", "got CUDA 11.8"),
        ("Cuda compilation tools, release 99.0, V99.0.1", "got CUDA 99.0"),
        ("hello", "does not state its release"),
    ],
)
def test_wrong_cuda(bare: Path, says: str, expected: str) -> None:
    program(bare, "nvcc", says)
    with pytest.raises(BuildError) as error:
        jit.compile(PLANNER)
    assert expected in sentence(error)
    assert "13.0" in str(error.value)


def test_no_host_compiler(bare: Path) -> None:
    for config in (EMPTY, PLANNER):
        program(bare, "nvcc", "release 13.0,")
        with pytest.raises(BuildError) as error:
            jit.compile(config)
        assert sentence(error).startswith("g++: not found")
        assert "CXX" in str(error.value)


def test_no_dsl(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_version", lambda name: None)
    with pytest.raises(BuildError) as error:
        jit.compile(EMPTY)
    assert "mla-lab[compile]" in sentence(error)
    assert "bundle" in str(error.value)


@pytest.mark.parametrize("config", [EMPTY, PLANNER])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "hopper", ""])
def test_unknown_architecture(config: KernelConfig, arch: str) -> None:
    with pytest.raises(Unsupported) as error:
        jit.compile(config, arch)
    assert sentence(error).startswith(f"arch: got {arch!r}")
    assert "sm_90a" in str(error.value)


def test_an_architecture_that_the_kernel_is_not_written_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "cuda_kernels", lambda: ("cuda/planner",))
    monkeypatch.setattr("mla_lab.jit.build.source.supported_archs", lambda kernel: ("sm_90a",))
    with pytest.raises(Unsupported, match=r"'sm_120a' for cuda/planner; supported: .*sm_90a"):
        jit.compile(PLANNER, "sm_120a")


@pytest.mark.parametrize("kernel", ["cuda/nothing", "cute/nothing", "nothing"])
def test_unknown_kernel(kernel: str) -> None:
    with pytest.raises(InvalidInput) as error:
        jit.compile(KernelConfig(kernel))
    assert sentence(error).startswith(f"kernel: got {kernel!r}")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 1), (12, 1)])
def test_another_gpu(capability: tuple[int, int]) -> None:
    with pytest.raises(Unsupported) as error:
        arch_of(capability)
    assert f"compute capability {capability[0]}.{capability[1]}" in sentence(error)
    assert "9.0" in str(error.value)


def test_known_gpus() -> None:
    known = {(8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
    assert {c: arch_of(c) for c in known} == known


def test_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, words in ((None, "CPU-only torch"), ("13.0", "no usable CUDA driver")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(Unsupported) as error:
            jit.device_arch()
        assert words in sentence(error)


def test_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError) as error:
        jit.compile(PLANNER, progress=lambda _: None)
    assert "not writable" in sentence(error)
    assert "MLA_LAB_CACHE_DIR" in str(error.value)


def test_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / "broken"
    folder.mkdir(parents=True)
    (folder / "broken.cu").write_text("int f() { return missing; }\n")
    (folder / "binding.cc").write_text("int g() { return 0; }\n")
    for module in (source, cuda_build):
        monkeypatch.setattr(module, "kernels_dir", lambda: tmp_path / "kernels")
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(BuildError) as error:
        jit.compile(KernelConfig("cuda/broken"), progress=lambda _: None)
    text = sentence(error)
    assert 'identifier "missing" is undefined' in text
    log = Path(text.split("said: ")[1].rstrip(")"))
    assert "missing" in log.read_text()


def test_a_kernel_that_the_dsl_refuses(tmp_path: Path) -> None:
    worker = cute_build.CuteWorker("sm_90a")
    try:
        with pytest.raises(BuildError, match="cute_nothing for sm_90a is refused before it") as e:
            worker.build(KernelConfig("cute/nothing"), tmp_path)
    finally:
        worker.close()
    sentence(e)


def test_a_compiling_process_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "python", "", status=3)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BuildError, match="the compiling process ended with status 3"):
        cute_build.CuteWorker("sm_90a").build(EMPTY, tmp_path)


class Slow:
    """Stands in for what builds: each kernel takes a moment, and is noted."""

    made: ClassVar[list[KernelConfig]] = []

    def __init__(self, arch: str, progress: Any) -> None:
        self.made.clear()

    def build(self, config: KernelConfig, wait: bool) -> KernelConfig:
        time.sleep(0.05)
        self.made.append(config)
        return config

    def close(self) -> None:
        """Nothing is open."""


MANY = [KernelConfig("cute/swap_ab_sm90", page_size=16 * n) for n in range(1, 41)]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    monkeypatch.setattr(build, "_Builder", Slow)
    monkeypatch.setattr(build, "find", lambda config, arch: None)
    return Slow


def test_an_error_of_who_counts_is_raised(slow: type[Slow]) -> None:
    def broken(done: int, total: int) -> None:
        if done:
            raise BrokenPipeError("the reader is gone")

    with pytest.raises(BrokenPipeError):
        build.compile_all(MANY[:3], workers=1, built=broken)
    assert slow.made == MANY[:3]


def test_an_interrupt_begins_no_further_kernel(
    slow: type[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        threads.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build.compile_all(MANY, workers=1)
    threads[0].join()
    assert len(slow.made) < 10


def test_kernels_by_several_toolchains_are_not_put_into_one_bundle(tmp_path: Path) -> None:
    versions = {"cutlass-dsl": "4.8.1"}
    one = jit.Artifact(EMPTY, "sm_90a", tmp_path, ("empty",), (), (), versions)
    other = replace(one, toolchain={"cutlass-dsl": "4.9.0"})
    cuda = replace(one, config=PLANNER, toolchain={"nvcc": "13.0"})
    assert '"nvcc": "13.0"' in bundle.manifest([one, cuda, one])
    with pytest.raises(BuildError, match=r"cute_empty was compiled by .*4\.9\.0.*4\.8\.1.*unset"):
        bundle.manifest([one, cuda, other])


def test_a_prebuilt_folder_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_LAB_PREBUILT", "~/one:/two")
    roots = [cache.root for cache in build.prebuilt_caches("sm_90a")]
    assert roots[:2] == [Path.home() / "one", Path("/two")]


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_bytes(b"no ELF")
    broken = jit.Artifact(EMPTY, "sm_90a", tmp_path, ("empty",), (), (), {})
    with pytest.raises(BuildError, match=r"could not be loaded .*; delete .* to have it compiled"):
        loader.load(broken)


def test_a_runtime_library_that_is_not_there(tmp_path: Path) -> None:
    needy = jit.Artifact(EMPTY, "sm_90a", tmp_path, ("empty",), ("libnowhere.so",), (), {})
    with pytest.raises(BuildError, match=r"libnowhere.so: not found on LD_LIBRARY_PATH"):
        loader.load(needy)


@pytest.mark.parametrize("setting", ["mask", "tile_rows=many", "stages=two", "=3"])
def test_settings_of_the_command_line(setting: str) -> None:
    with pytest.raises(InvalidInput, match="--set: got"):
        shipped.select(["cute/empty"], [setting])


def test_settings_make_a_configuration() -> None:
    chosen = shipped.select(["cute/keep_ab_sm90"], ["mask=causal", "tile_rows=16", "stages=3"])
    assert chosen == [
        KernelConfig("cute/keep_ab_sm90", mask="causal", tile_rows=16, options=(("stages", 3),))
    ]
    assert shipped.select(["cute/empty"], []) == [EMPTY]
    assert {"cuda/planner", "cuda/xqa"} <= {c.kernel for c in shipped.select(None, [])}


@pytest.mark.parametrize(
    ("kernel", "setting", "known"),
    [
        ("cute/keep_ab_sm90", "stage=2", "stages"),
        ("cute/swap_ab_sm90", "stages=3", "pair, pdl"),
        ("cute/mla_sm100", "skip=1", "features, pdl, scales, shaped"),
        ("cute/empty", "stages=3", "no option"),
        ("cuda/xqa", "stage=3", "row_tiles, shared_kb"),
        ("cuda/planner", "stages=3", "no option"),
    ],
)
def test_an_option_that_a_kernel_does_not_read_is_refused(
    kernel: str, setting: str, known: str
) -> None:
    name, value = setting.split("=")
    with pytest.raises(InvalidInput, match=f"got {name} of {kernel}.*{known}"):
        shipped.select([kernel], [setting])
    config = KernelConfig(kernel, options=((name, int(value)),))
    with pytest.raises(InvalidInput, match=f"got {name} of {kernel}"):
        jit.find(config, "sm_100a" if kernel == "cute/mla_sm100" else "sm_90a")


def literals(path: Path) -> tuple[set[str], set[str]]:
    """Names that a kernel's source reads as `option("name")`, and every string in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    read = {
        node.args[0].value
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "option"
        and isinstance(node.args[0], ast.Constant)
    }
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {str(name) for name in read}, {text for text in strings if isinstance(text, str)}


@pytest.mark.parametrize("kernel", options.CUTE)
def test_the_options_of_a_kernel_are_those_that_its_source_reads(kernel: str) -> None:
    own = (f"mla_lab/{kernel}/", f"mla_lab/{kernel}.py")
    files = source.source_files(kernel)
    found = [literals(path) for path in files if any(name in path.as_posix() for name in own)]
    known = set(options.known_options(kernel))
    assert set().union(*(read for read, _ in found)) <= known
    assert known <= set().union(*(strings for _, strings in found))
