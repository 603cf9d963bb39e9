"""Kernels of notebook tests, forked from a process that has imported torch.

A fresh kernel spends three of a notebook's eight seconds on that import and on the interpreter's
end: 30 notebooks take 131 s, forked ones 79 to 84 s, and 68 to 81 s with the package imported as
well (two cores, 2026-11-28). With MLA_LAB_LONG=1 each has a fresh process, as in JupyterLab.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

PRELOADED = [
    "torch",
    "ipykernel.debugger",
    "ipykernel.kernelapp",
    "ipywidgets",
    "mla_lab.lab.exercises",
    "mla_lab.lab.session",
]


class ForkedKernel:
    """The part of `subprocess.Popen` that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], cwd: str, env: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = context.Pipe(duplex=False)
        arguments = command[command.index("-m") + 1 :]
        self._process = context.Process(target=run_kernel, args=(arguments, cwd, env, theirs))
        self._process.start()
        theirs.close()
        ours.recv()  # its process group is its own: what signals the group does not end the tests
        ours.close()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """The exit status, None before the end."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """The exit status, once there is one."""
        self._process.join()
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        """Signal the process."""
        os.kill(self.pid, signum)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def launch_kernel(cmd: list[str], cwd: str, env: dict[str, str], **_: Any) -> ForkedKernel:
    """Stands in for jupyter_client's function of this name."""
    return ForkedKernel(cmd, cwd, env)


def run_kernel(arguments: list[str], cwd: str, env: dict[str, str], started: Connection) -> None:
    """`ipykernel_launcher` in a forked process."""
    os.setsid()
    started.send(None)
    started.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    from ipykernel import kernelapp

    try:
        kernelapp.launch_new_instance()
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends without them
