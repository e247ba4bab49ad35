"""Commits that wait together: what is synced before what, whose failure is whose, and a kill in the middle."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data_contracts.receipt import Receipt
from drafter_data.errors import DumpRejected
from drafter_data.store import group_commit
from drafter_data.store.commit import written_state
from drafter_data.store.fsck import fsck
from drafter_data.store.group_commit import GroupCommit
from drafter_data.store.locks import StateLocks
from drafter_data.store.receipts import ReceiptLog
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.store.making import commit, dump_of, identity_of, ids_of, key_of, states_of, whole_file_dump

MEMBERS = [ids_of(20, seed) for seed in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", identity_of())


def settle_together(store: Store, before: Callable[[], None] = lambda: None) -> list[OSError | None]:
    """Settles one group of four states in this thread; `before` runs once they are written. Returns what became of each."""
    receipts = ReceiptLog(store.root / "receipts", "writer")
    group = GroupCommit(store.root / "states", receipts)
    with ExitStack() as stack:
        commits = list[group_commit._Commit]()
        for ids in MEMBERS:
            final = store.path_of(key_of(ids))
            final.parent.mkdir(exist_ok=True)
            state = stack.enter_context(written_state(final, dump_of(ids), ids, "x", direct=True))
            receipt = Receipt(
                state_key=key_of(ids), tokens=20, shape=(20, 4, 32), dtype="F32", bytes=state.bytes, xxh3=state.xxh3, proof="label",
                chunk="c",
            )  # fmt: skip
            commits.append(group_commit._Commit(state, receipt))
        before()
        group._settle(commits)
        for one in commits:
            if one.error is not None:
                one.state.temporary.unlink(missing_ok=True)  # as the error does, on its way out of a commit
    group.close()
    return [one.error for one in commits]


@pytest.mark.parametrize("as_one", [True, False])
def test_group_is_synced_before_it_is_named_and_named_before_its_receipts(
    store: Store, monkeypatch: pytest.MonkeyPatch, as_one: bool
) -> None:
    steps = list[str]()
    real_fsync, real_replace, real_write = os.fsync, Path.replace, os.write

    def fsync(descriptor: int) -> None:
        steps.append("sync")
        real_fsync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        steps.append("name")
        return real_replace(path, target)

    def write(descriptor: int, data: bytes) -> int:
        steps.append("receipts")
        return real_write(descriptor, data)

    monkeypatch.setattr(group_commit, "syncs_as_one", lambda _: as_one)
    monkeypatch.setattr(group_commit, "sync_file_system", lambda _: steps.append("sync all"))

    def watch() -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(os, "write", write)

    assert settle_together(store, watch) == [None] * 4
    monkeypatch.undo()
    folders = len({key_of(ids)[:2] for ids in MEMBERS})
    files, names = (["sync all"], ["sync all"]) if as_one else (["sync"] * 4, ["sync"] * folders)
    # In the end the receipts' folder, in which the first receipt made a file, and the receipts.
    assert steps == [*files, *["name"] * 4, *names, "sync", "receipts", "sync"]
    assert validate_store(Store.open(store.root), None).states == 4


@pytest.mark.parametrize("as_one", [True, False])
def test_states_of_all_sizes_committed_by_many_threads_hold_their_own_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch, as_one: bool
) -> None:
    """Threads take the memory for blocks from each other, some give it up midway, and the larger states are written directly."""
    if not as_one:
        monkeypatch.setattr(group_commit, "syncs_as_one", lambda _: False)
    wanted = [ids_of(tokens, seed) for seed in range(6) for tokens in (40, 900, 1300, 2500, 5000)]  # 20 KB to 2.6 MB
    spoilt = {key_of(ids) for ids in wanted[::7]}

    def take(ids: NDArray[np.int64]) -> None:
        dump = dump_of(ids)
        if key_of(ids) in spoilt:
            dump.states_slh[-1, 1, 3] = np.nan
            with pytest.raises(DumpRejected):
                store.commit(dump, key_of(ids), ids)
        else:
            store.commit(dump, key_of(ids), ids)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(take, wanted))
    assert set(store.keys()) == {key_of(ids) for ids in wanted} - spoilt
    for ids in wanted:
        if key_of(ids) not in spoilt:
            found = store.read(key_of(ids))
            assert np.array_equal(found.states_slh[:], states_of(ids))
            assert np.array_equal(found.token_ids_s, ids)
            found.close()
    assert not list(store.root.glob("states/*/.*"))
    assert validate_store(Store.open(store.root), None).errors == 0


def test_failed_sync_of_one_state_is_told_to_that_one_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fsync, calls = os.fsync, list[int]()

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(descriptor)

    monkeypatch.setattr(group_commit, "syncs_as_one", lambda _: False)
    errors = settle_together(store, lambda: monkeypatch.setattr(os, "fsync", fsync))
    monkeypatch.undo()
    assert [error is None for error in errors] == [True, False, True, True]
    again = Store.open(store.root)
    assert (len(again), key_of(MEMBERS[1]) in again) == (3, False)
    assert (validate_store(again, None).errors, fsck(again).problems) == (0, ())


def test_failed_sync_of_the_file_system_is_asked_of_each_file_from_then_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # The failed write may have been of any file, also of one that is settled later: only that file's own fsync tells of it.
    asked, bad, real_fsync = list[int](), set[int](), os.fsync

    def fail(descriptor: int) -> None:
        asked.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino in bad:
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(descriptor)

    monkeypatch.setattr(group_commit, "syncs_as_one", lambda _: True)
    monkeypatch.setattr(group_commit, "sync_file_system", fail)
    monkeypatch.setattr(os, "fsync", fsync)

    def one_is_bad() -> None:
        bad.add(next(store.root.glob(f"states/*/.tmp-{key_of(MEMBERS[2])}*")).stat().st_ino)

    errors = settle_together(store, one_is_bad)
    assert [error is None for error in errors] == [True, True, False, True]
    assert len(asked) == 1
    again = Store.open(store.root)
    assert (len(again), key_of(MEMBERS[2]) in again) == (3, False)
    assert (validate_store(again, None).errors, fsck(again).problems) == (0, ())


class HeldGroups:
    """The first group, of one, is held until `go_on`; group number `failing` breaks off midway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int = 0) -> None:
        self.sizes = list[int]()
        self.go_on = threading.Event()
        self.begun = threading.Event()
        real_settle = GroupCommit._settle

        def settle(group_commit: GroupCommit, group: list[group_commit._Commit]) -> None:
            self.sizes.append(len(group))
            self.begun.set()
            assert self.go_on.wait(30)
            real_settle(group_commit, group[: len(group) // 2] if len(self.sizes) == failing else group)
            if len(self.sizes) == failing:
                raise MemoryError

        monkeypatch.setattr(GroupCommit, "_settle", settle)

    def commit(self, store: Store, members: Sequence[NDArray[np.int64]]) -> list[Future[Receipt]]:
        """Hands the first over, and the others once it is being settled."""
        first = commit_soon(store, members[0])
        assert self.begun.wait(30)
        return [first, *(commit_soon(store, ids) for ids in members[1:])]


def thread_of(store: Store) -> threading.Thread | None:
    assert store._group is not None
    return store._group._thread


def commit_soon(store: Store, ids: NDArray[np.int64], release: Callable[[], None] = lambda: None) -> Future[Receipt]:
    return store.commit_soon(dump_of(ids), key_of(ids), ids, release=release)


def test_one_thread_writes_on_while_the_disk_is_busy_and_what_has_come_is_settled_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [ids_of(20, seed) for seed in range(16)]
    groups = HeldGroups(monkeypatch)
    outcomes = groups.commit(store, members)
    assert not any(outcome.done() for outcome in outcomes)
    assert len(store) == 0
    groups.go_on.set()
    assert [outcome.result(30).state_key for outcome in outcomes] == [key_of(ids) for ids in members]
    assert groups.sizes == [1, 15]
    assert set(Store.open(store.root).keys()) == {key_of(ids) for ids in members}


def test_no_more_than_the_bound_wait_for_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "MOST_UNSETTLED", 3)
    groups = HeldGroups(monkeypatch)
    outcomes = groups.commit(store, MEMBERS[:3])
    fourth = threading.Thread(target=commit_soon, args=(store, MEMBERS[3]))
    fourth.start()
    fourth.join(0.2)
    assert fourth.is_alive()
    assert len(list(store.root.glob("states/*/.tmp-*"))) == 3
    groups.go_on.set()
    fourth.join(30)
    assert [outcome.result(30).state_key for outcome in outcomes] == [key_of(ids) for ids in MEMBERS[:3]]
    store.close()
    assert len(store) == 4


def test_small_states_that_move_in_are_written_one_at_a_time_and_copies_two(tmp_path: Path, store: Store) -> None:
    group = store._committing()

    def write(wrote: threading.Event) -> None:
        with group.writing(1):
            wrote.set()

    def another_may_write(seconds: float) -> bool:
        wrote = threading.Event()
        with group.writing(1):
            other = threading.Thread(target=write, args=(wrote,))
            other.start()
            at_once = wrote.wait(seconds)
        other.join(30)
        return at_once

    moved, copied = ids_of(20, 0), ids_of(20, 1)
    store.commit(whole_file_dump(tmp_path, moved), key_of(moved), moved)
    assert not another_may_write(0.1)
    commit(store, copied)
    assert another_may_write(30)
    store.close()


def test_group_that_breaks_off_takes_only_what_it_had_not_settled_with_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = HeldGroups(monkeypatch, failing=2)
    outcomes = groups.commit(store, [*MEMBERS, ids_of(20, 99)])
    groups.go_on.set()
    assert [type(outcome.exception(30)).__name__ for outcome in outcomes] == ["NoneType"] * 3 + ["MemoryError"] * 2
    assert not list(store.root.glob("states/*/.*")), "what was not settled is gone"
    assert commit(store, MEMBERS[3]).state_key == key_of(MEMBERS[3]), "and may come again at once"
    again = Store.open(store.root)
    assert (len(again), validate_store(again, None).errors, fsck(again).problems) == (4, 0, ())


def test_dump_is_released_once_it_is_needed_no_more_however_the_commit_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[str]()

    def release(how: str, ids: NDArray[np.int64]) -> Callable[[], None]:
        return lambda: released.append(f"{how} {'named' if store.path_of(key_of(ids)).exists() else 'unnamed'}")

    first, second = MEMBERS[:2]
    outcome = commit_soon(store, first, release("committed", first))
    outcome.add_done_callback(lambda _: released.append("told"))
    outcome.result(30)
    commit_soon(store, first, release("known", first)).result(0)
    spoilt = dump_of(second, states_slh=states_of(second) * np.nan)
    with pytest.raises(DumpRejected):
        store.commit_soon(spoilt, key_of(second), second, release=release("rejected", second))
    monkeypatch.setattr(group_commit, "_name", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    outcome = commit_soon(store, second, release("failed", second))
    assert isinstance(outcome.exception(30), OSError)
    assert released == ["committed named", "told", "known named", "rejected unnamed", "failed unnamed"]


def test_where_no_thread_can_be_started_nothing_is_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[int]()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            commit_soon(store, MEMBERS[0], lambda: released.append(1))
    assert released == [1]
    assert not list(store.root.glob("states/*/*"))
    assert commit(store, MEMBERS[0]).state_key == key_of(MEMBERS[0])
    store.close()


def test_keys_that_another_process_holds_stop_no_other_state(store: Store) -> None:
    stopped = StateLocks(store.root / "locks")
    wanted = {key_of(ids)[:4]: ids for ids in (ids_of(20, seed) for seed in range(8))}
    held, free = list(wanted.values())[:4], list(wanted.values())[4:]
    with ThreadPoolExecutor(8) as pool:
        with ExitStack() as others:
            for ids in held:
                others.enter_context(stopped.hold(key_of(ids)))
            outcomes = [pool.submit(commit, store, ids) for ids in held]
            assert [pool.submit(commit, store, ids).result(30).state_key for ids in free] == [key_of(ids) for ids in free]
            assert not any(outcome.done() for outcome in outcomes)
        assert [outcome.result(30).state_key for outcome in outcomes] == [key_of(ids) for ids in held]


def test_interrupted_commit_waits_until_its_dump_is_needed_no_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, real_result = HeldGroups(monkeypatch), Future.result

    def interrupted(outcome: Future[Receipt], timeout: float | None = None) -> Receipt:
        if timeout is not None:
            return real_result(outcome, timeout)
        threading.Timer(0.1, groups.go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commit(store, MEMBERS[0])
    assert groups.go_on.is_set()
    assert key_of(MEMBERS[0]) in store


def test_what_was_handed_over_cannot_be_taken_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = HeldGroups(monkeypatch)
    outcome = commit_soon(store, MEMBERS[0])
    assert not outcome.cancel()
    groups.go_on.set()
    assert outcome.result(30).state_key == key_of(MEMBERS[0])


def test_close_settles_what_waits_and_ends_the_thread(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = HeldGroups(monkeypatch)
    outcomes = groups.commit(store, MEMBERS)
    threading.Timer(0.1, groups.go_on.set).start()
    store.close()
    assert all(outcome.done() for outcome in outcomes)
    assert thread_of(store) is None


def test_thread_that_settles_ends_by_itself_and_another_takes_its_place(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "IDLE_SECONDS", 0.01)
    commit(store, MEMBERS[0])
    deadline = time.monotonic() + 30
    while thread_of(store) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert commit(store, MEMBERS[1]).state_key == key_of(MEMBERS[1])


def test_kill_at_every_step_of_a_group_leaves_no_receipt_without_its_state(tmp_path: Path) -> None:
    outcomes = list[int]()
    while True:
        root = tmp_path / str(len(outcomes))
        child = os.fork()
        if not child:
            _settle_until(root, len(outcomes))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        store = Store.open(root, identity_of())
        outcomes.append(len(store))
        assert validate_store(store, None).errors == 0
        fsck(store, repair=True)
        for ids in MEMBERS:
            commit(store, ids)
        again = Store.open(root)
        assert (validate_store(again, None).states, fsck(again).problems) == (4, ())
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 4}, "receipts of a chunk are written at once"


def _settle_until(root: Path, kill_at: int) -> None:
    """In a child: settles a group, and is gone before step `kill_at`."""
    seen = [0]

    def before_call(_frame: object, event: str, function: object) -> None:
        name = getattr(function, "__name__", "") if event == "c_call" else ""
        if name in {"fsync", "replace", "rename", "open", "write", "syncfs"}:
            if seen[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

    settle_together(Store.open(root, identity_of()), lambda: sys.setprofile(before_call))
    sys.setprofile(None)
