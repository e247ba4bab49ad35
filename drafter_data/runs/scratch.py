"""The hidden folder in which a merge works, beside the dataset's own: renamed at the end, swept where a merge was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from data_contracts.dataset import RECORD_FILE, DatasetRecord
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.files import TEMPORARY_PREFIX, fsync_folder, temporary_name

_LOCK: Final = "merge.lock"
_GRACE_SECONDS: Final = 60
"""A folder this young without a lock may belong to a merge that is about to take it."""


@contextmanager
def scratch_folder(out: Path) -> Generator[Path]:
    """A fresh folder beside `out`, held by a lock while this process lives, and gone afterwards unless it was renamed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out)
        scratch = out.with_name(temporary_name(out.name))
        scratch.mkdir()
    except OSError as error:
        raise InputError(
            f"{out.parent}: cannot be written: {error.strerror}; name an --out whose parent folder is writable",
            reason="target-unwritable",
        ) from error
    lock = os.open(scratch / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def sweep(out: Path) -> None:
    """Removes what killed merges into `out` have left: hidden folders of its name that no process holds."""
    for left in out.parent.glob(f"{TEMPORARY_PREFIX}{out.name[:64]}.*"):
        try:
            lock = os.open(left / _LOCK, os.O_RDWR)
        except OSError:
            if left.is_dir() and time.time() - left.stat().st_mtime > _GRACE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # another merge is at work
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def check_target(out: Path) -> None:
    """Raises InputError where `out` is neither new, nor empty, nor a dataset."""
    if (out / RECORD_FILE).exists() or not out.exists():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise InputError(f"{out}: exists and is no dataset; name a new folder", reason="target-in-use")


def publish(scratch: Path, out: Path, record: DatasetRecord) -> DatasetRecord:
    """Renames the finished folder to its place; the same dataset that is there already stays as it is."""
    if (out / RECORD_FILE).exists():
        existing = Dataset.open(out).record
        if (existing.dataset_id, existing.rows_xxh3) == (record.dataset_id, record.rows_xxh3):
            return existing
        raise InputError(
            f"{out}: holds another dataset; expected {record.dataset_id} ({record.rows} rows), found {existing.dataset_id} "
            f"({existing.rows} rows); a dataset never changes: name a new folder",
            reason="target-in-use",
        )
    (scratch / RECORD_FILE).write_text(record.model_dump_json(indent=2) + "\n")
    (scratch / _LOCK).unlink()
    for path in scratch.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    fsync_folder(scratch)
    if out.exists():
        out.rmdir()  # an empty folder that was made for it
    scratch.rename(out)
    fsync_folder(out.parent)
    return record
