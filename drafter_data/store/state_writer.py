"""Writing a new state file in order: read into place, checked there, and written from there.

All but small files go past the page cache where the file system lets us (O_DIRECT, open(2)): a campaign writes more than the
memory holds and reads little of it back soon, and the kernel's copy into new pages costs more than all checks
(benchmarks/NOTES.md). Direct writes begin and end at whole pages, in memory and in the file; what is over stays in front of the
next block.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from drafter_data.files import page_aligned, start_writeback

STATE_MODE = 0o444
PAGE = 4096
"""A multiple of every device's block in use, and of what direct writes ask of memory."""
DIRECT_FROM_BYTES = 1 << 19
"""Below, a file is as fast through the page cache, and there when validation or a trainer looks for it."""
WRITE_BYTES = 1 << 19
"""A write is no smaller than this, but for the last; with blocks of 1 MiB it is one block and what was over of the last."""
WRITEBACK_BYTES = 8 << 20
"""Through the page cache the disk is set to work every so many bytes, while the next ones are checked."""

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
_spare: list[memoryview] = []
"""The last one given back is taken first: it is in the cache still. As many as there are threads would have to be cleared first."""


class Room:
    """Memory that blocks are read into, one after the other. What is not given back at the end is lost to the next one only."""

    def __init__(self) -> None:
        self._buffer = _buffer(2 * WRITE_BYTES)
        self._filled = 0

    def give_back(self) -> None:
        """Lets the next one have the memory; none of it may be in use any more."""
        _spare.append(self._buffer)
        self._buffer = memoryview(b"")

    def room(self, size: int) -> memoryview:
        """Room for the next `size` bytes; good until `took`."""
        needed = self._filled + size
        if needed > len(self._buffer):
            kept = bytes(self._buffer[: self._filled])
            self._buffer = _buffer(needed)
            self._buffer[: len(kept)] = kept
        return self._buffer[self._filled : needed]

    def took(self, size: int) -> None:
        """The next block may lie over this one, which is known to be right."""


class StateWriter(Room):
    """Writes what was put into its room to a new file of `size` bytes. Raises OSError; descriptor and file are the caller's.

    `direct`: large files may be written directly. Over a network each such write would be a round trip of its own.
    """

    def __init__(self, path: Path, size: int, *, direct: bool) -> None:
        super().__init__()
        self.descriptor = _new_file(path, direct=direct and size >= DIRECT_FROM_BYTES)
        self._written = self._started = 0

    def write(self, head: bytes) -> None:
        """Appends bytes that lie elsewhere."""
        self.room(len(head))[:] = head
        self.took(len(head))

    def took(self, size: int) -> None:
        self._filled += size
        whole = self._filled - self._filled % PAGE
        if whole >= WRITE_BYTES:
            self._write_out(whole)

    def finish(self) -> None:
        """Writes what is left, makes the file read-only, and lets the disk begin; an fsync of `descriptor` makes it durable."""
        if self._filled % PAGE:
            _leave_direct(self.descriptor)
        self._write_out(self._filled)
        os.fchmod(self.descriptor, STATE_MODE)
        start_writeback(self.descriptor, self._started, 0)  # 0: to its end

    def _write_out(self, count: int) -> None:
        left = self._buffer[:count]
        while left:
            try:
                written = os.write(self.descriptor, left)
            except OSError as error:
                if error.errno != errno.EINVAL or not _leave_direct(self.descriptor):
                    raise
                continue  # the file system took the flag at open, but does not write so
            left = left[written:]
            if left:
                _leave_direct(self.descriptor)  # what is left of a short write need not be whole pages
        over = self._filled - count
        self._buffer[:over] = self._buffer[count : self._filled]
        self._written, self._filled = self._written + count, over
        if self._written - self._started >= WRITEBACK_BYTES:
            start_writeback(self.descriptor, self._started, self._written - self._started)
            self._started = self._written


def _buffer(size: int) -> memoryview:
    """Memory of at least `size` bytes, which begins at a page."""
    with suppress(IndexError):  # another thread may take the last one
        while len(spare := _spare.pop()) < size:
            pass
        return spare
    return page_aligned(size + 2 * WRITE_BYTES)


def _new_file(path: Path, *, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | (_DIRECT if direct else 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
    path.unlink(missing_ok=True)  # some file systems make the file before they refuse the flag
    return os.open(path, flags, 0o600)


def _leave_direct(descriptor: int) -> bool:
    """From here on through the page cache; False where it was so already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
