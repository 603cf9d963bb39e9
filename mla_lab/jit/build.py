"""`compile`: from a `KernelConfig` to an `Artifact`, out of the cache where it is there.

Needs no tensor and no GPU. Prebuilt folders ($MLA_LAB_PREBUILT, separated by ":", and an installed
`mla-lab-kernels-sm90`) come first: they carry the versions of the toolchain that filled them, so
that a host without a toolchain finds what was compiled from the same sources. A folder whose kernel
was compiled from other sources is named in a warning, once a process: without its kernels a call is
compiled anew, or served by a slower backend.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache as cached
from pathlib import Path
from typing import Any

from ..core.errors import BuildError, InvalidInput, unsupported
from ..core.files import MIB, read_json
from ..cute import registry
from ..plan.config import KernelConfig
from . import artifact as artifacts
from . import cuda_build, source, toolchain
from .arch import check_arch
from .artifact import Artifact
from .cache import Busy, Cache
from .cubin import read_resources
from .cute_build import CuteWorker
from .failure import CompileFailure
from .host_cpu import host_cpu, runs_here
from .options import check_options

#: in the root of a prebuilt folder: {"toolchain": {"cute": {...}, "cuda": {...}}}
MANIFEST = "manifest.json"

#: gets a line for each kernel whose compilation starts
Progress = Callable[[str], None]
#: gets how many of how many kernels are there, at the start and after each one that was compiled
Built = Callable[[int, int], None]


def no_count(done: int, total: int) -> None:
    """The `Built` of callers that show no progress."""


def kernels_package(arch: str) -> str:
    """Name of the package that carries builds for an architecture: mla_lab_kernels_sm90."""
    return f"mla_lab_kernels_{arch.replace('_', '').rstrip('a')}"


def prebuilt_caches(arch: str) -> list[Cache]:
    """Folders named in $MLA_LAB_PREBUILT, then the installed package of kernels for `arch`."""
    paths = os.environ.get("MLA_LAB_PREBUILT", "").split(os.pathsep)
    named = [Cache(Path(p).expanduser()) for p in paths if p]
    installed = toolchain.package_dir(kernels_package(arch))
    return [*named, Cache(installed / "prebuilt", installed=True)] if installed else named


def find(config: KernelConfig, arch: str, cache: Cache | None = None) -> Artifact | None:
    """The artifact that was compiled from these sources, or None; compiles nothing."""
    check_buildable(config, arch)
    config = canonical(config)
    hashed = source.source_hash(config.kernel)
    for prebuilt in prebuilt_caches(arch):
        versions = manifest_versions(prebuilt, config.kernel)
        level = versions.get("cpu") if versions else None
        if level and not runs_here(level):
            _warn_of_other_cpu(prebuilt.root, level)
            continue
        found = _look(prebuilt, config, arch, hashed, versions) if versions else None
        if found:
            return found
        if versions and f"{config.name()} {arch}" in _listed(prebuilt):
            _warn_of_other_sources(prebuilt.root)
    try:
        versions = toolchain.versions(config.kernel)
    except BuildError:
        return None
    return _look(cache or Cache(), config, arch, hashed, versions)


def compile(
    config: KernelConfig, arch: str = "sm_90a", *, progress: Progress | None = None
) -> Artifact:
    """The artifact of one kernel for one architecture, compiled if it is not there.

    Raises `BuildError` (no compiler, wrong release, unwritable cache, compile error),
    `Unsupported` (unknown architecture, or one the kernel is not written for) and `InvalidInput`
    (an option that the kernel does not read).
    """
    return compile_all([config], arch, progress=progress)[0]


def compile_all(
    configs: Iterable[KernelConfig],
    arch: str = "sm_90a",
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    built: Built = no_count,
) -> list[Artifact]:
    """`compile` for many, with `workers` compiling processes (default: at most two).

    After a kernel that does not compile the others are compiled all the same; the first such
    error is raised at the end, and so is one of `built`, which is called from the compiling
    threads, one at a time. After an interrupt no further kernel is begun.
    """
    wanted = [canonical(config) for config in configs]
    ready = {config: find(config, arch) for config in wanted}
    todo = queue.SimpleQueue[_Job]()
    for config in [c for c, found in ready.items() if found is None]:
        todo.put(_Job(config))
    failures: list[Exception] = []
    count = _Count(len(ready), todo.qsize(), built)
    stopped = threading.Event()

    def work() -> None:
        builder = _Builder(arch, progress or _say_on_stderr)
        with contextlib.closing(builder), contextlib.suppress(queue.Empty):
            while not stopped.is_set():
                job = todo.get_nowait()
                try:
                    ready[job.config] = builder.build(job.config, wait=job.wait)
                    count.one_more()
                except Busy:
                    todo.put(_Job(job.config, wait=True))
                except Exception as error:  # handed to the caller's thread below
                    failures.append(error)

    processes = min(todo.qsize(), workers or min(2, os.cpu_count() or 1))
    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stopped.set()  # of use where joining was interrupted
    if failures:
        raise failures[0]
    return [found for found in (ready[config] for config in wanted) if found is not None]


class _Count:
    """Counts kernels that are compiled, and reports them one thread at a time."""

    def __init__(self, total: int, missing: int, built: Built) -> None:
        self._total, self._done, self._built = total, total - missing, built
        self._lock = threading.Lock()
        built(self._done, total)

    def one_more(self) -> None:
        with self._lock:
            self._done += 1
            self._built(self._done, self._total)


@dataclass(frozen=True)
class _Job:
    """A kernel to build; `wait` is set once another process was found building it."""

    config: KernelConfig
    wait: bool = False


def canonical(config: KernelConfig) -> KernelConfig:
    """`config` with the fields that its kernel ignores set to their defaults."""
    if config.kernel.startswith("cuda/"):
        return KernelConfig(config.kernel, options=config.options)
    line = registry.KERNELS.get(config.kernel)
    same = {f: values for f, values in line.ignores if getattr(config, f) in values} if line else {}
    return replace(config, **{f: values[0] for f, values in same.items()})


def check_buildable(config: KernelConfig, arch: str) -> None:
    """`Unsupported` for an architecture that is unknown or not the kernel's, `InvalidInput` for an
    option that the kernel does not read.
    """
    check_arch(arch)
    archs = source.supported_archs(config.kernel)
    if arch not in archs:
        raise unsupported("arch", f"{arch!r} for {config.kernel}", archs)
    check_options(config)


def manifest_versions(cache: Cache, kernel: str) -> dict[str, str] | None:
    """Toolchain versions in a prebuilt folder's manifest, for this kind of kernel; None without."""
    try:
        versions = read_json(cache.root / MANIFEST, "manifest", MIB)["toolchain"]
        return dict(versions[kernel.split("/")[0]]) or None
    except (InvalidInput, KeyError, TypeError, ValueError):
        return None


def _listed(cache: Cache) -> list[str]:
    """Names of the kernels in a prebuilt folder, each with its architecture."""
    try:
        return [str(name) for name in read_json(cache.root / MANIFEST, "manifest", MIB)["kernels"]]
    except (InvalidInput, KeyError, TypeError):
        return []


@cached  # once a process
def _warn_of_other_sources(folder: Path) -> None:
    warnings.warn(
        f"{folder}: its kernels were compiled from other sources than those of "
        f"{Path(__file__).parents[1]} and are not used; run the package that lies beside them, or "
        "compile them anew",
        stacklevel=3,
    )


@cached  # once a process
def _warn_of_other_cpu(folder: Path, level: str) -> None:
    warnings.warn(
        f"{folder}: the host code of its kernels was compiled for {level} and is not used; this "
        f"processor has {host_cpu()}. Compile them on a machine of that level",
        stacklevel=3,
    )


def _look(
    cache: Cache, config: KernelConfig, arch: str, hashed: str, versions: dict[str, str]
) -> Artifact | None:
    name = artifacts.entry_name(config, arch, artifacts.key(config, arch, hashed, versions))
    facts = cache.find(name)
    return artifacts.artifact(cache.root / name, config, arch, facts) if facts else None


def _say_on_stderr(message: str) -> None:
    sys.stderr.write(f"mla-lab: {message}\n")


class _Builder:
    """Builds into the user's cache, one kernel after another, with one compiling process."""

    def __init__(self, arch: str, progress: Progress) -> None:
        self.arch = arch
        self.progress = progress
        self.cache = Cache()
        self.cute = CuteWorker(arch)

    def close(self) -> None:
        self.cute.close()

    def build(self, config: KernelConfig, wait: bool) -> Artifact:
        hashed = source.source_hash(config.kernel)
        versions = toolchain.versions(config.kernel)
        key = artifacts.key(config, self.arch, hashed, versions)
        name = artifacts.entry_name(config, self.arch, key)
        label = f"{config.name()} for {self.arch}"

        def make(folder: Path) -> dict[str, Any]:
            self.progress(f"compiling {label} (kept in {self.cache.root})")
            facts = self._run_compiler(config, folder, name)
            facts["toolchain"] = versions
            return {"config": config.as_dict(), "arch": self.arch, "key": key, **facts}

        def waiting() -> None:
            self.progress(f"another process is compiling {label}; waiting")

        facts = self.cache.build(name, make, waiting if wait else None)
        return artifacts.artifact(self.cache.root / name, config, self.arch, facts)

    def _run_compiler(self, config: KernelConfig, folder: Path, name: str) -> dict[str, Any]:
        try:
            if config.kernel.startswith("cute/"):
                facts = self.cute.build(config, folder)
            else:
                facts = cuda_build.build(config, self.arch, folder)
        except CompileFailure as error:
            log = self.cache.log_path(name)
            log.write_text(error.log)
            raise BuildError(f"{error} (all the compiler said: {log})") from None
        return {**facts, "resources": _resources(folder, facts.pop("dynamic_shared", []))}


def _resources(folder: Path, dynamic_shared: list[int | None]) -> list[dict[str, Any]]:
    kernels = read_resources((folder / "kernel.cubin").read_bytes())
    if len(dynamic_shared) == len(kernels):
        kernels = [
            replace(k, dynamic_shared=d) for k, d in zip(kernels, dynamic_shared, strict=True)
        ]
    return [asdict(k) for k in kernels]
