"""Starts `mla_lab.cute.compile_worker` for an architecture and sends it jobs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..plan.config import KernelConfig
from .cute_link import link
from .failure import CompileFailure, failure
from .source import PACKAGE


class CuteWorker:
    """A compiling process for one architecture; started at the first job, ended by `close`."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def build(self, config: KernelConfig, folder: Path) -> dict[str, Any]:
        """Compile into `folder`; raises `BuildError`, `CompileFailure` where the compiler ran."""
        answer = self._ask({"config": config.as_dict(), "folder": str(folder)})
        if "error" in answer:
            raise failure(config, self.arch, answer["error"], answer["traceback"])
        facts: dict[str, Any] = answer["ok"]
        obj = folder / "kernel.o"
        facts["needs"] = link(obj, folder / "kernel.so", facts.pop("libraries"))
        obj.unlink()
        return facts

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        answer = ""
        if process.stdin and process.stdout:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline().strip()
        if not answer:
            raise self._died(process)
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _start(self) -> subprocess.Popen[str]:
        self._folder = tempfile.TemporaryDirectory(prefix="mla-lab-dsl-")
        path = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "CUTE_DSL_ARCH": self.arch,
            "CUTE_DSL_DUMP_DIR": self._folder.name,
            # the DSL's own cache would lie in /tmp, under a name that anybody can take first
            "CUTE_DSL_CACHE_DIR": self._folder.name,
            "CUTE_DSL_KEEP": "ptx,cubin",
        }
        with open(self._stderr(), "w") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "mla_lab.cute.compile_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=self._folder.name,
                text=True,
            )

    def _stderr(self) -> Path:
        return Path(self._folder.name if self._folder else os.devnull) / "stderr"

    def _died(self, process: subprocess.Popen[str]) -> CompileFailure:
        code = process.wait()
        words = self._stderr().read_text(errors="replace")
        last = (words.strip().splitlines() or ["no message"])[-1]
        self.close()
        sentence = f"cute: the compiling process ended with status {code}: {last}"
        return CompileFailure(sentence, words)
