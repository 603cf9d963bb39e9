"""Machine code by its hashes: two ELF files of three sections, renamed, changed and lost."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.jit.artifact import entry_name
from mla_lab.plan.config import KernelConfig
from mla_lab.studies import machine_code

from .house import ROOT

RECORD = ROOT / "data/records/machine_code_6277a6a.json"


def elf(**contents: bytes) -> bytes:
    """An ELF64 file with these sections (dots as `__`), a table of names, and one without bits."""
    names = [name.replace("__", ".") for name in contents]
    table, starts = b"\0", []
    for name in [*names, ".shstrtab", ".nv.shared.f"]:
        starts.append(len(table))
        table += name.encode() + b"\0"
    bodies = [*contents.values(), table]
    file, entries = bytearray(64), []
    for start, body in zip(starts, bodies, strict=False):
        entries.append(struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, len(file), len(body), 0, 0, 1, 0))
        file += body
    entries.append(struct.pack("<IIQQQQIIQQ", starts[-1], 8, 0, 0, len(file), 999, 0, 0, 1, 0))
    file[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", file, 0x28, len(file))
    struct.pack_into("<HHH", file, 0x3A, 64, len(entries), len(bodies) - 1)
    return bytes(file) + b"".join(entries)


def put(folder: Path, name: str, file: bytes) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "kernel.cubin").write_bytes(file)


def test_the_text_of_kernels_counts_and_nothing_else(tmp_path: Path, capsys) -> None:
    old, new, record = tmp_path / "old", tmp_path / "new", tmp_path / "old.json"
    put(old, "a", elf(__text__f=b"one", __debug_line=b"12"))
    put(old, "b", elf(__text__f=b"two", __text__g=b"three"))
    assert machine_code.main([str(old)]) == 0
    record.write_text(capsys.readouterr().out)
    assert json.loads(record.read_text())["a"] == [hashlib.sha256(b"one").hexdigest()[:32]]
    put(new, "renamed", elf(__text__other=b"one", __debug_line=b"99, and more"))
    put(new, "also", elf(__text__g=b"three", __text__f=b"two"))
    assert machine_code.main([str(new), "--against", str(record)]) == 0
    assert (
        "2 builds with the same machine code, 0 changed, 0 gone, 0 new" in capsys.readouterr().out
    )
    put(new, "more", elf(__text__f=b"one!"))
    assert machine_code.main([str(new), "--against", str(record)]) == 1
    said = capsys.readouterr().out
    assert "2 builds with the same machine code, 0 changed, 0 gone, 1 new" in said
    assert "new: more" in said
    assert machine_code.main([str(old / "a"), "--against", str(record)]) == 1
    assert "gone: b" in capsys.readouterr().out


def test_builds_of_one_configuration_are_compared_with_each_other(tmp_path: Path, capsys) -> None:
    """Two builds that take each other's code are both changed; names are not cut, and a second
    build of a configuration hides none."""
    options = tuple((f"an_option_with_a_long_name_{i}", 1) for i in range(5))
    configs = [KernelConfig(kernel="cute/k", options=(*options, ("last", i))) for i in range(2)]

    def put_both(folder: Path, *contents: bytes) -> None:
        for config, code in zip(configs, contents, strict=True):
            name = entry_name(config, "sm_90a", hashlib.sha256(code).hexdigest())
            put(folder, name, elf(__text__f=code))
            facts = {"config": config.as_dict(), "arch": "sm_90a"}
            (folder / name / "metadata.json").write_text(json.dumps(facts))

    old, new, record = tmp_path / "old", tmp_path / "new", tmp_path / "old.json"
    put_both(old, b"one", b"two")
    assert machine_code.main([str(old)]) == 0
    record.write_text(capsys.readouterr().out)
    names = [f"{config.name()}-sm_90a" for config in configs]
    assert list(json.loads(record.read_text())) == names
    put_both(new, b"two", b"one")
    assert machine_code.main([str(new), "--against", str(record)]) == 1
    said = capsys.readouterr().out
    assert "0 builds with the same machine code, 2 changed, 0 gone, 0 new" in said
    assert all(f"changed: {name}" in said for name in names)
    put_both(old, b"three", b"four")
    assert len(machine_code.hashes(old)) == 4


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="without a cubin"):
        machine_code.hashes(tmp_path)
    with pytest.raises(InvalidInput, match="ELF64"):
        machine_code.codes(b"MZ and what follows")


def test_the_record_is_of_the_shipped_builds() -> None:
    builds = json.loads(RECORD.read_text(encoding="utf-8"))
    assert len(builds) == 193
    assert all(codes == sorted(codes) and codes for codes in builds.values())
    assert {len(code) for codes in builds.values() for code in codes} == {machine_code.DIGITS}
