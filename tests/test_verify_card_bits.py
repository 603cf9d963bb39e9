"""Bits of a card: probes of every opcode on floats, what a record holds, and how it is compared."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from mla_lab.cli import main
from mla_lab.core.errors import Unsupported
from mla_lab.core.resources import data_dir
from mla_lab.emulate import Options
from mla_lab.emulate.recorded import load
from mla_lab.verify import card_bits, card_probes
from mla_lab.verify.emulated import digest_of
from mla_lab.verify.record import Row, read

from .needs import needs_cxx

PLAIN = "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge3_grid1_shaped1"
RECORD = data_dir() / "records/h200_card_bits.jsonl"
SAMPLE = {
    PLAIN,
    "cute_swap_ab_sm90_q_dtype-fp16_kv_format-fp16_tile_rows-16_mask-causal_fused_merge3_grid1_shaped1",
    "cute_swap_ab_sm90_q_dtype-e4m3_kv_format-e4m3_tile_rows-16_mask-causal_fused_merge3_grid1_shaped1",
    "cute_keep_ab_sm90_kv_format-fp8_656_shaped1",
}
#: opcodes whose NaN has other bits than a card's 0x7fffffff, 0x7fff or 0x7f
NAN_BITS = {f"{op}.f32" for op in ("abs", "add", "div.rn", "fma.rn", "max", "min", "mul", "neg")}
NAN_BITS |= {"sub.f32", "cvt.f32.f16", "cvt.rpi.f32.f32"}
NAN_BITS |= {f"{op}.f16x2" for op in ("add", "mul.rn", "sub.rn", "cvt.rn.satfinite.e4m3x2")}
NAN_BITS |= {"cvt.rn.satfinite.e4m3x2.f32"}


@pytest.fixture(scope="module")
def made() -> list[Row]:
    """A record as a card would leave it, of the emulator's own bits."""
    recording = load(PLAIN)
    call = recording.call()
    recording.kernel(Options("card"))(*call.args)
    bits = card_bits.bits_of(call.out, call.lse)
    rows: list[Row] = [{"kind": "run"}]
    rows.append({"launch": PLAIN, "seed": 0, "ptx": digest_of(recording.text), **bits})
    for name in card_probes.names():
        answer = card_probes.answer(name, card_probes.on_emulator)
        rows.append({"probe": name, "bits": card_bits.packed(answer)})
    return rows


def test_every_opcode_on_floats_has_a_probe_with_an_answer(made: list[Row]) -> None:
    found = {row["probe"]: card_bits.unpacked(row["bits"]) for row in made if "probe" in row}
    assert {"ex2.approx.ftz.f32", "fma.rn.f32", "cvt.rn.satfinite.e4m3x2.f32"} <= set(found)
    assert sum("m64n8k" in name for name in found) == 6
    assert all(len(np.unique(bits)) > (1 if "setp" in name else 50) for name, bits in found.items())


def test_what_differs_is_counted(made: list[Row]) -> None:
    assert all(row["same"] == row["of"] for row in card_bits.compare(made[:8]))
    launch, probe = dict(made[1]), dict(made[2])
    launch["lse"] = ["00000000", *launch["lse"][1:]]
    launch["out"] = [*launch["out"][:-2], "0" * 12, "1" * 12]
    probe["bits"] = card_bits.packed(card_bits.unpacked(probe["bits"]) ^ np.uint32(1))
    found = list(card_bits.compare([made[0], launch, probe]))
    assert [row["of"] - row["same"] for row in found] == [3, card_probes.SAMPLES]
    assert "0 of 2 bit for bit" in card_bits.summary(found)


@pytest.mark.parametrize(("same", "code"), [(5, 0), (4, 1)])
def test_the_comparison_s_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: int, code: int
) -> None:
    record = tmp_path / "bits.jsonl"
    record.write_text('{"kind": "run", "what": "card-bits"}\n')
    rows = [{"name": "a", "same": 5, "of": 5}, {"name": "b", "same": same, "of": 5}]
    monkeypatch.setattr(card_bits, "compare", lambda *_: rows)
    assert main(["verify", "card-bits", str(record), "--compare"]) == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_recording_wants_a_card() -> None:
    with pytest.raises(Unsupported, match="CUDA device"):
        next(card_bits.rows())


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_probes_are_ptx_that_assembles(tmp_path: Path) -> None:
    texts: list[str] = []
    for name in ("cvt.rn.f16x2.e4m3x2", "setp.eq.f32", "m64n8k32.f32.e4m3.e4m3 2"):
        card_probes.answer(name, lambda text, ctas, tensors: texts.append(text))
    for text in texts:
        (tmp_path / "k.ptx").write_text(text)
        line = ["ptxas", "-arch=sm_90a", str(tmp_path / "k.ptx"), "-o", str(tmp_path / "k.cubin")]
        assert subprocess.run(line, capture_output=True, check=False).returncode == 0


def test_the_emulator_has_the_bits_of_an_h200() -> None:
    """A sample; `mla-lab verify card-bits RECORD --compare` takes all of the record."""
    rows = read(RECORD)
    launches = [row for row in rows[1:] if row.get("launch") in SAMPLE and row["seed"] == 1]
    assert len(launches) == len(SAMPLE)
    found: list[Row] = []
    for launch in launches:
        with suppress(Unsupported):  # of a build that is neither in the archive nor of this source
            found += card_bits.compare([rows[0], launch], RECORD.with_suffix(".zip"))
    if not found:
        pytest.skip("the record is of builds of another source: mla-lab verify card-bits on a card")
    assert all(row["same"] == row["of"] for row in found), card_bits.summary(found)


@needs_cxx
def test_the_kernels_of_this_source_have_the_same_bits() -> None:
    rows = read(RECORD)
    launches = [row for row in rows[1:] if row.get("launch") == PLAIN]
    found = list(card_bits.compare([rows[0], *launches], RECORD.with_suffix(".zip"), today=True))
    assert found and all(row["same"] == row["of"] for row in found), card_bits.summary(found)


def test_opcodes_have_the_bits_of_an_h200_but_for_nan() -> None:
    probes = [row for row in read(RECORD) if "probe" in row]
    assert {row["probe"] for row in probes} >= set(card_probes.names())
    found = list(card_bits.compare([{}, *probes]))
    assert {row["name"] for row in found if row["same"] != row["of"]} == NAN_BITS
