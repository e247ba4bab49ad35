"""Receipts: the append-only proof of what is in the store, and the index derived from it.

Each writer appends to its own file, so a torn last line (a power cut) is never followed by a good one; it is not counted.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from data_contracts.receipt import DroppedReceipt, Receipt
from drafter_data.files import fsync_folder

_DROPPED = b'{"dropped":"'
_OFFSET_BITS = 40
MOST_OPEN_FILES = 32
DROPPED_A_WRITE = 500


@dataclass(frozen=True)
class ReceiptLine:
    """One line of a receipts file: `key` is the state's 20 bytes, None where the line is no receipt."""

    path: Path
    offset: int
    text: bytes

    @property
    def key(self) -> bytes | None:
        return None if self.torn else _key_of(self.text)

    @property
    def torn(self) -> bool:
        """Cut off by a crash: it has no newline."""
        return not self.text.endswith(b"\n")


@dataclass(frozen=True)
class _Written:
    """Lines that this writer has appended, and where: one receipt, whose key is given, or others, without a key."""

    path: Path
    start: int
    size: int
    key: bytes | None


class ReceiptLog:
    """All receipts of a store. The index holds 20-byte keys and file positions, about 200 bytes a receipt; lines stay on disk."""

    def __init__(self, folder: Path, writer: str) -> None:
        self._folder = folder
        self._writer = writer
        self._files: list[Path] = []
        self._numbers: dict[str, int] = {}
        self._read_bytes: dict[int, int] = {}
        self._where: dict[bytes, int] = {}
        self._spare: dict[bytes, list[int]] = {}
        self._dropped: set[int] = set()
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._unsynced: dict[int, list[_Written]] = {}
        self._written = self._synced = 0
        self._lost_from: int | None = None

    def refresh(self) -> None:
        """Takes in what this and other writers have appended since the last look."""
        with self._lock:
            for path in sorted(self._folder.glob("*.jsonl")):
                self._read_new(path)

    def _read_new(self, path: Path) -> None:
        number = self._number_of(path.name)
        start = self._read_bytes.get(number, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as handle:
            handle.seek(start)
            for line in handle:
                if not line.endswith(b"\n"):
                    break
                if line.startswith(_DROPPED):
                    self._take_back(line)
                elif (number << _OFFSET_BITS | start) not in self._dropped and (key := _key_of(line)) is not None:
                    self._put(key, number << _OFFSET_BITS | start)
                start += len(line)
        self._read_bytes[number] = start

    def _number_of(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._files)
            self._files.append(self._folder / name)
        return number

    def _put(self, key: bytes, where: int) -> None:
        """Indexes a receipt. One that is there already is kept in reserve: files are read by name, so that of the two the newer,
        which no later line takes back, may be the one that was read first.
        """
        before = self._where.get(key)
        if before is not None and before != where:
            self._spare.setdefault(key, []).append(before)
        self._where[key] = where

    def _take_back(self, line: bytes) -> None:
        try:
            record = DroppedReceipt.model_validate_json(line)
        except ValidationError:
            return  # no receipt either: fsck names the line
        where = self._number_of(Path(record.file).name) << _OFFSET_BITS | record.offset
        self._dropped.add(where)
        key = bytes.fromhex(record.dropped)
        if self._where.get(key) == where:
            valid = [spare for spare in self._spare.pop(key, ()) if spare not in self._dropped]
            if valid:
                self._where[key], self._spare[key] = valid[-1], valid[:-1]
            else:
                del self._where[key]

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
            if not path.exists():
                continue
            position = 0
            with path.open("rb") as handle:
                for line in handle:
                    found = _parsed(line) if line.endswith(b"\n") else None
                    if found is not None and self._where.get(found[0]) == number << _OFFSET_BITS | position:
                        yield found[1]
                    position += len(line)

    def write(self, receipts: Sequence[Receipt]) -> None:
        """Appends receipts of one chunk, which count once `sync` has returned. Raises OSError; the first of them may stand then."""
        lines = [receipt.model_dump_json().encode() + b"\n" for receipt in receipts]
        keys = [bytes.fromhex(receipt.state_key) for receipt in receipts]
        self._write(receipts[0].chunk or "loose", lines, keys)

    def sync(self) -> None:
        """Returns once every line written so far is on disk and indexed. Raises OSError when any of them may be lost."""
        self._wait_for(self._written)

    def drop(self, reasons: Mapping[str, str], by: str = "fsck") -> int:
        """Takes back every receipt of the given state keys (key to reason): they count as not extracted. Returns how many.

        `by` names the file that the lines go to. They are written some at a time: a fsync each would take minutes for a hundred
        thousand states.
        """
        dropped, batch = 0, list[str]()
        for line in self.lines():
            raw = line.key  # parses the line
            key = "" if raw is None else raw.hex()
            if key in reasons:
                batch.append(_taken_back(key, line, reasons[key]).model_dump_json())
                dropped += 1
            if len(batch) == DROPPED_A_WRITE:
                self._append(by, "\n".join(batch))
                batch.clear()
        if batch:
            self._append(by, "\n".join(batch))
        return dropped

    def set_aside(self, line: ReceiptLine) -> None:
        """Marks a line that is no receipt as seen, so that fsck need not name it again."""
        self._append("fsck", _taken_back("", line, "receipt-unreadable").model_dump_json())

    def lines(self) -> Iterator[ReceiptLine]:
        """Every line that was not taken back, readable or not, a torn last one included."""
        self.refresh()
        for number, path in enumerate(list(self._files)):
            position = 0
            if not path.exists():
                continue
            with path.open("rb") as handle:
                for line in handle:
                    if not line.startswith(_DROPPED) and (number << _OFFSET_BITS | position) not in self._dropped:
                        yield ReceiptLine(path, position, line)
                    position += len(line)

    def _append(self, prefix: str, record: str) -> None:
        self._wait_for(self._write(prefix, [record.encode() + b"\n"], [None]))

    def _write(self, prefix: str, lines: Sequence[bytes], keys: Sequence[bytes | None]) -> int:
        """Writes lines; returns a number to wait for. `keys`: of the state whose receipt each is, None for others."""
        with self._lock:
            path = self._folder / f"{prefix}.{self._writer}.jsonl"
            descriptor = self._handle(path)
            start = _write_whole(descriptor, b"".join(lines))
            unsynced = self._unsynced.setdefault(descriptor, [])
            for line, key in zip(lines, keys, strict=True):
                unsynced.append(_Written(path, start, len(line), key))
                start += len(line)
            self._written += 1
            return self._written

    def _wait_for(self, number: int) -> None:
        """Returns once what was written is on disk. Threads that wait for the disk together share one fsync a file.

        Raises OSError for every line that a failed write or fsync may have lost.
        """
        with self._sync_lock:
            if self._lost_from is not None and number >= self._lost_from:
                raise OSError(errno.EIO, "an fsync of the receipts failed")
            if self._synced < number:
                self._sync_all()

    def _sync_all(self) -> None:
        """Syncs and indexes everything written so far (under the sync lock)."""
        with self._lock:
            first, upto, batch = self._synced + 1, self._written, dict(self._unsynced)
            self._unsynced.clear()
        try:
            for unsynced in batch:
                os.fsync(unsynced)
        except OSError:
            self._lost_from = first  # pages that an fsync failed for may be gone: no later fsync of this writer proves anything
            raise
        with self._lock:
            for lines in batch.values():
                for line in lines:
                    self._index(line)
        self._synced = upto

    def _index(self, line: _Written) -> None:
        """Takes in a line of ours as `_read_new` would."""
        number = self._number_of(line.path.name)
        if line.key is None or self._read_bytes.get(number, 0) != line.start:
            self._read_new(line.path)
            return
        where = number << _OFFSET_BITS | line.start
        if where not in self._dropped:
            self._put(line.key, where)
        self._read_bytes[number] = line.start + line.size

    def _handle(self, path: Path) -> int:
        """The descriptor of one of our files (under the lock); the oldest is closed when there are many."""
        descriptor = self._handles.pop(path.name, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fsync_folder(path.parent)
        self._handles[path.name] = descriptor
        for name in list(self._handles)[:-MOST_OPEN_FILES]:
            if self._handles[name] not in self._unsynced and not self._sync_lock.locked():
                os.close(self._handles.pop(name))
        return descriptor

    def close(self) -> None:
        """Closes the writer's files."""
        with self._lock:
            for descriptor in self._handles.values():
                os.close(descriptor)
            self._handles.clear()


def _taken_back(key: str, line: ReceiptLine, reason: str) -> DroppedReceipt:
    return DroppedReceipt(dropped=key, file=line.path.name, offset=line.offset, reason=reason, dropped_at=time.time())


def _key_of(line: bytes) -> bytes | None:
    found = _parsed(line)
    return found[0] if found is not None else None


def _parsed(line: bytes) -> tuple[bytes, Receipt] | None:
    """State key and receipt of a line; None for a line that is no receipt (fsck names those)."""
    try:
        receipt = Receipt.model_validate_json(line)
        return bytes.fromhex(receipt.state_key), receipt
    except ValueError:  # ValidationError is one
        return None


def _write_whole(descriptor: int, lines: bytes) -> int:
    """Appends whole lines. A full disk may take only their beginning: those that it took whole stay, since another process may have
    read them already. Returns where the first one begins. Raises OSError, also when only some of them stay.
    """
    end = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, lines)
    except OSError:
        os.ftruncate(descriptor, end)
        raise
    if written != len(lines):
        os.ftruncate(descriptor, end + lines.rfind(b"\n", 0, written) + 1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return end
