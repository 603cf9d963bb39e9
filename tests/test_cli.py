"""The command line: its commands, its manners, and the doctor."""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mla_lab
from mla_lab import cli
from mla_lab.api import doctor
from mla_lab.core.errors import Unsupported, unsupported


def test_every_command_is_registered():
    """`--help` names them all, and each one's `--help` works without torch."""
    names = [m.__name__.rpartition(".")[2] for m in cli.command_modules()]
    assert {"doctor", "decode", "plan"} <= set(names)
    assert all(name in cli.build_parser().format_help() for name in names)


@pytest.mark.parametrize("module", cli.command_modules(), ids=lambda m: m.__name__)
def test_a_command_explains_itself(module: ModuleType, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([module.__name__.rpartition(".")[2], "--help"])
    assert stop.value.code == 0
    assert "usage: mla-lab" in capsys.readouterr().out


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Each argument of a parser and of its commands, with the program that takes it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from options_of(below)
        else:
            yield parser.prog, action


def test_every_argument_has_a_sentence_of_help():
    silent = [(prog, a.dest) for prog, a in options_of(cli.build_parser()) if not a.help]
    assert silent == []


def test_help_is_quick_to_import():
    code = "import sys, mla_lab.cli as c; c.build_parser(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"mla-lab {mla_lab.__version__}"


def test_a_module_runs_as_the_program():
    command = [sys.executable, "-m", "mla_lab", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("mla-lab")


def failing(error: BaseException) -> ModuleType:
    """A stand-in for the commands, whose only one raises `error`."""

    def run(args: object) -> None:
        raise error

    fake = ModuleType("mla_lab.cli.commands.fail")
    fake.add_parser = lambda subparsers: subparsers.add_parser("fail")  # type: ignore[attr-defined]
    fake.run = run  # type: ignore[attr-defined]
    return fake


def test_an_error_is_one_line_and_code_2(monkeypatch, capsys):
    error = unsupported("device", "a toaster", "a GPU")
    assert isinstance(error, Unsupported)
    monkeypatch.setattr(cli, "command_modules", lambda: [failing(error)])
    assert cli.main(["fail"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "mla-lab fail: device: got a toaster; supported: a GPU\n"
    assert printed.out == ""


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "command_modules", lambda: [failing(ZeroDivisionError("ours"))])
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "/nonexist"), "/nonexist: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "output: No space left on device"),
        (ModuleNotFoundError("no", name="torch"), "torch: not installed; pip install torch"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_what_the_machine_refuses_is_one_line(error, said, monkeypatch, capsys):
    monkeypatch.setattr(cli, "command_modules", lambda: [failing(error)])
    assert cli.main(["fail"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"mla-lab fail: {said}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("no", name="mla_lab.gone"), OSError("ours")])
def test_a_missing_module_of_ours_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr(cli, "command_modules", lambda: [failing(error)])
    with pytest.raises(type(error)):
        cli.main(["fail"])


@pytest.mark.parametrize(
    ("package", "command", "way_out"),
    [
        ("torch", ["decode"], "pip install torch"),
        ("torch", ["ladder"], "pip install torch"),
        ("ipywidgets", ["course", "syllabus"], "pip install 'mla-lab[lab]'"),
        ("ipywidgets", ["course", "grade", "."], "pip install 'mla-lab[lab]'"),
        ("IPython", ["course", "syllabus"], "pip install 'mla-lab[lab]'"),
    ],
)
def test_without_a_package_a_command_says_so_in_one_line(package, command, way_out):
    code = f"import sys; sys.modules[{package!r}] = None; import mla_lab.cli as c; "
    code += f"sys.exit(c.main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"mla-lab {command[0]}: {package}: not installed; {way_out}\n"


WITHOUT_POSIX = """
import os, sys
sys.modules["fcntl"] = None
del os.getuid, os.geteuid
import mla_lab.jit, mla_lab.cli, mla_lab.bench.records, mla_lab.interop.capture
from pathlib import Path
from mla_lab.core.problem import Problem
from mla_lab.jit.cache import Cache
from mla_lab.reference.inputs import make_inputs
record = mla_lab.bench.records.Record(Path(sys.argv[1]) / "record")
record.append({"kind": "end"})
record.close()
(made := lambda folder: (folder / "kernel.so").write_bytes(b"x") and {})
assert Cache(Path(sys.argv[1]) / "cache").build("entry", made)
print(mla_lab.trtllm_batch_decode_with_kv_cache_mla(
    **make_inputs(Problem((1,), (70,), 4)).contract_args()).shape)
"""


def test_a_system_without_fcntl_and_user_ids_runs_the_cpu_path(tmp_path):
    command = [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "torch.Size([1, 1, 4, 512])\n", done.stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            ["emulate", "--recorded", "--heads", "64"],
            "options: got --recorded with --heads; supported: ",
        ),
        (
            ["verify", "pairwise", "r.jsonl", "--device", "cpu", "--only", "99999999"],
            "case: got 99999999; supported: 0",
        ),
        (
            ["plan", "--dtype", "e4m3", "--kv-format", "fp8_656"],
            "--kv-format: got fp8_656 under e4m3; supported: e4m3",
        ),
        (["xray", "--only", "matrix"], "--only: got matrix; supported: a class with --sass"),
        (["xray", "--sass", "--only", "magic"], "--only: got magic; supported: ('matrix', "),
        (["ladder", "--rounds", "0"], "--rounds: got 0"),
        (["ladder", "--record", "no/such/folder"], "--record: got no GPU here"),
    ],
)
def test_wrong_options_are_one_line(command, named, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(command) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"mla-lab {command[0]}: {named}")
    assert printed.count("\n") == 1


def test_ctrl_c_ends_quietly(monkeypatch, capsys):
    monkeypatch.setattr(cli, "command_modules", lambda: [failing(KeyboardInterrupt())])
    assert cli.main(["fail"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m mla_lab doctor --json | head -c 1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert run.stdout == "["
    assert "BrokenPipe" not in run.stderr


def test_doctor_looks_at_everything(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("Python", "torch", "CPU", "GPU", "nvcc", "CuTe DSL", "nvdisasm", "cache"):
        assert f" {name} " in printed
    assert "backend torch" in printed


def test_doctor_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert all(set(f) == {"topic", "name", "there", "detail"} for f in findings)
    assert all(f["detail"] for f in findings), "each finding says something"


def test_doctor_says_why_a_tool_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = {f.name: f for f in doctor.examine()}
    assert not found["g++"].there
    assert "install" in found["g++"].detail


def test_doctor_names_an_unwritable_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    cache = next(f for f in doctor.examine() if f.name == "cache")
    assert not cache.there
    assert "MLA_LAB_CACHE_DIR" in cache.detail


def test_doctor_sees_a_gpu(monkeypatch):
    card = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141e9
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    gpu = next(f for f in doctor._device() if f.name == "GPU 0")
    assert gpu.there
    assert gpu.detail == "NVIDIA H200, compute capability 9.0, 132 SMs, 141 GB"


@pytest.mark.parametrize("given", ["nowhere", "."])
def test_a_folder_of_data_that_is_none_is_named(given, monkeypatch, tmp_path, capsys):
    """By the doctor, and in one line by a command, in place of the first file that it lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLA_LAB_DATA", given)
    data = next(f for f in doctor.examine() if f.name == "data")
    assert not data.there
    assert data.detail.startswith(f"MLA_LAB_DATA: got '{given}'; supported: a folder of data")
    assert cli.main(["ladder"]) == 2
    assert capsys.readouterr().err == f"mla-lab ladder: {data.detail}\n"
