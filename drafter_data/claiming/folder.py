"""A dump folder, opened once and then used only relative to its descriptor.

Others may write to it, so nothing in it is trusted: names are plain, links are not followed, only regular files of this user are
opened, and the folder itself must be ours and closed to others (0700).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from drafter_data.errors import DumpRejected, LeaseHeld, PreflightRefused

MAX_HEADER_BYTES = 1 << 16
LOCK_NAME = ".drafter-data.lock"


class DumpFolder:
    """An open folder descriptor. All names given to it must be plain names inside the folder."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._locks: list[int] = []

    @classmethod
    def open(cls, path: Path) -> DumpFolder:
        """Opens a dump folder. Raises PreflightRefused unless it is a real folder, ours, mode 0700 and writable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise PreflightRefused(
                f"dump folder {path}: {error.strerror}; expected a folder that is no link; make it with `mkdir -m 700 {path}`",
                reason="dump-folder-missing",
            ) from error
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(descriptor)
            raise PreflightRefused(
                f"dump folder {path}: expected to be ours with mode 0700, found user {found.st_uid} and mode "
                f"{stat.S_IMODE(found.st_mode):04o}; `chmod 700 {path}`, or name a folder of your own",
                reason="dump-folder-not-ours",
            )
        folder = cls(path, descriptor)
        try:
            folder._test_write()
        except OSError as error:
            os.close(descriptor)
            raise PreflightRefused(
                f"dump folder {path} cannot be written to: {error.strerror}; free space there, or name a writable folder",
                reason="dump-folder-not-writable",
            ) from error
        return folder

    def _test_write(self) -> None:
        name = f".test-{secrets.token_hex(8)}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        try:
            os.write(descriptor, b"\0" * 4096)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(name, dir_fd=self.descriptor)

    def names(self) -> list[str]:
        """All names in the folder."""
        return os.listdir(self.descriptor)  # noqa: PTH208 - by descriptor

    def open_file(self, name: str, *, writable: bool = False) -> int:
        """Opens a regular file of ours. Raises FileNotFoundError, or DumpRejected (`hostile-entry`) for anything else."""
        return open_regular(name, self.descriptor, writable=writable)

    def open_subfolder(self, name: str) -> int:
        """Opens a folder inside. Raises FileNotFoundError, or DumpRejected (`hostile-entry`) for a link or a file."""
        try:
            descriptor = os.open(
                plain_name(name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DumpRejected(
                f"{name!r} in the dump folder is no folder of ours: {error.strerror}", reason="hostile-entry"
            ) from error
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            raise DumpRejected(f"{name!r} in the dump folder belongs to another user", reason="hostile-entry")
        return descriptor

    def remove(self, name: str) -> None:
        """Removes a file, or a folder of plain files; what is not there any more is fine."""
        plain_name(name)
        with suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except (IsADirectoryError, PermissionError):
                self._remove_folder(name)

    def _remove_folder(self, name: str) -> None:
        descriptor = self.open_subfolder(name)
        try:
            for inner in os.listdir(descriptor):  # noqa: PTH208 - by descriptor
                os.unlink(inner, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=self.descriptor)

    def lock(self, name: str, holder: str) -> None:
        """Holds `name` in the folder until close. Raises LeaseHeld, with the holder named, when another process has it."""
        while True:
            descriptor = os.open(
                plain_name(name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor
            )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                found = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise LeaseHeld(
                    f"dump folder {self.path} is in use by {found}; unlabelled dumps have one owner: wait, or stop that run",
                    reason="dump-folder-held",
                ) from error
            if self._is_named(name, descriptor):
                break
            os.close(descriptor)  # a sweep took it for a dead run's between our open and our lock
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        self._locks.append(descriptor)

    def _is_named(self, name: str, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def remove_dead_lock(self, name: str) -> bool:
        """Removes a lock file whose holder is gone; False when a living process holds it."""
        try:
            descriptor = os.open(plain_name(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.remove(name)  # under the lock: whoever opened it meanwhile sees that it has no name any more
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def size_of(self, name: str) -> int:
        """Bytes of an entry; -1 when it is gone. Links are not followed."""
        try:
            return os.stat(plain_name(name), dir_fd=self.descriptor, follow_symlinks=False).st_size
        except OSError:
            return -1

    def free_bytes(self) -> int:
        """Bytes that can still be written there."""
        found = os.fstatvfs(self.descriptor)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Gives back locks and the descriptor."""
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()
        os.close(self.descriptor)


def plain_name(name: str) -> str:
    """`name` if it cannot leave its folder. Raises DumpRejected (`hostile-name`)."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name) > 255:
        raise DumpRejected(
            f"{name[:80]!r} is no plain file name; nothing outside the dump folder is touched", reason="hostile-name"
        )
    return name


def open_regular(name: str, folder_descriptor: int, *, writable: bool = False) -> int:
    """Opens a regular file of ours inside an open folder, without following links or waiting on a FIFO."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(plain_name(name), flags, dir_fd=folder_descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DumpRejected(f"{name!r} in the dump folder is no file of ours: {error.strerror}", reason="hostile-entry") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise DumpRejected(f"{name!r} in the dump folder is no regular file of ours", reason="hostile-entry")
    return descriptor
