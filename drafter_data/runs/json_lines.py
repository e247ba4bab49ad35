"""JSON records one a line, as bytes.

A record ends at byte 0x0A and nowhere else: U+2028, U+2029 and U+0085 stay inside their string. A byte-order mark is taken
off at the start of the file only. Lines that hold white space alone are no records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, Final

import orjson

from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.records import Record, broken
from drafter_data.runs.rows import ROW_COLUMNS

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
MAX_RECORD_BYTES: Final = 256 << 20
_BLOCK_BYTES: Final = 1 << 22
_MOST_TRIES: Final = 10_000
"""Places in a broken line where a record may begin that are tried, so that a hostile line takes bounded time."""
_DECODER: Final = json.JSONDecoder()
_WHITE = " \t\r\n"


def read_lines(handle: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Record]:
    """The records whose first byte lies in `start..end` of the file; line numbers count from 1 at `start`."""
    number = 0
    for line in _lines(handle, start, end):
        number += 1
        if not line or line.isspace():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            yield from split_line(number, line)
        else:
            yield Record(number, value)
    yield Record(number, None, lines_only=True)


def _lines(handle: IO[bytes], start: int, end: int | None) -> Iterator[bytes]:
    """Lines without their newline, block by block. A line that begins before `start` belongs to the piece before."""
    position = start
    if start:
        handle.seek(start - 1)
        position += len(handle.readline()) - 1
    rest: list[bytes] = []
    first = start == 0
    while end is None or position < end or rest:
        block = handle.read(_BLOCK_BYTES)
        if first:
            position += 3 if block.startswith(BYTE_ORDER_MARK) else 0
            block, first = block.removeprefix(BYTE_ORDER_MARK), False
        if not block:
            if rest:
                yield b"".join(rest)
            return
        *complete, last = block.split(b"\n")
        for line in complete:
            whole = b"".join((*rest, line)) if rest else line
            rest = []
            yield whole
            position += len(whole) + 1
            if end is not None and position >= end:
                return
        rest.append(last)
        if len(rest) * _BLOCK_BYTES > MAX_RECORD_BYTES:
            raise InputError(
                f"{getattr(handle, 'name', 'a file')}: a record of more than {MAX_RECORD_BYTES >> 20} MiB without a newline; "
                "is this JSON lines?",
                reason="record-too-long",
            )


def split_line(number: int, line: bytes) -> Iterator[Record]:
    """The records of a line that is no single JSON value.

    A killed writer leaves half a record, and the next one appends behind it on the same line: the broken part is set aside
    by itself and every complete record on the line is kept, also one that only lacks its newline.
    """
    text = line.decode(errors="surrogateescape")
    position = len(text) - len(text.lstrip(_WHITE))
    while position < len(text):
        value, end = _decode(text, position)
        if end is None:
            following = _next_record(text, position + 1)
            yield broken(number, text[position:following], _why(text[position:following]))
            end = following
        else:
            yield Record(number, value)
        position = end + len(text[end:]) - len(text[end:].lstrip(_WHITE))


def _decode(text: str, position: int) -> tuple[Any, int | None]:
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, None


def _next_record(text: str, position: int) -> int:
    """Where the next complete row begins (an object with a row's columns, not a turn inside the broken one), or the end."""
    for _ in range(_MOST_TRIES):
        position = text.find("{", position)
        if position < 0:
            break
        value, _end = _decode(text, position)
        if isinstance(value, dict) and ROW_COLUMNS.intersection(value):
            return position
        position += 1
    return len(text)


def _why(text: str) -> str:
    return reasons.NOT_UNICODE if any("\udc80" <= letter <= "\udcff" for letter in text) else reasons.MALFORMED
