"""The last step of many commits at once: written states become durable and get their names and receipts.

Those who write hand their states over and go on; one thread settles what has come together. Of a group all files are synced, then
all are renamed, then their folders are synced, then their receipts are written and synced. Each fsync has the disk write out its
own cache, which takes longer than a small state; so small ones, and folders, are synced by one syncfs(2) where that can be relied
on. It also waits for what others have left to write on that disk, which for large states costs more than it brings.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from data_contracts.receipt import Receipt
from drafter_data.files import fsync_folder, is_local, sync_file_system, syncs_as_one
from drafter_data.store.commit import WrittenState
from drafter_data.store.receipts import ReceiptLog

SMALL_BYTES, FEWEST_AS_ONE = 4 << 20, 3
"""A group of at least so many states, each smaller than that, is synced by syncfs(2). With states of 10 MB it gains nothing, and
waits for the engine's dumps where they lie on the same disk."""
LONGEST_SYNC_SECONDS, PATIENCE_SECONDS = 1.0, 60.0
"""Others have much to write to that disk when a syncfs takes longer: for a while each file is synced alone."""
MOST_UNSETTLED = 64
"""States that are written or wait for the disk at once; each holds a few descriptors."""
SMALL_COPIES_AT_ONCE = 2
"""Small states take the interpreter's time, which threads would only hand to and fro: they are written one at a time, until one had
to be copied: copies wait for the disk besides."""
ENOUGH, LONGEST_WAIT_SECONDS = 32, 0.02
"""A group waits for others that are being written, until there are so many, or so long."""
IDLE_SECONDS = 1.0
"""The thread that settles ends when nothing has come for so long."""


@dataclass(eq=False)
class _Commit:
    """A written state that waits for the disk. `held` is closed once it is settled, or given the error that it was not."""

    state: WrittenState
    receipt: Receipt
    held: ExitStack = field(default_factory=ExitStack)
    outcome: Future[Receipt] = field(default_factory=Future[Receipt])
    error: BaseException | None = None
    settled: bool = False


class _Turns:
    """What threading.Semaphore is, made of a queue: that one is written in Python, and took a tenth of a small state's time."""

    def __init__(self, count: int) -> None:
        self._free = SimpleQueue[None]()
        self.add(count)

    def add(self, count: int) -> None:
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)


class GroupCommit:
    """Settles states that are handed over, in one thread, while others write the next ones.

    `local`: the states lie on a disk of this host.
    """

    def __init__(self, states: Path, receipts: ReceiptLog) -> None:
        self._receipts = receipts
        self.local = is_local(states)
        # Before the first write: a sync of the file system tells each descriptor of what failed since it was opened.
        self._disk = os.open(states, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if syncs_as_one(states) else -1
        self._device = os.fstat(self._disk).st_dev if self._disk >= 0 else None
        self._alone_until = -math.inf
        self.room = _Turns(MOST_UNSETTLED)
        self._small = _Turns(1)
        self._copies = False
        self._changed = threading.Condition()
        self._coming = 0
        self._waiting: list[_Commit] = []
        self._thread: threading.Thread | None = None
        self._closing = False

    def close(self) -> None:
        """Settles what waits, and closes what it holds of the file system."""
        with self._changed:
            self._closing, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._close_disk()

    def _close_disk(self) -> None:
        disk, self._disk = self._disk, -1
        if disk >= 0:
            os.close(disk)

    @contextmanager
    def writing(self, size: int) -> Generator[None]:
        """Held while a state of `size` bytes is checked, written and handed over: others wait for it, to share a sync with it."""
        with self._changed:
            self._coming += 1
        try:
            with self._small if size < SMALL_BYTES else nullcontext():
                yield
        finally:
            with self._changed:
                self._coming -= 1
                if not self._coming:
                    self._changed.notify_all()

    def settle(self, state: WrittenState, receipt: Receipt, held: ExitStack) -> Future[Receipt]:
        """Has a state settled; the result comes once it is in the store, with its receipt, and what was `held` is closed. Raises
        RuntimeError where no thread can be started, and then has taken nothing over.

        It is an OSError when a step failed: it is told to those alone whose step it was, and given to `held`. A state that had got
        its name by then stays, without a receipt (fsck).
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._settle_all, name="commit", daemon=True)
                thread.start()  # where there can be no more threads this raises, and nothing is taken over
                self._thread = thread
            if not (state.moved or self._copies) and state.bytes < SMALL_BYTES:
                self._copies = True
                self._small.add(SMALL_COPIES_AT_ONCE - 1)
            mine = _Commit(state, receipt, held.pop_all())
            mine.outcome.set_running_or_notify_cancel()  # from here on nobody can take it back
            self._waiting.append(mine)
            if len(self._waiting) in (1, ENOUGH):
                self._changed.notify_all()
        return mine.outcome

    def _settle_all(self) -> None:
        """Settles group after group until nothing has come for a while."""
        while group := self._next_group():
            try:
                self._settle(group)
            except BaseException as error:  # noqa: BLE001 - whoever waits for a state is told
                for one in group:
                    if not one.settled:
                        one.error = one.error or error
            for one in group:
                _tell(one)

    def _next_group(self) -> list[_Commit]:
        """What waits, once it is worth a sync; nothing when the thread is to end."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting or self._closing, IDLE_SECONDS) or not self._waiting:
                self._thread = None
                return []
            self._changed.wait_for(lambda: not self._coming or len(self._waiting) >= ENOUGH or self._closing, LONGEST_WAIT_SECONDS)
            group, self._waiting = self._waiting, []
            return group

    def _settle(self, group: Sequence[_Commit]) -> None:
        as_one = self._may_sync_as_one(group)
        synced = self._synced(_singly(group), _sync_file, as_one=as_one)
        named = _tried(_singly(synced), _name)
        lasting = self._synced(_parts(named, lambda one: one.state.final.parent), _sync_folder, as_one=as_one)
        by_chunk = _parts(lasting, lambda one: one.receipt.chunk)
        written = _tried(by_chunk, lambda part: self._receipts.write([one.receipt for one in part]))
        for one in _tried([written], lambda _: self._receipts.sync()):
            one.settled = True

    def _may_sync_as_one(self, group: Sequence[_Commit]) -> bool:
        return (
            self._disk >= 0
            and len(group) >= FEWEST_AS_ONE
            and time.monotonic() >= self._alone_until
            and all(one.state.bytes < SMALL_BYTES and os.fstat(one.state.descriptor).st_dev == self._device for one in group)
        )

    def _synced(self, parts: list[list[_Commit]], sync_part: Callable[[list[_Commit]], None], *, as_one: bool) -> list[_Commit]:
        """Those that are on disk: by a sync of each part, or one for all.

        A failed write is told to the first syncfs(2) after it, whosever it was. From then on each file is synced alone, which tells
        of its own.
        """
        if as_one and self._disk >= 0:
            started = time.monotonic()
            try:
                sync_file_system(self._disk)
            except OSError:
                self._close_disk()
            else:
                if time.monotonic() - started > LONGEST_SYNC_SECONDS:
                    self._alone_until = time.monotonic() + PATIENCE_SECONDS
                return [one for part in parts for one in part]
        return _tried(parts, sync_part)


def _tell(one: _Commit) -> None:
    """Closes what was held for a state, and then says how it went."""
    error = one.error
    try:
        one.held.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except BaseException as failed:  # noqa: BLE001 - whoever waits for the state is told
        error = error or failed
    if error is None:
        one.outcome.set_result(one.receipt)
    else:
        one.outcome.set_exception(error)


def _name(part: list[_Commit]) -> None:
    part[0].state.temporary.replace(part[0].state.final)


def _sync_file(part: list[_Commit]) -> None:
    os.fsync(part[0].state.descriptor)


def _sync_folder(part: list[_Commit]) -> None:
    fsync_folder(part[0].state.final.parent)


def _singly(group: Iterable[_Commit]) -> list[list[_Commit]]:
    return [[one] for one in group]


def _parts(group: Iterable[_Commit], of: Callable[[_Commit], Hashable]) -> list[list[_Commit]]:
    """Parts of a group that are alike in something."""
    parts: dict[Hashable, list[_Commit]] = {}
    for one in group:
        parts.setdefault(of(one), []).append(one)
    return list(parts.values())


def _tried(parts: Iterable[list[_Commit]], step: Callable[[list[_Commit]], object]) -> list[_Commit]:
    """Does a step for each part; returns those of them for which it did not fail."""
    done = list[_Commit]()
    for part in parts:
        try:
            step(part)
        except OSError as error:
            for one in part:
                one.error = error
        else:
            done += part
    return done
