"""What every reader yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drafter_data.runs import reasons


@dataclass(slots=True)
class Record:
    """One record of a file, or why there is none.

    `line` counts from 1 within the piece that was read: lines of JSON lines, elements of an array, rows of a table.
    `lines_only` marks the last item of a piece: it is no record and says how many lines the piece has.
    """

    line: int
    value: Any
    reason: str = ""
    detail: str = ""
    raw: str = ""
    lines_only: bool = False


def broken(line: int, raw: str, reason: str) -> Record:
    """A record that cannot be read; its text goes to the quarantine."""
    what = "bytes that are no UTF-8" if reason == reasons.NOT_UNICODE else "no complete JSON object"
    return Record(line, None, reason, what, raw)
