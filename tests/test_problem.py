"""A problem takes whole numbers alone, Python's and NumPy's, within their bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mla_lab.core.errors import InvalidInput, InvalidType
from mla_lab.core.problem import Problem


def of(**changes: Any) -> Problem:
    return Problem(**{"q_lens": (1, 2), "kv_lens": (300, 0), "heads": 16} | changes)


@pytest.mark.parametrize("wrong", [1.5, 2.0, True, "2", None, math.nan])
@pytest.mark.parametrize("name", ["heads", "latent_dim", "rope_dim", "page_size", "top_k"])
def test_a_number_is_an_int(name: str, wrong: object) -> None:
    with pytest.raises(InvalidType, match=f"{name}: got {wrong!r}; supported: an int"):
        of(**{name: wrong})


@pytest.mark.parametrize("wrong", [1.5, 2.0, True, "2", None])
@pytest.mark.parametrize("name", ["q_lens", "kv_lens"])
def test_a_length_is_an_int(name: str, wrong: object) -> None:
    with pytest.raises(InvalidType, match=f"{name}: got {wrong!r}; supported: an int"):
        of(**{name: (1, wrong)})


@pytest.mark.parametrize(
    ("name", "least"),
    [("heads", 1), ("latent_dim", 1), ("rope_dim", 0), ("page_size", 1), ("top_k", 0)],
)
def test_a_number_has_a_least_value(name: str, least: int) -> None:
    assert getattr(of(**{name: least}), name) == least
    with pytest.raises(InvalidInput, match=f"{name}: got {least - 1}; supported: {least} or more"):
        of(**{name: least - 1})


def test_what_is_no_batch_and_no_list_of_lengths() -> None:
    for wrong in (True, 1.5, "3"):
        with pytest.raises(InvalidType, match="batch: got"):
            Problem.uniform(wrong, 1, 3, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="kv_lens: got 3; supported: lengths"):
        of(kv_lens=3)


def test_numpy_s_ints_become_python_s() -> None:
    problem = of(kv_lens=np.array([300, 0]), heads=np.int64(16), page_size=np.int32(32))
    assert problem == of(page_size=32)
    assert all(type(n) is int for n in (problem.heads, problem.page_size, *problem.kv_lens))
    with pytest.raises(InvalidInput, match="kv_lens: got -1"):
        of(kv_lens=(3, np.int32(-1)))


def test_a_call_without_a_request_is_told() -> None:
    for lens in ((), (5,)):
        with pytest.raises(InvalidInput, match="q_lens: got no length; supported: one request"):
            Problem((), lens, 16)
