"""The README says what is so: its code runs, its picture is ours, its map is complete."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from mla_lab import cli
from mla_lab.bench.records import results
from mla_lab.bench.report import headline
from mla_lab.cli.commands._live_steps import STEPS
from mla_lab.core.errors import InvalidInput
from mla_lab.interop.engines import sglang_plugin, vllm_plugin
from mla_lab.interop.engines.step import WORKSPACE_BYTES
from mla_lab.lab.documents import PICTURES, TABLES, fill, pages
from mla_lab.lab.workbook_map import NOTEBOOKS
from mla_lab.plan.launch_modes import PAGE_SIZES
from mla_lab.verify.target_figures import PLAIN, rows_of

from .house import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_records_from_before_a_day_rotate_over_less() -> None:
    """The day that both pages name divides the records by their rotation."""
    said = re.compile(r"from\s+before\s+(\d{4}-\d\d-\d\d)\s+rotate")
    pages_of = ("data/notes/speed.md", "data/README.md")
    found = [said.findall((ROOT / name).read_text(encoding="utf-8")) for name in pages_of]
    ((day,), (other,)) = found
    assert day == other
    seen = set()
    for path in (ROOT / "data/records").glob("h[12]00_*.jsonl"):
        with path.open(encoding="utf-8") as lines:
            head = json.loads(next(lines))
        method = head.get("method")
        if isinstance(method, dict) and "rotation_bytes" in method:
            seen.add((head["time"] < day, method["rotation_bytes"] > 240_000_000))
    assert seen == {(True, False), (False, True)}


def test_steps_of_live_are_not_said_to_have_commands_of_their_own() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"[^.]*commands\s+of\s+their\s+own", page)
    assert not {step.name for step in STEPS} & set(re.findall(r"[\w-]+", sentence.lower()))


def test_every_table_of_named_barriers_is_named() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    top = ROOT / "mla_lab/cute"
    texts = {p.relative_to(top): p.read_text(encoding="utf-8") for p in top.rglob("*.py")}
    tables = [str(p) for p, text in texts.items() if re.search("^Named barriers", text, re.M)]
    assert len(tables) >= 4
    assert [name for name in tables if f"`{name}`" not in page] == []


def test_the_five_lines_run():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    out = names["out"]
    assert tuple(out.shape) == (2, 1, 128, 512)  # type: ignore[attr-defined]
    assert out.isfinite().all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_what_the_code_draws(name):
    drawn = (ROOT / name).read_text(encoding="utf-8")
    assert drawn == PICTURES[name]().fixed + "\n", "fix: make format; then see README's words"
    if "plan" in name:
        (gain,) = re.findall(r" ([\d.]+) times sooner", drawn)
        assert float(gain) > 4, "README says less than a quarter"


def test_the_recording_is_there_and_small():
    (name,) = re.findall(r"\((data/pictures/\w+\.webp)\)", README)
    recording = (ROOT / name).read_bytes()
    assert recording[8:12] == b"WEBP" and b"ANIM" in recording[:64]
    assert 50_000 < len(recording) < 1_000_000


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.name)
def test_the_tables_are_those_of_the_records(path):
    text = path.read_text(encoding="utf-8")
    assert fill(text) == text, "fix: make format"


def test_every_table_has_its_place_and_the_map_is_complete():
    named = [n for p in pages(ROOT) for n in re.findall(r"<!-- made: ([\w-]+) -->", p.read_text())]
    assert set(named) == set(TABLES)
    assert {e.file for e in NOTEBOOKS} == {p.name for p in (ROOT / "notebooks").glob("*.ipynb")}


def test_a_table_of_no_name_is_refused():
    with pytest.raises(InvalidInput, match="speed-short"):
        fill("<!-- made: nothing -->\n<!-- /made -->")
    assert fill("no tables") == "no tables"


def test_the_headline_is_of_a_plain_call():
    """No planned row stands in README: neither in its table nor in its chart."""
    rows = rows_of(PLAIN)
    assert headline(rows) == "mla-lab-plain"
    bounds = [
        r["notes"]["max_seq_len"] for r in results(rows, "ok") if r["peer"] == "mla-lab-plain"
    ]
    assert set(bounds) == {131_072}
    assert {r["environment"]["dirty"] for r in rows if r["kind"] == "run"} == {False}
    drawn = (ROOT / "data/pictures/speed.svg").read_text(encoding="utf-8")
    for text in (README, drawn):
        assert "with a host plan" not in text and "plain call" in text
    times = {r["case"]: r["us"] for r in results(rows, "ok") if r["peer"] == "mla-lab-plain"}
    shown = re.findall(r"^\| (b\d+_\S+) \| ([\d.]+) \|", README, re.MULTILINE)
    assert len(shown) == 8
    for case, us in shown:
        assert abs(float(us) / times[case] - 1) < 0.01, case


def test_the_readme_is_short_and_its_headline_stands_once():
    assert README.count("\n") <= 150
    (mean,) = re.findall(
        r">The best public kernel takes ([\d.]+) times",
        (ROOT / "data/pictures/speed.svg").read_text().split("</title>")[1],
    )
    assert mean not in re.sub(r"<!-- made.*?/made -->", "", README, flags=re.DOTALL)


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_engines_are_started_by_the_names_that_the_plugins_register():
    page = (ROOT / "data/notes/engines.md").read_text(encoding="utf-8")
    for text in (README, page):
        assert f"vllm serve MODEL --attention-backend {vllm_plugin.NAME}\n" in text.replace(
            "`", "\n"
        )
        assert f"--decode-attention-backend {sglang_plugin.NAME}" in text
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, plugin in (
        ("vllm.general_plugins", vllm_plugin),
        ("sglang.srt.plugins", sglang_plugin),
    ):
        assert f"{plugin.__name__}:{plugin.register.__name__}" in entries[group].values()
    pages = re.search(r"\| page \| .* \| ([\d, or]+) tokens; others are refused", page)
    assert pages and tuple(map(int, re.findall(r"\d+", pages[1]))) == PAGE_SIZES
    assert f"{WORKSPACE_BYTES >> 20} MiB a device" in page


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([a-z-]+)", README + contributing, re.M))
    assert {"lab", "test"} <= named
    assert [t for t in named if not re.search(rf"^{t}:", makefile, re.M)] == []


@pytest.mark.parametrize("line", re.findall(r"^mla-lab (.*?)(?:  .*)?$", README, re.M))
def test_commands_of_the_readme_parse(line):
    assert cli.build_parser().parse_args(line.split()).command == line.split()[0]
