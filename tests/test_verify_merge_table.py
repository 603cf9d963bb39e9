"""Each way to merge partials is in the table of merges, with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.core.resources import kernels_dir
from mla_lab.jit.shipped import SM100, shipped
from mla_lab.plan.config import KernelConfig
from mla_lab.verify import merge_table
from mla_lab.verify.merge_table import PATHS

CUTE = Path(merge_table.__file__).parents[1] / "cute"


def test_each_member_of_split_merge_is_in_the_table() -> None:
    text = (CUTE / "split_merge" / "__init__.py").read_text(encoding="utf-8")
    members = {line.split(" = ")[0].strip() for line in text.splitlines() if ' = "' in line}
    assert members == {path.split_merge for path in PATHS if path.split_merge}


def test_each_shipped_build_merges_by_a_path_of_the_table() -> None:
    names = [path.name for path in PATHS]
    assert len(set(names)) == len(names)
    for config in (*shipped(), *SM100):
        found = merge_table.paths_of(config)
        assert set(found) <= set(names)
        assert found or config.kernel in merge_table.WITHOUT, config.name()
    counts = merge_table.builds()
    assert [name for name, count in counts.items() if not count] == ["mla_sm100, cooperative"]


def test_the_table_s_option_values_are_those_that_the_kernels_compile() -> None:
    params = pytest.importorskip("mla_lab.cute.swap_ab_sm90.params")
    members = {path.name: path.split_merge for path in PATHS}
    for config in shipped():
        if config.kernel == "cute/swap_ab_sm90":
            expected = params.MERGES[config.option("fused_merge", 1)].name
            assert {members[name] for name in merge_table.paths_of(config)} == {expected}


def test_sources_of_the_table_exist() -> None:
    for path in PATHS:
        folder = CUTE if path.split_merge else kernels_dir()
        assert (folder / path.source).is_file(), path.source


def rows(*results: tuple[str, KernelConfig, int, float]) -> Iterator[dict[str, Any]]:
    here = {"card": {"name": "H200"}}
    yield {"kind": "run", "time": "2026-11-20T00:00:00+00:00", "environment": here}
    for case, config, partials, us in results:
        notes = {"config": config.as_dict(), "partials": partials}
        row = {"kind": "result", "status": "ok", "case": case, "peer": "p", "part": 0}
        yield row | {"us": us, "notes": notes}


def test_a_path_meets_the_fastest_of_the_others() -> None:
    ll = KernelConfig("cute/swap_ab_sm90", options=(("fused_merge", 3), ("grid", 1)))
    keep = KernelConfig("cute/keep_ab_sm90")
    cluster = KernelConfig("cute/swap_ab_sm90", cluster=8, options=(("fused_merge", 2),))
    measured = [("a", ll, 4, 9.0), ("a", ll, 8, 6.0), ("a", keep, 0, 7.5), ("a", cluster, 0, 8.0)]
    found = dict(merge_table.duels(rows(*measured, ("b", ll, 4, 1.0))))
    assert set(found) == {"swap_ab, LL", "swap_ab, cluster"}
    assert found["swap_ab, LL"].gain == 7.5 / 6.0 and found["swap_ab, LL"].other == "unsplit"
    assert found["swap_ab, LL"].where == "H200, 2026-11-20"
    assert found["swap_ab, cluster"].other == "swap_ab, LL" and found["swap_ab, cluster"].gain < 1


def test_an_attempt_that_is_not_in_the_log_is_refused() -> None:
    log = [{"change": "one"}, {"change": "one more"}]
    with pytest.raises(InvalidInput, match="2 that begin with 'one'"):
        merge_table._attempt(log, "one")
