"""Receipts: the append-only proof of what is in the store, and the index derived from it.

Each writer appends to its own file, so a torn last line (a power cut) is never followed by a good one; it is not counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from data_contracts.receipt import Receipt

_KEY_FIELD = b'"state_key":"'
_OFFSET_BITS = 40


class ReceiptLog:
    """All receipts of a store. The index holds 20-byte keys and file positions, about 200 bytes a receipt; lines stay on disk."""

    def __init__(self, folder: Path, writer: str) -> None:
        self._folder = folder
        self._writer = writer
        self._files: list[Path] = []
        self._numbers: dict[str, int] = {}
        self._read_bytes: dict[int, int] = {}
        self._where: dict[bytes, int] = {}
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Takes in what this and other writers have appended since the last look."""
        with self._lock:
            for path in sorted(self._folder.glob("*.jsonl")):
                self._read_new(path)

    def _read_new(self, path: Path) -> None:
        number = self._numbers.get(path.name)
        if number is None:
            number = self._numbers[path.name] = len(self._files)
            self._files.append(path)
        start = self._read_bytes.get(number, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as handle:
            handle.seek(start)
            for line in handle:
                if not line.endswith(b"\n"):
                    break
                key = _key_of(line)
                if key is not None:
                    self._where[key] = number << _OFFSET_BITS | start
                start += len(line)
        self._read_bytes[number] = start

    def __contains__(self, state_key: str) -> bool:
        return bytes.fromhex(state_key) in self._where

    def __len__(self) -> int:
        return len(self._where)

    def keys(self) -> Iterator[str]:
        """State keys with a receipt."""
        return (key.hex() for key in list(self._where))

    def find(self, state_key: str) -> Receipt | None:
        """The newest receipt of a state, or None."""
        where = self._where.get(bytes.fromhex(state_key))
        if where is None:
            return None
        with self._files[where >> _OFFSET_BITS].open("rb") as handle:
            handle.seek(where & ((1 << _OFFSET_BITS) - 1))
            return Receipt.model_validate_json(handle.readline())

    def all(self) -> Iterator[Receipt]:
        """Every receipt that the index names, one a state, file by file."""
        for number, path in enumerate(list(self._files)):
            position = 0
            with path.open("rb") as handle:
                for line in handle:
                    key = _key_of(line) if line.endswith(b"\n") else None
                    if key is not None and self._where.get(key) == number << _OFFSET_BITS | position:
                        yield Receipt.model_validate_json(line)
                    position += len(line)

    def append(self, receipt: Receipt) -> None:
        """Appends one fsynced line and indexes it."""
        line = receipt.model_dump_json().encode() + b"\n"
        with self._lock:
            path = self._folder / f"{receipt.chunk or 'loose'}.{self._writer}.jsonl"
            descriptor = self._handles.get(path.name)
            if descriptor is None:
                descriptor = self._handles[path.name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                _fsync_folder_of(path)
            os.write(descriptor, line)
            os.fsync(descriptor)
            self._read_new(path)

    def close(self) -> None:
        """Closes the writer's files."""
        with self._lock:
            for descriptor in self._handles.values():
                os.close(descriptor)
            self._handles.clear()


def _key_of(line: bytes) -> bytes | None:
    """The state key of a receipt line; None for a line that is no receipt (fsck names those)."""
    if line.startswith(b"{" + _KEY_FIELD) and line.endswith(b"}\n"):
        start = 1 + len(_KEY_FIELD)
        try:
            return bytes.fromhex(line[start : start + 40].decode())
        except ValueError:
            return None
    try:
        return bytes.fromhex(Receipt.model_validate_json(line).state_key)
    except (ValidationError, ValueError):
        return None


def _fsync_folder_of(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
