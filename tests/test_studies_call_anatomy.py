"""Stamps become phases that add up, rounds become spans of roles, profiles become phases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mla_lab.bench import stamps
from mla_lab.bench.kernel_times import KernelSpans
from mla_lab.core.errors import Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.resources import data_dir
from mla_lab.simulate.anatomy import PHASES
from mla_lab.studies import call_anatomy as anatomy

from .test_anatomy import VALIDATOR

BEGIN = 10_000
#: of cute/keep_ab_sm90: a CTA that merges a share, one that ends alone, one without work
SPLIT = [10_700, 11_000, 13_000, 16_000, 16_500, 17_000, 18_000, 17_500]
ALONE = [9_000, 11_200, 13_200, 16_000, 16_600, 0, 16_600, 0]
NO_WORK = [10_800, 11_000, 0, 0, 0, 0, 11_100, 0]
#: of cute/swap_ab_sm90: words 4 and 5 hold what an earlier launch has left there
MAIL = [10_700, 11_000, 13_000, 15_000, 7_000, 7_100, 15_600, 18_000, 11_400, 16_100]


def call(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int64)


def test_phases_of_a_cta_add_up_to_the_call() -> None:
    """From the end of the call before to the end of the last CTA, whatever the CTA did."""
    phases = stamps.call_phases(call(SPLIT), stamps.KEEP_AB, BEGIN)
    assert phases == {
        "launch": 700, "setup": 300, "first_byte": 2000, "loop": 3000, "exchange": 500,
        "wait": 500, "merge": 1000, "idle": 0,
    }  # fmt: skip
    both = stamps.call_phases(call(SPLIT, ALONE, NO_WORK), stamps.KEEP_AB, BEGIN)
    assert sum(both.values()) == 18_000 - BEGIN
    assert both["idle"] == (18_000 - 16_600) / 2
    assert both["write"] == 600 / 2
    assert both["launch"] == 700 / 2  # who starts before the call begins has none


def test_words_that_were_not_written_do_not_count() -> None:
    phases = stamps.call_phases(call(MAIL), stamps.SWAP_AB, BEGIN)
    assert phases == {
        "launch": 700, "setup": 700, "first_byte": 1600, "loop": 2000, "exchange": 600,
        "wait": 500, "merge": 1900, "idle": 0,
    }  # fmt: skip


def test_a_call_is_measured_from_end_to_end() -> None:
    """Means over the middle half of calls that follow each other; a slow one is left out."""
    step = 8_000
    calls = [call(SPLIT) + step * i for i in range(8)]
    calls += [call(SPLIT) + step * 8 + 50_000]
    took, phases = stamps.mean_phases(calls, stamps.KEEP_AB)
    assert took == step
    assert sum(phases.values()) == pytest.approx(took)
    assert set(phases) <= set(PHASES)


def test_spans_of_ctas_follow_each_other() -> None:
    rows = stamps.cta_spans(call(SPLIT, ALONE, NO_WORK), stamps.KEEP_AB)
    assert {row[0] for row in rows} == {0, 1}
    for lane in (0, 1):
        mine = [row for row in rows if row[0] == lane]
        assert all(a[3] == b[2] for a, b in itertools.pairwise(mine))
    assert [row[1] for row in rows if row[0] == 0] == [
        "setup", "load", "attend", "write", "wait", "merge",
    ]  # fmt: skip


def rounds(ghz: float, clocks: int) -> np.ndarray:
    """Rounds that take `clocks` each: QK 1200, softmax 500, PV 1100 under the next one's QK."""
    start = 1_000_000 + clocks * np.arange(stamps.ROUNDS)[::-1]
    offsets = (100, 200, 0, 1200, 1700, 1800, 2900)
    words = np.stack([start + at for at in offsets], 1)
    return np.column_stack([words, (words[:, -1] / ghz).round().astype(np.int64)])


def test_rounds_become_spans_in_nanoseconds() -> None:
    ghz, ns = stamps.role_spans(rounds(1.6, 1800))
    assert ghz == pytest.approx(1.6, rel=1e-3)
    qk = [row for row in ns if row[1] == "qk"]
    assert len(qk) == 32
    assert [row[4] for row in qk] == list(range(32))
    assert qk[1][2] - qk[0][2] == pytest.approx(1800 / 1.6, abs=2)
    assert qk[0][3] - qk[0][2] == pytest.approx(1200 / 1.6, abs=2)
    row = {"kind": "spans", "lanes": "role", "ns": ns, "schema": anatomy.SCHEMA}
    texts = dict.fromkeys(("case", "peer", "kernel", "card"), "x")
    VALIDATOR.validate({**row, **texts, "date": "2026-01-02", "commit": "0123456"})


def test_kernels_seen_from_outside() -> None:
    """Two kernels a call; a pause between them counts only where the call has room for it."""
    events = [("split", 0.0, 10.0), ("combine", 11.0, 14.0)]
    later = [(name, start + 20, end + 20) for name, start, end in events]
    seen = KernelSpans.of([*events, *later], 2)
    assert seen == KernelSpans(("split", "combine"), (10.0, 3.0), (1.0,))
    roomy = dict(map(tuple, anatomy.outside_phases(16.0, seen.kernels_us, seen.gaps_us)))
    assert roomy == {"launch": 2000, "loop": 10000, "gap": 1000, "merge": 3000}
    tight = dict(map(tuple, anatomy.outside_phases(12.0, seen.kernels_us, seen.gaps_us)))
    assert tight == {"loop": 10000, "merge": 2000}
    assert anatomy.outside_phases(9.5, (10.0,), ()) == [["loop", 9500]]
    with pytest.raises(Unsupported, match="3 of 2 calls"):
        KernelSpans.of([*events, later[0]], 2)


def test_every_build_that_a_record_needs_is_named() -> None:
    """Each plain build has its stamped one, and one notes rounds."""
    found = anatomy.builds()
    stamped = [config for config in found if config.option("stamps") == 1]
    for case in anatomy.cases():
        config = anatomy.plan_of(case, H200).config
        assert config is not None
        same = [c for c in stamped if (c.kernel, c.tile_rows) == (config.kernel, config.tile_rows)]
        assert same, case.name
    with_rounds = [config for config in found if config.option("stamps") == 2]
    assert [config.kernel for config in with_rounds] == ["cute/keep_ab_sm90"]


def test_words_are_those_of_the_kernels() -> None:
    """The kernels' own lists; read as text, since they import the compiler."""
    root = data_dir().parent / "mla_lab" / "cute"
    profile = (root / "rows_on_m" / "profile.py").read_text(encoding="utf-8")
    assert f"\nROUNDS = {stamps.ROUNDS}\n" in profile
    fragments = (root / "split_merge" / "swap_ab_fragments.py").read_text(encoding="utf-8")
    events = fragments.split("class CtaEvent(IntEnum):")[1].split("\n\n\n")[0]
    assert events.count(" = ") == stamps.SWAP_AB.words
