"""What every reader yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

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


MAX_RECORD_BYTES: Final = 64 << 20
"""A longer record is set aside: as Python's numbers it would take a gigabyte, and no engine takes millions of tokens."""
KEPT_BYTES: Final = 1 << 16
"""How much of a record that is too long is kept for the quarantine."""


def broken(line: int, raw: str, reason: str) -> Record:
    """A record that cannot be read; its text goes to the quarantine."""
    what = {
        reasons.NOT_UNICODE: "bytes that are no UTF-8",
        reasons.RECORD_TOO_LONG: f"more than {MAX_RECORD_BYTES >> 20} MiB in one record; are these rows?",
    }
    return Record(line, None, reason, what.get(reason, "no complete JSON object"), raw)
