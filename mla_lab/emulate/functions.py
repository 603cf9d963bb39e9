"""PTX functions in the place of their calls: a kernel is emulated as one list of instructions.

Of a module as libNVVM writes it: parameters are read by `ld.param` and passed by `st.param`, in a
block of their own around each call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from ..core.errors import invalid

_FUNCTION = re.compile(r"\.func\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)\s*\{", flags=re.S)
_CALL = re.compile(r"\{([^{}]*?\bcall(?:\.uni)?\s*(?:\(([^)]*)\)\s*,\s*)?([\w$]+)[^{}]*)\}")
_PARAM = re.compile(r"\.param\s+\.\w+\s+([\w$]+)")
_PASSED = re.compile(r"st\.param\.(\w+)\s+\[([\w$]+)(?:\+0)?\]\s*,\s*([^;]+);")
_TAKEN = re.compile(r"ld\.param\.(\w+)\s+([^,]+),\s*\[([\w$]+)(?:\+0)?\]\s*;")


class Function(NamedTuple):
    """A device function: what it returns and takes by name, and the text between its braces."""

    results: list[str]
    params: list[str]
    body: str


def without_calls(text: str) -> str:
    """A module whose calls are replaced by the functions' bodies, which are left out. Raises
    InvalidInput for a call of a function that the module does not define, for one of a function
    inside itself, and for one whose values do not fit the function's."""
    functions: dict[str, Function] = {}
    while head := _FUNCTION.search(text):
        end = _closing(text, head.end())
        results, params = (_PARAM.findall(head[i] or "") for i in (1, 3))
        functions[head[2]] = Function(results, params, text[head.end() : end])
        text = text[: head.start()] + text[end + 1 :]
    return _expanded(text, functions, count(), ())


def _expanded(
    text: str, functions: dict[str, Function], numbers: Iterator[int], inside: tuple[str, ...]
) -> str:
    """The text with the function's body in the place of each call, and so in these bodies.
    numbers: one for each call; inside: the functions in whose bodies the text lies."""
    while call := _CALL.search(text):
        name = call[3]
        if name not in functions:
            raise invalid("PTX", f"a call of {name}", tuple(functions) or "no functions")
        if name in inside:
            raise invalid("PTX", f"a call of {name} inside itself", "functions without recursion")
        body = _expanded(functions[name].body, functions, numbers, (*inside, name))
        function = functions[name]._replace(body=body)
        try:
            body = _inlined(function, call[1], f"c{next(numbers)}")
        except (KeyError, ValueError) as error:
            supported = "one ld.param and st.param of each value, without an offset"
            raise invalid("PTX", f"a call of {name} ({error})", supported) from error
        text = text[: call.start()] + body + text[call.end() :]
    return text


def _closing(text: str, at: int) -> int:
    """Where the brace that was opened before `at` closes."""
    depth = 1
    for m in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if m[0] == "{" else -1
        if depth == 0:
            return m.start()
    raise invalid("PTX", "a function without its end", "a closing brace")


def _names(found: re.Match[str] | None) -> list[str]:
    """Names in the parentheses of a call, of which there may be none."""
    return [name.strip() for name in found[1].split(",") if name.strip()] if found else []


def _inlined(function: Function, call: str, mark: str) -> str:
    """The body with registers and labels of this call alone, its parameters as moves."""
    body = function.body
    names = re.findall(r"\.reg\s+\.\w+\s+(%\w+?)<\d+>", body)
    for name in sorted(names, key=len, reverse=True):
        body = re.sub(rf"{name}(?=\d|<\d)", f"%{mark}{name[1:]}", body)
    body = re.sub(r"\$L__[\w$]+", rf"\g<0>_{mark}", body)
    values = {name: value.strip() for _, name, value in _PASSED.findall(call)}
    order = _names(re.search(r"\(([^)]*)\)\s*;", call))
    given = {p: values[a] for p, a in zip(function.params, order, strict=True)}
    body = _TAKEN.sub(lambda m: f"mov.{m[1]} {m[2]}, {given[m[3]]};", body)
    returned = {name: f"%{mark}_{name}" for name in function.results}
    kinds: dict[str, str] = {}

    def leave(m: re.Match[str]) -> str:
        kinds[m[2]] = m[1]
        return f"mov.{m[1]} {returned[m[2]]}, {m[3]};"

    body = re.sub(r"\bret\s*;", f"bra $L__end_{mark};", _PASSED.sub(leave, body))
    back = zip(_names(re.search(r"\(([^)]*)\)\s*,", call)), function.results, strict=True)
    results = {name: returned[result] for name, result in back}
    after = "".join(f"mov.{kind} {to}, {results[name]};" for kind, to, name in _TAKEN.findall(call))
    declared = "".join(f".reg .{kinds[name]} {returned[name]};" for name in function.results)
    return f"{declared}{body}$L__end_{mark}:\n{after}"
