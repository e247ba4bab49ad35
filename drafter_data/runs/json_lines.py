"""JSON records one a line, as bytes.

A record ends at byte 0x0A and nowhere else: U+2028, U+2029 and U+0085 stay inside their string. A byte-order mark is taken
off at the start of the file only. Lines that hold white space alone are no records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any, Final

import orjson

from drafter_data.runs import reasons
from drafter_data.runs.records import KEPT_BYTES, MAX_RECORD_BYTES, Record, broken
from drafter_data.runs.rows import ROW_COLUMNS

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BLOCK_BYTES: Final = 1 << 22
_MOST_TRIES: Final = 10_000
_MOST_LETTERS_TRIED: Final = 256 << 20
"""Places in a broken line where a record may begin, and letters read from them, so that a hostile line takes bounded time."""
_DECODER: Final = json.JSONDecoder()
_NO_UTF8: Final = re.compile("[\udc80-\udcff]")
_WHITE: Final = " \t\r\n"
_WHITE_RUN: Final = re.compile(r"[ \t\r\n]*")


def read_lines(handle: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Record]:
    """The records whose first byte lies in `start..end` of the file; line numbers count from 1 at `start`."""
    number = 0
    for line, size in _lines(handle, start, end):
        number += 1
        if size > MAX_RECORD_BYTES:
            yield broken(number, line.decode(errors="surrogateescape"), reasons.RECORD_TOO_LONG)
            continue
        if not line or line.isspace():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            yield from split_line(number, line)
        else:
            yield Record(number, value)
    yield Record(number, None, lines_only=True)


def _lines(handle: IO[bytes], start: int, end: int | None) -> Iterator[tuple[bytes, int]]:
    """Lines without their newline and their sizes, block by block; of a line that is too long, its beginning alone.

    A line that begins before `start` belongs to the piece before.
    """
    position = _first_line_start(handle, start, end)
    rest: list[bytes] = []
    held = 0  # bytes of the line at hand, whether they are kept in `rest` or not
    first = start == 0
    while end is None or position < end or held:
        block = handle.read(_BLOCK_BYTES)
        if first:
            position += 3 if block.startswith(BYTE_ORDER_MARK) else 0
            block, first = block.removeprefix(BYTE_ORDER_MARK), False
        if not block:
            if held:
                yield b"".join(rest), held
            return
        *complete, last = block.split(b"\n")
        for line in complete:
            size = held + len(line)
            rest = _within_limit(rest, line, size)
            yield rest[0] if len(rest) == 1 else b"".join(rest), size
            rest, held = [], 0
            position += size + 1
            if end is not None and position >= end:
                return
        held += len(last)
        rest = _within_limit(rest, last, held) if held else []


def _first_line_start(handle: IO[bytes], start: int, end: int | None) -> int:
    """Where the first line of a piece begins; `end` or behind it where no line does, without reading on from there."""
    if not start:
        return 0
    handle.seek(start - 1)
    position = start - 1
    while end is None or position < end:
        part = handle.readline(_BLOCK_BYTES)
        position += len(part)
        if part.endswith(b"\n") or not part:
            break
    return position


def _within_limit(rest: list[bytes], more: bytes, size: int) -> list[bytes]:
    """The parts of a line with one more part; once the line is too long, its first bytes alone."""
    if size <= MAX_RECORD_BYTES:
        return [*rest, more]
    return [b"".join((*rest, more[:KEPT_BYTES]))[:KEPT_BYTES]]


def split_line(number: int, line: bytes) -> Iterator[Record]:
    """The records of a line that is no single JSON value.

    A killed writer leaves half a record, and the next one appends behind it on the same line: the broken part is set aside
    by itself and every complete record on the line is kept, also one that only lacks its newline.
    """
    text = line.decode(errors="surrogateescape")
    position = len(text) - len(text.lstrip(_WHITE))
    while position < len(text):
        value, end, _ = _decode(text, position)
        if end is None or not isinstance(value, dict):
            following = next_record(text, position + 1)
            yield broken(number, text[position:following], why_broken(text[position:following]))
            end = following
        else:
            yield Record(number, value)
        position = _WHITE_RUN.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches nothing as well


def _decode(text: str, position: int) -> tuple[Any, int | None, int]:
    """The value at `position` and where it ends, or None; and how far the text was read to find out."""
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        return None, None, error.pos
    except (ValueError, RecursionError):
        return None, None, len(text)
    return value, end, end


def next_record(text: str, position: int) -> int:
    """Where the next complete row begins (an object with a row's columns, not a turn inside the broken one), or the end."""
    tried = 0
    for _ in range(_MOST_TRIES):
        position = text.find("{", position)
        if position < 0 or tried > _MOST_LETTERS_TRIED:
            break
        value, end, reached = _decode(text, position)
        if isinstance(value, dict) and ROW_COLUMNS.intersection(value):
            return position
        tried += max(reached - position, 0)
        position = end or position + 1
    return len(text)


def why_broken(text: str) -> str:
    """The reason code of a record that does not decode."""
    return reasons.NOT_UNICODE if _NO_UTF8.search(text) else reasons.MALFORMED
