"""JSON values of a file that is no JSON lines: one array of records, one object, or objects written over several lines.

The file is decoded value by value through a window, so that an array of any size takes the memory of its largest record.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

from drafter_data.runs import reasons
from drafter_data.runs.json_lines import BYTE_ORDER_MARK, next_record, why_broken
from drafter_data.runs.records import KEPT_BYTES, MAX_RECORD_BYTES, Record, broken

_BLOCK_BYTES: Final = 1 << 20
_DECODER: Final = json.JSONDecoder()
_BETWEEN_LETTERS: Final = " \t\r\n,"
_BETWEEN: Final = re.compile(rf"[{_BETWEEN_LETTERS}]*")
_MARK: Final = re.compile(r'["{}\[\],\n]')
_IN_STRING: Final = re.compile(r'["\\]')


@dataclass(slots=True)
class _Brackets:
    """Looks for the end of a value by its brackets, strings respected, in text that comes in parts; no JSON is decoded.

    No pattern spans a string: such a pattern takes memory for each of its letters.
    """

    depth: int = 0
    inside: bool = False
    escaped: bool = False

    def end(self, text: str, at: int) -> int | None:
        """Where the value ends in the part `text[at:]`; None where it goes on in the next part."""
        while True:
            if self.escaped:
                if at == len(text):
                    return None
                at, self.escaped = at + 1, False
            match = (_IN_STRING if self.inside else _MARK).search(text, at)
            if match is None:
                return None
            at, mark = match.end(), match.group()
            if mark == "\\":
                self.escaped = True
            elif mark == '"':
                self.inside = not self.inside
            elif mark in "{[":
                self.depth += 1
            elif mark in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at if self.depth == 0 else match.start()
            elif self.depth == 0:
                return match.start()


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
        again = min(len(self.text), MAX_RECORD_BYTES - len(self.text))
        block = self._handle.read(max(_BLOCK_BYTES, again))
        if self._first:
            block, self._first = block.removeprefix(BYTE_ORDER_MARK), False
        self.ended = not block
        self.text += self._decoder.decode(block, final=not block)

    @property
    def is_full(self) -> bool:
        """Whether the value at hand is too long to be a record."""
        return len(self.text) - self.at > MAX_RECORD_BYTES

    def pass_value(self) -> None:
        """Goes behind the value at hand by its brackets, without holding it."""
        brackets = _Brackets()
        while (end := brackets.end(self.text, self.at)) is None:
            self.at = len(self.text)
            if self.ended:
                return
            self.more()
        self.at = end

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
        if end is None:
            yield _set_aside(window, number)
        else:
            window.at = end
            yield Record(number, value)
    yield Record(number, None, lines_only=True)


def _decode(window: _Window) -> tuple[Any, int | None]:
    while True:
        try:
            value, end = _DECODER.raw_decode(window.text, window.at)
        except (ValueError, RecursionError):
            if window.ended or window.is_full or _end_of(window.text, window.at) is not None:
                return None, None  # complete by its brackets and yet no JSON: reading on will not cure it
            window.more()
        else:
            if end < len(window.text) or window.ended:
                return value, end
            window.more()  # a number may go on in the next block


def _set_aside(window: _Window, number: int) -> Record:
    """The broken record at the window's position, which is then behind it: at the next complete row, or where the brackets end."""
    start, text = window.at, window.text
    bracket, following = _end_of(text, start), next_record(text, start + 1)
    if bracket is None and following == len(text) and not window.ended:
        window.pass_value()
        return broken(number, text[start : start + KEPT_BYTES], reasons.RECORD_TOO_LONG)
    if bracket is not None and (
        following == len(text) or (bracket <= following and not text[bracket:following].strip(_BETWEEN_LETTERS))
    ):
        following = bracket
    window.at = following
    raw = text[start:following].rstrip(_BETWEEN_LETTERS)
    return broken(number, raw, why_broken(raw))


def _end_of(text: str, start: int) -> int | None:
    """Where the value at `start` ends by its brackets; None where it does not end in this text."""
    end = _Brackets().end(text, start)
    return None if end is None else max(end, start + 1)
