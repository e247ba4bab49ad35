"""Writing a file a sample, in parallel, so that a killed conversion goes on where it stopped.

A partial folder `.tmp-<name>.<request>` beside the final one holds what is done, and `converted.jsonl` names it with bytes and
checksum: what that file names and what is on the disk as named, bit for bit, is not written again. So nothing need be synced on the
way: the disk works behind the writers, and all is synced before the folder gets its final name. The folder is locked while it is
worked on.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import xxhash
from pydantic import ValidationError

from data_contracts.plan import Exclusion
from data_contracts.record import Record
from drafter_data.dataset import Dataset, Sample
from drafter_data.errors import DrafterDataError, InputError, LeaseHeld
from drafter_data.files import TEMPORARY_PREFIX, fsync_file, fsync_folder, start_writeback, temporary_name, xxh3_of
from drafter_data.trainers.folder import PROGRESS_FILE
from drafter_data.trainers.options import whole_number
from drafter_data.trainers.selection import HandoffRow, exclusion_of

_QUEUED_A_WORKER = 4
_BLOCK_BYTES = 1 << 20
_WRITEBACK_BYTES = 8 << 20

Buffer = bytes | bytearray | memoryview


class Converted(Record):
    """One line of converted.jsonl: a finished file, by its path in the folder."""

    file: str
    bytes: int
    xxh3: str


class HashingFile:
    """A new file that is hashed as it is written, while the bytes are in the cache; the disk begins with them at once."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = xxhash.xxh3_128()
        self._started = 0
        self.bytes = 0

    def write(self, data: Buffer) -> int:
        """Appends all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._digest.update(block)
            self._append(block)
        return len(view)

    def _append(self, block: memoryview) -> None:
        while block:
            count = os.write(self._descriptor, block)
            self.bytes += count
            block = block[count:]
        if self.bytes - self._started >= _WRITEBACK_BYTES:
            start_writeback(self._descriptor, self._started, self.bytes - self._started)
            self._started = self.bytes

    def flush(self) -> None:
        """Nothing is buffered; torch asks."""

    def close(self) -> str:
        """Closes the file and returns its xxh3-128 hex."""
        start_writeback(self._descriptor, self._started, 0)
        os.close(self._descriptor)
        return self._digest.hexdigest()


Write = Callable[[HandoffRow, Sample, HashingFile], None]
"""Writes the file of a row. Raises DrafterDataError when the row's state is not what its receipt says."""


@contextmanager
def resuming(out: Path, request: str) -> Generator[Path]:
    """Yields the partial folder of this request, kept when the work fails, renamed to `out` when it succeeds.

    Partial folders of other requests for `out` are removed. Raises InputError when `out` is taken, LeaseHeld when another process
    converts to it.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InputError(f"{out} is not an empty folder; name another one for the hand-off", reason="handoff-folder")
    parent = out.absolute().parent
    partial = parent / f"{TEMPORARY_PREFIX}{out.name}.{request[:16]}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}; name a writable folder", reason="handoff-folder") from error
    with _locked(partial):
        for other in parent.glob(f"{TEMPORARY_PREFIX}{out.name}.*"):
            if other != partial and len(other.suffix) == 17:
                shutil.rmtree(other, ignore_errors=True)
        for unfinished in partial.rglob(f"{TEMPORARY_PREFIX}*"):
            unfinished.unlink()
        yield partial
        (partial / PROGRESS_FILE).unlink(missing_ok=True)
        fsync_folder(partial)
        partial.replace(out)
        fsync_folder(parent)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise LeaseHeld(f"another process converts into {folder}; wait, or stop it", reason="conversion-running") from error
    finally:
        os.close(descriptor)


def workers_of(options: Mapping[str, str]) -> int:
    """How many samples to convert at once: the option `workers`, or one a core, up to eight."""
    return whole_number(options, "workers") or min(8, len(os.sched_getaffinity(0)))


def convert_rows(
    folder: Path,
    dataset: Dataset,
    rows: list[HandoffRow],
    file_of: Callable[[int], str],
    write: Write,
    workers: int,
    soon: Callable[[HandoffRow], None] = lambda _: None,
) -> tuple[dict[int, Converted], list[Exclusion]]:
    """Writes the file of every row and returns what was written, by place in `rows`, and the rows whose state failed its checks.

    Each file is written under a temporary name, renamed and then named in converted.jsonl; on return all are synced. `soon` is told
    of each row some way before it is written. Memory is bounded by `workers` states.
    """
    done = dict(_verified(folder))
    places = {row.row: n for n, row in enumerate(rows)}
    converted = {n: done[file_of(n)] for n in places.values() if file_of(n) in done}
    left = [row.row for n, row in enumerate(rows) if n not in converted]
    excluded: list[Exclusion] = []
    pending: dict[Future[Converted], int] = {}
    with (folder / PROGRESS_FILE).open("ab") as progress, ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:

        def settle(finished: set[Future[Converted]]) -> None:
            for future in finished:
                n = pending.pop(future)
                try:
                    converted[n] = future.result()
                except DrafterDataError as error:
                    excluded.append(exclusion_of(rows[n].sample_key, rows[n].state_key, error))
                    continue
                progress.write(converted[n].model_dump_json().encode() + b"\n")
                progress.flush()

        try:
            for sample in dataset.take(left):
                n = places[sample.row]
                soon(rows[n])
                pending[pool.submit(_convert_one, folder, file_of(n), rows[n], sample, write)] = n
                if len(pending) >= workers * _QUEUED_A_WORKER:
                    settle(wait(pending, return_when=FIRST_COMPLETED).done)
            settle(wait(pending).done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        _sync(pool, [folder / each.file for each in converted.values()])
    return converted, excluded


def _convert_one(folder: Path, name: str, row: HandoffRow, sample: Sample, write: Write) -> Converted:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name(path.name))
    try:
        file = HashingFile(temporary)
        try:
            write(row, sample, file)
        finally:
            digest = file.close()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Converted(file=name, bytes=file.bytes, xxh3=digest)


def _sync(pool: ThreadPoolExecutor, paths: list[Path]) -> None:
    """Makes files, and the folders that name them, durable; most of their bytes have reached the disk by now."""
    for _ in pool.map(fsync_file, paths):
        pass
    for parent in sorted({path.parent for path in paths}):
        fsync_folder(parent)
        fsync_folder(parent.parent)


def _verified(folder: Path) -> Iterator[tuple[str, Converted]]:
    """What an earlier run finished and the disk still holds, bit for bit. A torn last line is a file that is written again."""
    progress = folder / PROGRESS_FILE
    if not progress.is_file():
        return
    for line in progress.read_bytes().splitlines():
        try:
            entry = Converted.model_validate_json(line)
        except ValidationError:
            continue
        path = folder / entry.file
        if path.is_file() and path.stat().st_size == entry.bytes and xxh3_of(path) == entry.xxh3:
            yield entry.file, entry
