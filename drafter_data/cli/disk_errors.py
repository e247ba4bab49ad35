"""What the operating system says about a path, as one line with what to do."""

from __future__ import annotations

import errno

_FULL = ("disk-full", "free space on this disk and run the command again, which goes on where it stopped")
_DENIED = ("not-permitted", "name a path that this user may read and write, or change its mode")
_DAMAGED = ("disk-error", "look at the disk (dmesg), mend it and run the command again")
_FAULTS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: ("disk-read-only", "mount the disk writable, or name a path on another one"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ENOTDIR: ("not-a-folder", "a folder was expected here and a file is there: name the folder"),
    errno.EISDIR: ("is-a-folder", "a file was expected here and a folder is there: name the file"),
    errno.ENOENT: ("path-missing", "name a path that exists"),
    errno.ENAMETOOLONG: ("path-invalid", "name a shorter path"),
    errno.ELOOP: ("path-invalid", "name a path without circular links"),
    errno.EMFILE: ("too-many-files", "raise the limit of open files (ulimit -n) and run the command again"),
    errno.EIO: _DAMAGED,
    errno.ESTALE: _DAMAGED,
}
_NOT_THE_USERS = {"disk-full", "disk-error", "too-many-files"}


def disk_error(error: OSError) -> tuple[str, int] | None:
    """The line `reason: path: what the system says; what to do`, and the exit status; None for an error that is no disk's."""
    fault = _FAULTS.get(error.errno or 0)
    if fault is None:
        return None
    reason, advice = fault
    path = error.filename2 or error.filename
    said = (error.strerror or str(error)).splitlines()[0]
    return f"{reason}: {f'{path}: ' if path else ''}{said}; {advice}", 1 if reason in _NOT_THE_USERS else 2
