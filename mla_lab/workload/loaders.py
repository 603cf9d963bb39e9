"""Readers of two public serving traces; errors name file and line.

- Azure LLM inference, CSV with TIMESTAMP, ContextTokens, GeneratedTokens
  (github.com/Azure/AzurePublicDataset, CC-BY; Patel et al., Splitwise, ISCA 2024).
- Mooncake, JSON lines with timestamp (ms), input_length, output_length, hash_ids
  (github.com/kvcache-ai/Mooncake, Apache-2.0; Qin et al., FAST 2025). hash_ids name the prompt's
  512-token blocks; they are checked and not kept: a shared prefix changes no length.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InvalidInput, invalid
from ..core.files import lines_of, parse_json
from .trace import Trace

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
#: lengths must fit the int32 of the kernels
MAX_TOKENS = 2**31 - 1
#: ten thousand years
MAX_MS = 3.2e14

#: (arrival in seconds on any clock, input tokens, output tokens)
Row = tuple[float, int, int]


def load_trace(path: str | Path) -> Trace:
    """Load either format; a first character `{` means JSON lines."""
    first = next((line for _, line in _lines(Path(path)) if line.strip()), "")
    return load_mooncake(path) if first.lstrip().startswith("{") else load_azure(path)


def load_azure(path: str | Path) -> Trace:
    """The Azure LLM inference CSV; further columns are ignored."""
    return _trace(Path(path), _azure_rows(Path(path)))


def load_mooncake(path: str | Path) -> Trace:
    """Mooncake's JSON lines; further keys are ignored."""
    return _trace(Path(path), _mooncake_rows(Path(path)))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines counted from 1. Invalid UTF-8 becomes a replacement character, which no number
    contains.
    """
    for number, line in lines_of(path, "trace"):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _trace(path: Path, rows: Iterator[Row]) -> Trace:
    table = list(rows)
    if not table:
        raise invalid("trace", f"{path} without a request", "at least one request")
    arrival, inputs, outputs = zip(*table, strict=True)
    seconds = np.array(arrival, dtype=np.float64)
    return Trace(
        path.name,
        seconds - seconds.min(),
        np.array(inputs, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
    )


def _bad(path: Path, line: int, got: str, supported: str) -> InvalidInput:
    return invalid(f"trace {path}, line {line}", got, supported)


def _azure_rows(path: Path) -> Iterator[Row]:
    header: list[str] = []
    for line, text in _lines(path):
        # no field of this schema holds a line break, so a line is a record
        try:
            fields = [field.strip() for field in next(csv.reader([text]), [])]
        except csv.Error as error:
            raise _bad(path, line, f"no CSV ({error})", "short fields between commas") from error
        if not any(fields):
            continue
        if not header:
            header = fields
            missing = [name for name in AZURE_COLUMNS if name not in header]
            if missing:
                raise _bad(path, line, f"no column {', '.join(missing)}", f"{AZURE_COLUMNS}")
            continue
        if len(fields) != len(header):
            raise _bad(path, line, f"{len(fields)} fields", f"{len(header)} as in the header")
        row = dict(zip(header, fields, strict=True))
        stamp, context, generated = (row[name] for name in AZURE_COLUMNS)
        yield (
            _seconds(path, line, stamp),
            _tokens(path, line, "ContextTokens", _number(context)),
            _tokens(path, line, "GeneratedTokens", _number(generated)),
        )


def _mooncake_rows(path: Path) -> Iterator[Row]:
    for line, text in _lines(path):
        if not text.strip():
            continue
        row = parse_json(text, f"trace {path}, line {line}")
        if not isinstance(row, dict):
            raise _bad(path, line, f"a JSON {type(row).__name__}", "one JSON object a line")
        missing = [name for name in MOONCAKE_KEYS if name not in row]
        if missing:
            raise _bad(path, line, f"no {', '.join(missing)}", f"{MOONCAKE_KEYS}")
        if not isinstance(row["hash_ids"], list):
            raise _bad(path, line, f"hash_ids {_short(row['hash_ids'])}", "a list of block ids")
        yield (
            _milliseconds(path, line, row["timestamp"]) / 1e3,
            _tokens(path, line, "input_length", row["input_length"]),
            _tokens(path, line, "output_length", row["output_length"]),
        )


def _seconds(path: Path, line: int, text: str) -> float:
    """Seconds since 1970 of "2023-11-16 18:15:46.6805900"; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        supported = "a date and time, such as 2023-11-16 18:15:46.6805900"
        raise _bad(path, line, f"TIMESTAMP {_short(text)}", supported) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _milliseconds(path: Path, line: int, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_MS:
        raise _bad(path, line, f"timestamp {_short(value)}", f"milliseconds from 0 to {MAX_MS:g}")
    return float(value)


def _short(value: Any) -> str:
    """A value for a message, shortened."""
    return repr(value)[:60]


def _tokens(path: Path, line: int, name: str, value: Any) -> int:
    """A JSON number that counts tokens; a bool, a fraction and a text are none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise _bad(path, line, f"{name} {_short(value)}", f"a whole number from 0 to {MAX_TOKENS}")
    return value


def _number(text: str) -> int | str:
    """The whole number that a CSV field spells, else the field as it is."""
    # ten digits hold every legal length; int() of a very long text would raise
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else text
