"""The last step of many commits at once: written states become durable and get their names and receipts.

Of a group all files are synced, then all are renamed, then their folders are synced, then their receipts are written and synced.
Each fsync has the disk write out its own cache, which takes longer than a small state; so small ones, and folders, are synced by
one syncfs(2) where that can be relied on. It also waits for what others have left to write on that disk, which for large states
costs more than it brings.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_contracts.receipt import Receipt
from drafter_data.files import fsync_folder, sync_file_system, syncs_as_one
from drafter_data.store.commit import WrittenState
from drafter_data.store.receipts import ReceiptLog


@dataclass(eq=False)
class _Commit:
    """A state that waits for the disk. `turn` is let go when it is settled, or when its thread is to settle all that wait."""

    state: WrittenState
    receipt: Receipt
    error: OSError | None = None
    settled: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)


SMALL_BYTES = 8 << 20
FEWEST_AS_ONE = 3


class GroupCommit:
    """Settles the states of threads that wait together: one of them does it for all, while others write the next ones."""

    def __init__(self, states: Path, receipts: ReceiptLog) -> None:
        self._receipts = receipts
        # Before the first write: a sync of the file system tells each descriptor of what failed since it was opened.
        self._disk = os.open(states, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if syncs_as_one(states) else -1
        self._lock = threading.Lock()
        self._waiting: list[_Commit] = []
        self._leader: _Commit | None = None

    def close(self) -> None:
        """Closes what it holds of the file system."""
        if self._disk >= 0:
            os.close(self._disk)
            self._disk = -1

    def settle(self, state: WrittenState, receipt: Receipt) -> None:
        """Returns once the state is in the store, with its receipt. Raises OSError when it is not: a step that fails for one state
        is told to that one's thread alone.
        """
        mine = _Commit(state, receipt)
        mine.turn.acquire()
        with self._lock:
            self._waiting.append(mine)
            leads = self._leader is None
            self._leader = self._leader or mine
        try:
            if not leads:
                mine.turn.acquire()
            if not mine.settled:
                self._lead()
        except BaseException:
            self._withdraw(mine)
            raise
        if mine.error is not None:
            raise mine.error

    def _lead(self) -> None:
        """Settles all that wait, and hands the lead to one of those that have come meanwhile."""
        with self._lock:
            group, self._waiting = self._waiting, []
        try:
            self._settle(group)
        finally:
            with self._lock:
                self._appoint()
            for one in group:
                if not one.settled and one.error is None:
                    one.error = OSError(errno.EINTR, "the thread that committed it was interrupted")
                one.settled = True
                one.turn.release()

    def _appoint(self) -> None:
        """Makes the one that has waited longest the leader (under the lock)."""
        self._leader = self._waiting[0] if self._waiting else None
        if self._leader is not None:
            self._leader.turn.release()

    def _withdraw(self, mine: _Commit) -> None:
        """Takes out one whose thread was interrupted; what a leader has taken up already is settled without it."""
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
                if self._leader is mine:
                    self._appoint()

    def _settle(self, group: Sequence[_Commit]) -> None:
        small = [one for one in group if one.state.bytes < SMALL_BYTES]
        large = [one for one in group if one.state.bytes >= SMALL_BYTES]
        synced = self._synced(_singly(small), _sync_file) + _tried(_singly(large), _sync_file)
        named = _tried(_singly(synced), lambda part: part[0].state.temporary.replace(part[0].state.final))
        lasting = self._synced(_by(named, lambda one: one.state.final.parent), _sync_folder)
        with_receipt = _tried(
            _by(lasting, lambda one: one.receipt.chunk), lambda part: self._receipts.append(*(one.receipt for one in part))
        )
        for one in with_receipt:
            one.settled = True

    def _synced(self, parts: list[list[_Commit]], sync_part: Callable[[list[_Commit]], None]) -> list[_Commit]:
        """Those that are on disk: by a sync of each part, or one for all."""
        if len(parts) < FEWEST_AS_ONE or self._disk < 0:
            return _tried(parts, sync_part)
        return _tried([[one for part in parts for one in part]], lambda _: sync_file_system(self._disk))


def _sync_file(part: list[_Commit]) -> None:
    os.fsync(part[0].state.descriptor)


def _sync_folder(part: list[_Commit]) -> None:
    fsync_folder(part[0].state.final.parent)


def _singly(group: Iterable[_Commit]) -> list[list[_Commit]]:
    return [[one] for one in group]


def _by(group: Iterable[_Commit], key: Callable[[_Commit], Hashable]) -> list[list[_Commit]]:
    """Parts of a group that have one key."""
    parts: dict[Hashable, list[_Commit]] = {}
    for one in group:
        parts.setdefault(key(one), []).append(one)
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
