"""Opening a run's file: local or through fsspec, plain or compressed, and finding out which JSON it is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any, Final, cast

import fsspec
import orjson
import pyarrow as pa

from drafter_data.errors import InputError
from drafter_data.runs.json_lines import BYTE_ORDER_MARK
from drafter_data.runs.sources import RunFile

_SNIFFED_BYTES: Final = 1 << 20


@contextmanager
def opened(file: RunFile) -> Generator[IO[bytes]]:
    """The file's bytes, decompressed. Any failure to read becomes an InputError that names the file."""
    try:
        with fsspec.open(file.url, "rb") as plain:
            if file.codec is None:
                yield cast("IO[bytes]", plain)
            else:
                with pa.CompressedInputStream(pa.PythonFile(plain, mode="r"), file.codec) as stream:
                    yield cast("IO[bytes]", stream)
    except (OSError, EOFError, pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise InputError(f"{file.url}: cannot be read: {_first_line(error)}", reason="run-unreadable") from error


def holds_lines(file: RunFile) -> bool:
    """Whether a JSON file holds one record a line, and not an array or a record over several lines."""
    with opened(file) as handle:
        head = handle.read(_SNIFFED_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
    first, _, rest = head.partition(b"\n")
    if head.startswith(b"["):
        return bool(rest.strip()) and _is_json(first)
    return ".jsonl" in file.name or ".ndjson" in file.name or not rest or _is_json(first)


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _first_line(error: Any) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
