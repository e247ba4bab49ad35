"""JSON values of a file that is no JSON lines: one array of records, one object, or objects written over several lines.

The file is decoded value by value through a window, so that an array of any size takes the memory of its largest record.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any, Final

from drafter_data.runs import reasons
from drafter_data.runs.json_lines import BYTE_ORDER_MARK
from drafter_data.runs.records import Record, broken

_BLOCK_BYTES: Final = 1 << 20
_DECODER: Final = json.JSONDecoder()
_BETWEEN: Final = " \t\r\n,"


class _Window:
    """The text from the current position on. Bytes that are no UTF-8 become lone surrogates, as `surrogateescape` does."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._read_bytes = _BLOCK_BYTES
        self.text = ""
        self.ended = False
        self._first = True

    def more(self) -> None:
        """Reads on: as much again as is held, so that a large value is decoded few times."""
        block = self._handle.read(max(_BLOCK_BYTES, len(self.text)))
        if self._first:
            block, self._first = block.removeprefix(BYTE_ORDER_MARK), False
        self.ended = not block
        self.text += self._decoder.decode(block, final=not block)

    def skip(self, letters: str) -> None:
        """Takes off what begins with any of `letters`."""
        self.text = self.text.lstrip(letters)
        while not self.text and not self.ended:
            self.more()
            self.text = self.text.lstrip(letters)


def read_values(handle: IO[bytes]) -> Iterator[Record]:
    """The records of the file, numbered from 1. A record that does not decode is set aside; the next one is looked for."""
    window = _Window(handle)
    window.skip(_BETWEEN)
    in_array = window.text.startswith("[")
    if in_array:
        window.text = window.text[1:]
    number = 0
    while True:
        window.skip(_BETWEEN)
        if not window.text or (in_array and window.text[0] == "]" and not _rest_of(window)):
            break
        number += 1
        value, end = _decode(window)
        if end is not None:
            yield Record(number, value)
        else:
            end = _end_of_broken(window)
            raw = window.text[:end]
            foreign = any("\udc80" <= letter <= "\udcff" for letter in raw)
            yield broken(number, raw, reasons.NOT_UNICODE if foreign else reasons.MALFORMED)
        window.text = window.text[end:]
    yield Record(number, None, lines_only=True)


def _rest_of(window: _Window) -> str:
    """What follows the array's closing bracket: nothing, in a sound file."""
    window.text = window.text[1:]
    window.skip(_BETWEEN)
    return window.text


def _decode(window: _Window) -> tuple[Any, int | None]:
    while True:
        try:
            value, end = _DECODER.raw_decode(window.text)
        except (ValueError, RecursionError):
            if window.ended:
                return None, None
            if _end_of(window.text) is not None:
                return None, None  # complete by its brackets and yet no JSON: reading on will not cure it
            window.more()
        else:
            if end < len(window.text) or window.ended:
                return value, end
            window.more()  # a number may go on in the next block


def _end_of_broken(window: _Window) -> int:
    end = _end_of(window.text)
    return len(window.text) if end is None else end


def _end_of(text: str) -> int | None:
    """Where the value that begins `text` ends by its brackets, strings respected; None where it does not end."""
    depth, position, in_string = 0, 0, False
    while position < len(text):
        letter = text[position]
        if in_string:
            if letter == "\\":
                position += 1
            in_string = letter != '"'
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
            if depth <= 0:
                return position + (depth == 0)
        elif letter in ",\n" and depth == 0:
            return position
        position += 1
    return None
