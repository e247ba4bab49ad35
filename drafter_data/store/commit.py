"""Writing one state file so that it is either whole under its final name or not there.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from drafter_data.engines.base import ClaimedDump
from drafter_data.files import fsync_folder, temporary_name
from drafter_data.safetensors_file import state_header
from drafter_data.verification import hash_and_check

STATE_MODE = 0o444


def write_state(final: Path, dump: ClaimedDump, token_ids_s: NDArray[np.int64], label: str) -> tuple[int, str]:
    """Checks the states' content and puts them under `final`; returns the file's bytes and its xxh3-128 hex.

    A dump that is one file in the state form on the store's file system is linked in and keeps its blocks (its header is made
    canonical in place first); any other is copied. Raises DumpRejected or OSError, and then leaves nothing.
    """
    header_bytes = dump.whole_file[2] if dump.whole_file else None
    shape_slh = (len(token_ids_s), dump.states_slh.shape[1], dump.states_slh.shape[2])
    header = state_header(shape_slh, dump.dtype, header_bytes)
    ids = token_ids_s.astype("<i8").tobytes()
    digest = xxhash.xxh3_128(header + ids)
    hash_and_check(dump.states_slh, dump.dtype, digest, label)
    temporary = final.with_name(temporary_name(final.name))
    try:
        if dump.whole_file and os.fstat(dump.whole_file[0]).st_dev == final.parent.stat().st_dev:
            _link_dump(temporary, dump.whole_file[0], header)
        else:
            _copy_states(temporary, header, ids, dump)
        temporary.replace(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(final.parent)
    return len(header) + len(ids) + dump.states_slh.nbytes, digest.hexdigest()


def _link_dump(temporary: Path, dump_descriptor: int, header: bytes) -> None:
    """Gives the verified inode itself (not whatever now has its name) a name in the store."""
    os.pwrite(dump_descriptor, header, 0)
    os.fchmod(dump_descriptor, STATE_MODE)
    os.fsync(dump_descriptor)
    # Only linkat(2) with a folder descriptor follows the link in /proc/self/fd; link(2) would try to link that link itself.
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(dump_descriptor), temporary, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _copy_states(temporary: Path, header: bytes, ids: bytes, dump: ClaimedDump) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as handle:
        for part in (header, ids, np.ascontiguousarray(dump.states_slh).reshape(-1).data.cast("B")):
            view = memoryview(part)
            while view:
                view = view[handle.write(view) :]
        os.fchmod(handle.fileno(), STATE_MODE)
        os.fsync(handle.fileno())
