"""Writing files so that a killed process leaves either nothing or something that is swept.

Order: temporary name in the target folder, write, fsync, rename, fsync of the folder; the record that makes it count comes last.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

TEMPORARY_PREFIX = ".tmp-"
BLOCK_BYTES = 1 << 22
NO_HARD_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
"""What link(2) says of a file that can have no second name there: another file system or mount, or one without such links."""
READ_AHEAD_BYTES = 1 << 20
_OURS, _numbers = secrets.token_hex(4), count()
"""What tells the temporary names of this process from those of others, on other hosts too, and from each other."""
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux; preadv2(2)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def temporary_name(final: str) -> str:
    """A name in the same folder that every sweep recognises as unfinished."""
    return f"{TEMPORARY_PREFIX}{final[:64]}.{os.getpid()}.{_OURS}{next(_numbers):x}"


def fsync_folder(folder: Path) -> None:
    """Makes renames and unlinks in `folder` survive a power cut."""
    _fsync(folder, os.O_DIRECTORY)


def fsync_file(path: Path) -> None:
    """Makes a file's bytes survive a power cut."""
    _fsync(path)


def _fsync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(final: Path, mode: int = 0o644) -> Generator[Path]:
    """Yields a temporary path beside `final`; on success it is synced and renamed, on any failure removed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(temporary_name(final.name))
    try:
        yield temporary
        temporary.chmod(mode)
        fsync_file(temporary)
        temporary.replace(final)
        fsync_folder(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(final: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Writes a small file whole or not at all."""
    with atomic_path(final, mode) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_new(final: Path, data: str) -> None:
    """Writes a small file whole unless it is there already: of two writers at once the first stays."""
    temporary = final.with_name(temporary_name(final.name))
    try:
        with temporary.open("x") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        with suppress(FileExistsError):
            os.link(temporary, final)
        fsync_folder(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_link(link: Path, target: Path) -> None:
    """Points the symbolic link `link` at `target` (relative) in one step."""
    temporary = link.with_name(temporary_name(link.name))
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)
    fsync_folder(link.parent)


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that is there."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def xxh3_of(path: Path) -> str:
    """xxh3-128 hex of a whole file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def start_writeback(descriptor: int, start: int, size: int) -> None:
    """Lets the disk begin with these bytes now, so that the fsync that follows has less to wait for. A hint: it proves nothing.

    Linux's sync_file_range(2), which Python does not wrap; nothing elsewhere.
    """
    call = _sync_file_range()
    if call is not None:
        call(descriptor, start, size, _SYNC_FILE_RANGE_WRITE)


def read_ahead(path: Path, head_bytes: int = 0, tail_bytes: int = 0) -> None:
    """Lets the disk begin with a file that is to be read soon, or with its first and last bytes alone. A hint: what is wrong with
    the file is for its reader to tell.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            head = min(head_bytes or size, size)
            for start in range(0, head, READ_AHEAD_BYTES):  # Linux cuts one request down to what the device takes
                os.posix_fadvise(descriptor, start, min(READ_AHEAD_BYTES, head - start), os.POSIX_FADV_WILLNEED)
            if tail_bytes:
                os.posix_fadvise(descriptor, max(0, size - tail_bytes), tail_bytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def page_aligned(size: int) -> memoryview:
    """Memory that begins at a page. What is copied to 1 to 31 bytes behind its own place within a page, as from a file's beginning
    into what malloc(3) gives, takes some processors two to five times as long (benchmarks/NOTES.md).
    """
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def read_through(path: Path, size: int, room: memoryview) -> None:
    """Brings a file of `size` bytes that is to be read soon into the page cache, unless it is there. Linux gives what is read in
    order larger pages than what `read_ahead` asks for, which take less to use (benchmarks/NOTES.md). What is wrong with the file,
    another size say, is for its reader to tell. `room` is overwritten.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size or _are_cached(descriptor, size):
                return
            left = size
            while left > 0 and (count := os.readv(descriptor, [room])):
                left -= count
        finally:
            os.close(descriptor)


def is_cached(path: Path, size: int) -> bool:
    """Whether a file of `size` bytes can be read without the disk, as far as both ends and the middle tell; no where the system or
    the file system does not tell.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _are_cached(descriptor, size)
        finally:
            os.close(descriptor)
    return False


def _are_cached(descriptor: int, size: int) -> bool:
    room = bytearray(1)
    try:
        return bool(_NOWAIT) and all(os.preadv(descriptor, [room], at, _NOWAIT) > 0 for at in (0, size // 2, max(size - 1, 0)))
    except OSError:
        return False


@cache
def _sync_file_range() -> Any:
    return _linux_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def sync_file_system(descriptor: int) -> None:
    """Makes everything that was written to the file system of an open folder survive a power cut. Raises OSError, also for writes
    that failed since the folder was opened.

    Linux's syncfs(2), which Python does not wrap; only where `syncs_as_one` says so.
    """
    if _syncfs()(descriptor):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def syncs_as_one(folder: Path) -> bool:
    """Whether one `sync_file_system` may stand for an fsync of each file: on local file systems with one journal for all, and since
    Linux 5.17, which tells of all that failed. Others (FUSE, network) may take the call and do nothing.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return _syncfs() is not None and release is not None and (int(release[1]), int(release[2])) >= (5, 17) and is_local(folder)


def is_local(folder: Path) -> bool:
    """Whether a folder is known to lie on a disk of this host: on ext4 or XFS."""
    return _file_system_type(folder) in {"ext4", "xfs"}


def _file_system_type(folder: Path) -> str:
    """What /proc/self/mountinfo (proc_pid_mountinfo(5)) calls the file system of a folder; nothing where it does not tell."""
    with suppress(OSError):
        device = folder.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split(" ")[2] == wanted:
                return source.split(" ")[0]
    return ""


@cache
def _syncfs() -> Any:
    return _linux_call("syncfs", ctypes.c_int)


def _linux_call(name: str, *arguments: Any) -> Any:
    """A function of Linux's C library, or None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes = arguments
        call.restype = ctypes.c_int
    return call


def append_line(path: Path, line: bytes) -> None:
    """Appends one fsynced line. What a killed writer left without an end is ended first, so that it costs no other line.

    Raises OSError.
    """
    with path.open("ab+") as handle:
        if handle.seek(0, os.SEEK_END):
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                handle.write(b"\n")
        handle.write(line + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


@contextmanager
def exclusive(path: Path) -> Generator[None]:
    """Holds the lock of a file, which is made with its folder where it is missing, against other threads, processes and hosts.

    A regular file open for writing: on NFS a lock on a folder, or on a file open for reading, is this host's alone. On a file
    system that is mounted read-only nothing is held, since nothing can be changed. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
