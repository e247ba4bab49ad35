"""Locks on parts of the states' keys, against other threads, processes and hosts: one file, a byte for each beginning of a key.

A file for each folder would be made in every new store, and two of fifty commits that wait for the disk together would mostly wait
for each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

DIGITS = 4
"""Hex digits of a key that choose its byte."""
_LOCK_AND_WAIT = getattr(fcntl, "F_OFD_SETLKW", None)  # Linux; fcntl_locking(2)


class StateLocks:
    """The locks of one store. A regular file open for writing: on NFS others would be this host's alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spare: list[int] = []

    @contextmanager
    def hold(self, beginning: str) -> Generator[None]:
        """Holds all keys that begin so: a state's key, or the name of its folder. All keys, where that is neither.

        On a file system that is mounted read-only nothing is held, since nothing can be changed. Raises OSError.
        """
        try:
            descriptor = self._descriptor()
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            yield
            return
        try:
            _call(descriptor, fcntl.F_WRLCK, *_bytes_of(beginning))
            yield
            _call(descriptor, fcntl.F_UNLCK, 0, 0)  # to the end of all
        except BaseException:
            os.close(descriptor)  # which lets go of it too
            raise
        self._spare.append(descriptor)

    def close(self) -> None:
        """Closes what nobody holds."""
        with suppress(IndexError):
            while True:
                os.close(self._spare.pop())

    def _descriptor(self) -> int:
        """A descriptor of its own for each that holds: such a lock belongs to the open file, not to the process."""
        with suppress(IndexError):
            return self._spare.pop()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o666)
        except FileNotFoundError:
            self._path.parent.mkdir(exist_ok=True)
            return os.open(self._path, flags, 0o666)


def _bytes_of(beginning: str) -> tuple[int, int]:
    """(first, count) of the bytes of all keys that begin so."""
    digits = beginning[:DIGITS]
    if not digits or not set(digits) <= set("0123456789abcdef"):
        return 0, 16**DIGITS
    free = 16 ** (DIGITS - len(digits))
    return int(digits, 16) * free, free


def _call(descriptor: int, kind: int, first: int, count: int) -> None:
    """Locks or unlocks bytes; the whole file where the system has no such locks."""
    if _LOCK_AND_WAIT is not None:
        try:
            fcntl.fcntl(descriptor, _LOCK_AND_WAIT, struct.pack("hhqqi4x", kind, os.SEEK_SET, first, count, 0))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    fcntl.flock(descriptor, fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX)
