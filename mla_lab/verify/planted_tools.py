"""Planted bugs on a card: each alone and under each tool of compute-sanitizer, as rows.

    python planted_tools.py FOLDER RECORD

FOLDER is what `mla-lab verify planted --pack` left. Each run is a process of its own, which is
ended after SECONDS where the kernel hangs. The file stands alone: it needs Python, a CUDA driver
and compute-sanitizer, and no package.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROGRAM = "compute-sanitizer"
ALONE = "card"
#: tool -> its options
TOOLS: dict[str, tuple[str, ...]] = {
    ALONE: (),
    "memcheck": (),
    "racecheck": ("--racecheck-report", "all"),
    "synccheck": (),
    "initcheck": (),
}
#: a run that takes longer hangs: alone, and under a tool
SECONDS, TOOL_SECONDS = 8.0, 15.0
PROCESSES = 10
#: device memory as the packed launches address it begins here
BASE = 1 << 40
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
FIRST = re.compile(r"^=========\s+((?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY).*\S)", re.M)
#: attributes of a function and of a launch
SHARED_BYTES, CLUSTER, COOPERATIVE = 8, 4, 2
CUBIN, FACTS = ".cubin", ".json"


class Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class Card:
    """The first CUDA device, through its driver."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *args: Any) -> None:
        error = getattr(self.driver, name)(*args)
        if error:
            sys.exit(f"DRIVER: {name}: error {error} of the CUDA driver")

    def upload(self, tensor: dict[str, Any]) -> ctypes.c_uint64:
        """A tensor in an allocation of its own; one without data is not written."""
        at = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(4, tensor["nbytes"])))
        if tensor["data"]:
            data = zlib.decompress(base64.b64decode(tensor["data"]))
            self("cuMemcpyHtoD_v2", at, data, ctypes.c_size_t(len(data)))
        return at

    def download(self, at: ctypes.c_uint64, nbytes: int) -> bytes:
        """Bytes of an allocation."""
        data = ctypes.create_string_buffer(nbytes)
        self("cuMemcpyDtoH_v2", data, at, ctypes.c_size_t(nbytes))
        return data.raw

    def launch(self, cubin: bytes, facts: dict[str, Any], params: list[bytes]) -> None:
        """One launch, to its end."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), cubin)
        self("cuModuleGetFunction", ctypes.byref(function), module, facts["kernel"].encode())
        self("cuFuncSetAttribute", function, SHARED_BYTES, facts["shared_bytes"])
        made = []
        if facts["cluster"] != [1, 1, 1]:
            made.append(Attribute(CLUSTER, 0, (ctypes.c_uint * 16)(*facts["cluster"])))
        if facts["cooperative"]:
            made.append(Attribute(COOPERATIVE, 0, (ctypes.c_uint * 16)(1)))
        attributes = (Attribute * len(made))(*made)
        shape = (*facts["grid"], *facts["block"], facts["shared_bytes"])
        config = Config(*shape, None, ctypes.addressof(attributes), len(made))
        kept = [ctypes.create_string_buffer(p, len(p)) for p in params]
        array = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(k) for k in kept))
        self("cuLaunchKernelEx", ctypes.byref(config), function, array, None)
        self("cuCtxSynchronize")


def moved(param: bytes, tensors: Sequence[dict[str, Any]], places: Sequence[int]) -> bytes:
    """A parameter whose addresses are those of the card."""
    words = bytearray(param)
    for at in range(0, len(words) - 7, 8):
        (value,) = struct.unpack_from("<Q", words, at)
        for tensor, place in zip(tensors, places, strict=True):
            if 0 <= value - BASE - tensor["offset"] <= max(0, tensor["nbytes"] - 1):
                struct.pack_into("<Q", words, at, value - BASE - tensor["offset"] + place)
                break
    return bytes(words)


def run(folder: Path, name: str) -> str:
    """Launch one packed kernel; a digest of what it left in device memory."""
    facts = json.loads((folder / (name + FACTS)).read_text())
    card = Card()
    tensors = facts["tensors"]
    places = [card.upload(tensor) for tensor in tensors]
    params = [
        moved(bytes.fromhex(p), tensors, [int(place.value) for place in places])
        for p in facts["params"]
    ]
    card.launch((folder / (name + CUBIN)).read_bytes(), facts, params)
    written = [card.download(places[i], tensors[i]["nbytes"]) for i in facts["results"]]
    return hashlib.sha256(b"".join(written)).hexdigest()[:16]


def judged(tool: str, text: str, code: int | None) -> dict[str, Any]:
    """What a process said: how it ended, errors counted, and the first message."""
    row: dict[str, Any] = {"end": "hang" if code is None else "exit" if code == 0 else "failed"}
    digest = re.search(r"^result (\w+)$", text, re.M)
    row["result"] = digest[1] if digest else ""
    if tool == ALONE:
        failed = re.search(r"^DRIVER: (.*)$", text, re.M)
        row["first"] = failed[1] if failed else ""
        return row
    counts = [int(count) for count in SUMMARY.findall(text)]
    row["errors"] = sum(counts) if counts else None
    row["first"] = [line[:160] for line in FIRST.findall(text)[:6]]
    return row


def tried(folder: Path, name: str, tool: str) -> dict[str, Any]:
    """One process: a kernel alone, or under a tool."""
    line = [sys.executable, __file__, str(folder), "--name", name]
    if tool != ALONE:
        line = [PROGRAM, "--tool", tool, *TOOLS[tool], *line]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    code: int | None
    try:
        text, _ = process.communicate(timeout=SECONDS if tool == ALONE else TOOL_SECONDS)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, code = process.communicate()[0], None
    return {"kind": "case", "name": name, "tool": tool, **judged(tool, text, code)}


def head() -> dict[str, Any]:
    """The first row: card, driver, tool, day."""
    ask = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    version = re.search(r"Version (\S+)", _said((PROGRAM, "--version")))
    return {
        "kind": "run",
        "what": "planted",
        "card": _said(ask).strip().split("\n")[0],
        "tool": f"{PROGRAM} {version[1] if version else 'of no known version'}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def _said(line: Sequence[str]) -> str:
    try:
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """All kernels of a folder under all tools; those that hang come last."""
    names = sorted(path.name.removesuffix(CUBIN) for path in folder.glob("*" + CUBIN))
    with ThreadPoolExecutor(PROCESSES) as pool:
        alone = list(pool.map(lambda name: tried(folder, name, ALONE), names))
        yield from alone
        for hangs in (False, True):
            chosen = [row["name"] for row in alone if (row["end"] == "hang") == hangs]
            pairs = [(name, tool) for name in chosen for tool in TOOLS if tool != ALONE]
            yield from pool.map(lambda pair: tried(folder, *pair), pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; with --name launch one kernel instead."""
    parser = argparse.ArgumentParser(prog="planted_tools.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("record", type=Path, nargs="?", help="JSON lines, written anew")
    parser.add_argument("--name", help="launch this kernel alone, and print a digest")
    args = parser.parse_args(argv)
    if args.name:
        sys.stdout.write(f"result {run(args.folder, args.name)}\n")
        return 0
    with args.record.open("w") as file:
        file.write(json.dumps(head()) + "\n")
        for row in rows(args.folder):
            file.write(json.dumps(row) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
