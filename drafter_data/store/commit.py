"""Writing one state file so that it is either whole under its final name or not there.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from drafter_data.engines.base import ClaimedDump
from drafter_data.files import fsync_folder, start_writeback, temporary_name
from drafter_data.safetensors_file import state_header
from drafter_data.verification import hash_and_check

STATE_MODE = 0o444
WRITEBACK_BYTES = 8 << 20
"""The disk is set to work every so many bytes, while the next ones are checked."""


def write_state(final: Path, dump: ClaimedDump, token_ids_s: NDArray[np.int64], label: str) -> tuple[int, str]:
    """Checks the states' content and puts them under `final`; returns the file's bytes and its xxh3-128 hex.

    A dump that is one file in the state form on the store's file system moves in and keeps its blocks: it is linked, leaves the
    dump folder, and only then has its label overwritten by the canonical header. Any other is copied. Raises DumpRejected or
    OSError, and then leaves nothing.
    """
    header_bytes = dump.whole_file[2] if dump.whole_file else None
    shape_slh = (len(token_ids_s), dump.states_slh.shape[1], dump.states_slh.shape[2])
    header = state_header(shape_slh, dump.dtype, header_bytes)
    ids = token_ids_s.astype("<i8").tobytes()
    digest = xxhash.xxh3_128(header + ids)
    temporary = final.with_name(temporary_name(final.name))
    try:
        if dump.whole_file and _link(dump.whole_file[0], temporary):
            start_writeback(dump.whole_file[0], 0, 0)  # 0: to its end
            hash_and_check(dump.states_slh, dump.dtype, digest, label)
            dump.leave()
            _make_state(dump.whole_file[0], header)
        else:
            with _new_state(temporary) as writer:
                writer.write(memoryview(header + ids))
                hash_and_check(dump.states_slh, dump.dtype, digest, label, writer.write)
        temporary.replace(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(final.parent)
    return len(header) + len(ids) + dump.states_slh.nbytes, digest.hexdigest()


def _link(dump_descriptor: int, temporary: Path) -> bool:
    """Gives the inode itself (not whatever now has its name) a name in the store; False on another file system or mount."""
    if os.fstat(dump_descriptor).st_dev != temporary.parent.stat().st_dev:
        return False
    # Only linkat(2) with a folder descriptor follows the link in /proc/self/fd; link(2) would try to link that link itself.
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(dump_descriptor), temporary, src_dir_fd=folder, follow_symlinks=True)
    except OSError as error:
        if error.errno == errno.EXDEV:  # one file system, but mounted twice, as folders of a container are
            return False
        raise
    finally:
        os.close(folder)
    return True


def _make_state(dump_descriptor: int, header: bytes) -> None:
    """Makes a verified dump a state file: canonical header, read-only, durable."""
    os.pwrite(dump_descriptor, header, 0)
    os.fchmod(dump_descriptor, STATE_MODE)
    os.fsync(dump_descriptor)


class _StateWriter:
    """Writes a new file in order, with the disk at work behind."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = self._started = 0

    def write(self, block: memoryview) -> None:
        """Appends a block."""
        while block:
            count = os.write(self._descriptor, block)
            self._written += count
            block = block[count:]
        if self._written - self._started >= WRITEBACK_BYTES:
            start_writeback(self._descriptor, self._started, self._written - self._started)
            self._started = self._written


@contextmanager
def _new_state(temporary: Path) -> Generator[_StateWriter]:
    """A new file, made read-only and durable at the end."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield _StateWriter(descriptor)
        os.fchmod(descriptor, STATE_MODE)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
