"""The author's kernels of notebooks 60 to 69 on a card: every output, as in the emulator."""

from __future__ import annotations

import pytest

pytest.importorskip("plotly")

from mla_lab.core.errors import MlaLabError
from mla_lab.lab.steps.catalogue import STEPS
from mla_lab.lab.steps.compiled import DoesNotCompile
from mla_lab.lab.steps.kernel import solution
from mla_lab.lab.steps.live import launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("number", STEPS)
def test_the_author_s_kernel_is_right(number: str) -> None:
    made = solution(number)
    try:
        _ = made.compiled
    except DoesNotCompile:
        raise
    except MlaLabError as error:
        pytest.skip(f"no build of this step here: {error}")
    wrong, microseconds = launch(made)
    assert wrong == [] and microseconds > 0
