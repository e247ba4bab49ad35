"""JSON values of a file that is no JSON lines: one array of records, one object, or objects written over several lines.

The file is decoded value by value through a window, so that an array of any size takes the memory of its largest record.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, Final

from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.json_lines import BYTE_ORDER_MARK, MAX_RECORD_BYTES
from drafter_data.runs.records import Record, broken

_BLOCK_BYTES: Final = 1 << 20
_DECODER: Final = json.JSONDecoder()
_BETWEEN: Final = re.compile(r"[ \t\r\n,]*")
_STRUCTURE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\],\n]', re.DOTALL)
"""A whole string, a quotation mark that begins none, or a letter that matters."""


class _Window:
    """The text that is at hand, and the position in it. Bytes that are no UTF-8 become lone surrogates (`surrogateescape`)."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._first = True
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> None:
        """Reads on: as much again as is held, so that a large value is decoded few times. What lies behind is let go."""
        self.text, self.at = self.text[self.at :], 0
        if len(self.text) > MAX_RECORD_BYTES:
            raise InputError(
                f"{getattr(self._handle, 'name', 'a file')}: a record of more than {MAX_RECORD_BYTES >> 20} MiB; is this JSON?",
                reason="record-too-long",
            )
        block = self._handle.read(max(_BLOCK_BYTES, len(self.text)))
        if self._first:
            block, self._first = block.removeprefix(BYTE_ORDER_MARK), False
        self.ended = not block
        self.text += self._decoder.decode(block, final=not block)

    def skip(self) -> str:
        """Passes white space and commas; the next letter, or nothing at the end of the file."""
        while True:
            match = _BETWEEN.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()


def read_values(handle: IO[bytes]) -> Iterator[Record]:
    """The records of the file, numbered from 1. A record that does not decode is set aside; the next one is looked for."""
    window = _Window(handle)
    in_array = window.skip() == "["
    window.at += in_array
    number = 0
    while letter := window.skip():
        if in_array and letter == "]":
            window.at += 1
            if not window.skip():
                break  # what follows the closing bracket is nothing, in a sound file
        number += 1
        value, end = _decode(window)
        if end is not None:
            yield Record(number, value)
        else:
            end = _end_of(window.text, window.at)
            end = len(window.text) if end is None else end
            raw = window.text[window.at : end]
            foreign = any("\udc80" <= mark <= "\udcff" for mark in raw)
            yield broken(number, raw, reasons.NOT_UNICODE if foreign else reasons.MALFORMED)
        window.at = end
    yield Record(number, None, lines_only=True)


def _decode(window: _Window) -> tuple[Any, int | None]:
    while True:
        try:
            value, end = _DECODER.raw_decode(window.text, window.at)
        except (ValueError, RecursionError):
            if window.ended or _end_of(window.text, window.at) is not None:
                return None, None  # complete by its brackets and yet no JSON: reading on will not cure it
            window.more()
        else:
            if end < len(window.text) or window.ended:
                return value, end
            window.more()  # a number may go on in the next block


def _end_of(text: str, start: int) -> int | None:
    """Where the value at `start` ends by its brackets, strings respected; None where it does not end in this text."""
    depth = 0
    for match in _STRUCTURE.finditer(text, start):
        mark = match.group()
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if depth <= 0:
                return match.end() if depth == 0 else max(match.start(), start + 1)
        elif mark in ",\n" and depth == 0:
            return max(match.start(), start + 1)
        elif mark == '"':
            return None  # a string without an end
    return None
