"""From a claimed dump to a checked state file under a temporary name.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from drafter_data.engines.base import ClaimedDump
from drafter_data.files import NO_HARD_LINK, start_writeback, temporary_name
from drafter_data.safetensors_file import state_header
from drafter_data.store.state_writer import STATE_MODE, Room, StateWriter
from drafter_data.verification import hash_and_check


@dataclass(frozen=True)
class WrittenState:
    """A checked state under its temporary name, not durable yet. `bytes`: of the file; `xxh3`: its xxh3-128 hex; `moved`: it is the
    dump itself.
    """

    temporary: Path
    final: Path
    descriptor: int
    bytes: int
    xxh3: str
    moved: bool


@contextmanager
def written_state(
    final: Path, dump: ClaimedDump, token_ids_s: NDArray[np.int64], label: str, *, direct: bool
) -> Generator[WrittenState]:
    """Checks the states' content and puts them beside `final`; an error, here or in what is done with them, removes them unless
    they have got their final name. `direct`: see StateWriter.

    A dump that is one file in the state form on the store's file system moves in and keeps its blocks: it is linked, leaves the
    dump folder, and only then has its label overwritten by the canonical header. Any other is copied. Raises DumpRejected or
    OSError, and then leaves nothing.
    """
    shape_slh = (len(token_ids_s), dump.states_slh.shape[1], dump.states_slh.shape[2])
    head = state_header(shape_slh, dump.dtype, dump.whole_file[2] if dump.whole_file else None)
    ids = token_ids_s.astype("<i8").tobytes()
    size = len(head) + len(ids) + dump.states_slh.nbytes
    digest = xxhash.xxh3_128(head + ids)
    temporary = final.with_name(temporary_name(final.name))
    opened = -1
    try:
        if dump.whole_file and _link(dump.whole_file[0], temporary):
            descriptor = dump.whole_file[0]
            start_writeback(descriptor, 0, 0)  # 0: to its end
            room = Room()
            hash_and_check(dump.states_slh, dump.dtype, digest, label, room)
            room.give_back()
            dump.leave()
            os.pwrite(descriptor, head, 0)
            os.fchmod(descriptor, STATE_MODE)
        else:
            writer = StateWriter(temporary, size, direct=direct)
            descriptor = opened = writer.descriptor
            writer.write(head + ids)
            hash_and_check(dump.states_slh, dump.dtype, digest, label, writer)
            writer.finish()
            writer.give_back()
        yield WrittenState(temporary, final, descriptor, size, digest.hexdigest(), moved=opened < 0)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        if opened >= 0:
            os.close(opened)


def _link(dump_descriptor: int, temporary: Path) -> bool:
    """Gives the inode itself (not whatever now has its name) a name in the store; False where that cannot be."""
    try:
        # Only linkat(2) follows the link in /proc (link(2) would link that link itself), and Python calls it where a folder's
        # descriptor is given. Of an absolute path nothing is looked up in that folder, whatever it is.
        os.link(f"/proc/self/fd/{dump_descriptor}", temporary, src_dir_fd=dump_descriptor, follow_symlinks=True)
    except OSError as error:
        if error.errno in NO_HARD_LINK or error.errno == errno.ENOENT:  # there is no /proc
            return False
        raise
    return True
