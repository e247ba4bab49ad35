"""The last step of many commits at once: written states become durable and get their names and receipts.

Of a group all files are synced, then all are renamed, then their folders are synced, then their receipts are written and synced.
Each fsync has the disk write out its own cache, which takes longer than a small state; so small ones, and folders, are synced by
one syncfs(2) where that can be relied on. It also waits for what others have left to write on that disk, which for large states
costs more than it brings.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_contracts.receipt import Receipt
from drafter_data.files import fsync_folder, is_local, sync_file_system, syncs_as_one
from drafter_data.store.commit import WrittenState
from drafter_data.store.receipts import ReceiptLog

SMALL_BYTES, FEWEST_AS_ONE = 4 << 20, 3
"""A group of at least so many states, each smaller than that, is synced by syncfs(2). With states of 10 MB it gains nothing, and
waits for the engine's dumps where they lie on the same disk."""
LONGEST_SYNC_SECONDS, PATIENCE_SECONDS = 1.0, 60.0
"""Others have much to write to that disk when a syncfs takes longer: for a while each file is synced alone."""


@dataclass(eq=False)
class _Commit:
    """A state that waits for the disk. `turn` is let go when it is settled, or when its thread is to settle all that wait.

    `taken`: another thread settles it. `named`: it has its final name.
    """

    state: WrittenState
    receipt: Receipt
    error: OSError | None = None
    settled: bool = False
    taken: bool = False
    named: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        return self.settled or self.error is not None


class GroupCommit:
    """Settles the states of threads that wait together: one of them does it for all, while others write the next ones.

    `local`: the states lie on a disk of this host.
    """

    def __init__(self, states: Path, receipts: ReceiptLog) -> None:
        self._receipts = receipts
        self.local = is_local(states)
        # Before the first write: a sync of the file system tells each descriptor of what failed since it was opened.
        self._disk = os.open(states, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if syncs_as_one(states) else -1
        self._device = os.fstat(self._disk).st_dev if self._disk >= 0 else None
        self._alone_until = -math.inf
        self._lock = threading.Lock()
        self._waiting: list[_Commit] = []
        self._leader: _Commit | None = None

    def close(self) -> None:
        """Closes what it holds of the file system."""
        disk, self._disk = self._disk, -1
        if disk >= 0:
            os.close(disk)

    def settle(self, state: WrittenState, receipt: Receipt) -> None:
        """Returns once the state is in the store, with its receipt. Raises OSError when it is not: a step that fails for one state
        is told to that one's thread alone. A state that had got its name by then stays, without a receipt (fsck).
        """
        mine = _Commit(state, receipt)
        mine.turn.acquire()
        try:
            with self._lock:
                self._waiting.append(mine)
                leads = self._leader is None
                self._leader = self._leader or mine
            if not leads:
                mine.turn.acquire()
            if not mine.done:
                self._lead(mine)
        except BaseException:
            self._withdraw(mine)
            raise
        if mine.error is not None:
            raise mine.error

    def _lead(self, mine: _Commit) -> None:
        """Settles all that wait, and hands the lead to one of those that have come meanwhile. Others than `mine` whose settling was
        broken off wait again.
        """
        group = list[_Commit]()
        try:
            with self._lock:
                group, self._waiting = self._waiting, []
                for one in group:
                    one.taken = one is not mine
            self._settle(group)
        finally:
            with self._lock:
                left = [one for one in group if one is not mine and not one.done]
                for one in left:
                    one.taken = False
                self._waiting[:0] = left
                self._appoint()
            for one in group:
                if one.done:
                    one.turn.release()

    def _appoint(self) -> None:
        """Makes the one that has waited longest the leader (under the lock)."""
        self._leader = self._waiting[0] if self._waiting else None
        if self._leader is not None:
            self._leader.turn.release()

    def _withdraw(self, mine: _Commit) -> None:
        """Takes out one whose thread was interrupted; one that a leader has taken up is waited for, since its file is in use."""
        while True:
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                if self._leader is mine:
                    self._appoint()
                if mine.done or not mine.taken:
                    return
            mine.turn.acquire()

    def _settle(self, group: Sequence[_Commit]) -> None:
        as_one = self._may_sync_as_one(group)
        synced = self._synced(_singly(group), _sync_file, as_one=as_one)
        named = _tried(_singly(synced), _name)
        lasting = self._synced(_by_folder(named), _sync_folder, as_one=as_one)
        written = _tried(_singly(lasting), lambda part: self._receipts.write(part[0].receipt))
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
                self.close()
            else:
                if time.monotonic() - started > LONGEST_SYNC_SECONDS:
                    self._alone_until = time.monotonic() + PATIENCE_SECONDS
                return [one for part in parts for one in part]
        return _tried(parts, sync_part)


def _name(part: list[_Commit]) -> None:
    if not part[0].named:
        part[0].state.temporary.replace(part[0].state.final)
        part[0].named = True


def _sync_file(part: list[_Commit]) -> None:
    os.fsync(part[0].state.descriptor)


def _sync_folder(part: list[_Commit]) -> None:
    fsync_folder(part[0].state.final.parent)


def _singly(group: Iterable[_Commit]) -> list[list[_Commit]]:
    return [[one] for one in group]


def _by_folder(group: Iterable[_Commit]) -> list[list[_Commit]]:
    """Parts of a group that lie in one folder."""
    parts: dict[Path, list[_Commit]] = {}
    for one in group:
        parts.setdefault(one.state.final.parent, []).append(one)
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
