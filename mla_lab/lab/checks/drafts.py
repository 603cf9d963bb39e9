"""Exercise of notebook 70: which tokens join the text after a verification."""

from __future__ import annotations

from ..tiny_decode import kept_of
from .hints import Attempt, Check, need


def _kept(attempt: Attempt) -> str:
    cases: tuple[tuple[list[int], list[int], str], ...] = (
        ([7, 8, 9], [7, 8, 9, 4], "the whole draft is right, and one more token comes for free"),
        ([7, 8, 9], [7, 5, 9, 4], "the second guess is wrong: what stands in its place?"),
        ([7, 8, 9], [6, 8, 9, 4], "the first guess is wrong; the later ones were judged behind it"),
        ([], [3], "without a draft the call is an ordinary step"),
        ([7, 7], [7, 7, 7], "equal tokens are kept one by one"),
    )
    for draft, chosen, hint in cases:
        got = attempt(list(draft), list(chosen))
        need(
            isinstance(got, list | tuple),
            f"Return a list of tokens, in place of {got!r}",
        )
        case = f"Draft {draft}, chosen by the model {chosen}: "
        need(
            len(got) >= 1,
            f"{case}nothing is returned, and the model's own next token is always right",
        )
        need(
            len(got) <= len(draft) + 1,
            f"{case}{len(got)} tokens are more than the draft and one",
        )
        need(list(got) == kept_of(draft, chosen), f"{case}{list(got)} is not it: {hint}")
    return "Every call gives at least one token, and the text is the one without drafts."


CHECKS: dict[str, Check] = {"70.1": _kept}
