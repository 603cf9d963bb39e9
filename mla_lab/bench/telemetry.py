"""Background readings of clocks, watts and temperature from `nvidia-smi`.

A figure of a compute-bound kernel means little without the clock it ran at: the H200 throttles
on power within a second of full load.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from statistics import median
from types import TracebackType

import torch

#: fields to read, by the name in a sample
FIELDS = {
    "sm_mhz": "clocks.sm",
    "mem_mhz": "clocks.mem",
    "watts": "power.draw.instant",
    "celsius": "temperature.gpu",
}
#: ms between readings; one reading takes about 10 ms
PERIOD_MS = 50


@dataclass(frozen=True)
class Sample:
    """One reading, at a `time.monotonic()` moment."""

    at: float
    values: tuple[float, ...]


def smi_name(device: torch.device | str) -> str:
    """A device's card as `nvidia-smi -i` takes it: by UUID, since torch numbers the cards that
    CUDA_VISIBLE_DEVICES leaves, and the tool all; card 0 for a CPU."""
    if torch.device(device).type != "cuda":
        return "0"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


class Telemetry:
    """Context manager that collects samples; none without `nvidia-smi`. card: see `smi_name`."""

    def __init__(self, period_ms: int = PERIOD_MS, card: str = "0") -> None:
        self.card = card
        self.samples: list[Sample] = []
        self._period_ms = period_ms
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Telemetry:
        if shutil.which("nvidia-smi"):
            query = f"--query-gpu={','.join(FIELDS.values())}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", self.card]
            self._process = subprocess.Popen(
                [*command, "-lms", str(self._period_ms)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        self._process.wait(timeout=10)
        self._reader.join(timeout=10)
        if self._process.stdout:
            self._process.stdout.close()

    @property
    def running(self) -> bool:
        """True while readings arrive."""
        return self._process is not None and self._process.poll() is None

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        for line in self._process.stdout:
            self.add(line)

    def add(self, line: str) -> None:
        """One line of the tool's CSV; a field it cannot read ("[N/A]") drops the line."""
        try:
            values = tuple(float(field) for field in line.split(","))
        except ValueError:
            return
        if len(values) == len(FIELDS):
            self.samples.append(Sample(time.monotonic(), values))

    def between(self, begin: float, end: float) -> dict[str, float] | None:
        """Medians over [begin, end] on the monotonic clock, or of the nearest sample."""
        if not self.samples:
            return None
        inside = [s for s in self.samples if begin <= s.at <= end]
        if not inside:
            middle = (begin + end) / 2
            inside = [min(self.samples, key=lambda s: abs(s.at - middle))]
        columns = zip(*(s.values for s in inside), strict=True)
        return {name: median(column) for name, column in zip(FIELDS, columns, strict=True)}
