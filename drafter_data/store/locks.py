"""Locks on parts of the states' keys, against other threads, processes and hosts: a byte of a file for each beginning of a key.

A lock file for each folder of states would be made in every new store, and of fifty commits that wait for the disk together many
would wait for each other. Of one file some network file systems lock only so many bytes at once: there are sixteen.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HEX = "0123456789abcdef"
DIGITS = 4
"""Hex digits of a key that choose its byte; the first of them chooses the file."""
_LOCK_AND_WAIT = getattr(fcntl, "F_OFD_SETLKW", None)
"""Linux's locks of an open file, not of a process: they hold against other threads too (fcntl_locking(2))."""


class StateLocks:
    """The locks of one store. Regular files open for writing: on NFS others would be this host's alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, beginning: str) -> Generator[None]:
        """Holds all keys that begin so: a state's key, or the name of its folder. All keys, where that is neither.

        On a file system that is mounted read-only nothing is held, since nothing can be changed. Raises OSError.
        """
        digits = beginning[:DIGITS]
        known = bool(digits) and set(digits) <= set(HEX)
        with ExitStack() as held:
            try:
                for first in digits[0] if known else HEX:  # in one order everywhere: nobody waits for one who waits for him
                    descriptor = self._open(f"states-{first}")
                    held.callback(_let_go, descriptor)
                    _lock(descriptor, *_bytes_of(digits[1:] if known else ""))
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
            yield

    def _open(self, name: str) -> int:
        path, flags = self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._folder.mkdir(exist_ok=True)
            return os.open(path, flags, 0o666)


def _bytes_of(digits: str) -> tuple[int, int]:
    """(first, count) of the bytes of all keys that go on so after their first digit."""
    free = 16 ** (DIGITS - 1 - len(digits))
    return int(digits or "0", 16) * free, free


def _lock(descriptor: int, first: int, count: int) -> None:
    """Waits for bytes; for the whole file where the system has no such locks."""
    if _LOCK_AND_WAIT is not None:
        try:
            fcntl.fcntl(descriptor, _LOCK_AND_WAIT, _record(fcntl.F_WRLCK, first, count))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _let_go(descriptor: int) -> None:
    """Unlocks everything and closes. Closing alone lets go as well, but not on every FUSE file system."""
    try:
        if _LOCK_AND_WAIT is not None:
            with suppress(OSError):
                fcntl.fcntl(descriptor, _LOCK_AND_WAIT, _record(fcntl.F_UNLCK, 0, 0))
    finally:
        os.close(descriptor)


def _record(kind: int, first: int, count: int) -> bytes:
    """struct flock of Linux on 64 bits; a count of 0 goes to the end."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, first, count, 0)
