"""Which states are checked beside each other, which files are read ahead of their check, and how many times each is."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_data import files
from drafter_data.files import is_cached, page_aligned, read_through
from drafter_data.store.fsck import fsck
from drafter_data.store.store import Store
from drafter_data.validation import states, validate_store
from drafter_data.validation.state_file import check_state_file
from tests.store.making import commit, identity_of, ids_of

ROOM = memoryview(bytearray(1 << 18))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "store", identity_of())
    for seed in range(6):
        commit(store, ids_of(20, seed))
    return store


@pytest.mark.parametrize(("small_bytes", "most_at_once"), [(1 << 20, 1), (1, 2)])
def test_small_states_are_checked_one_at_a_time_and_large_ones_by_all_workers(
    store: Store, monkeypatch: pytest.MonkeyPatch, small_bytes: int, most_at_once: int
) -> None:
    at_once, most, lock, real_check = [0], [0], threading.Lock(), states.check_state_file
    both = threading.Barrier(2)

    def check(*given: object) -> object:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        if small_bytes == 1:
            both.wait(10)  # two are under way
        checked = real_check(*given)  # type: ignore[arg-type]
        with lock:
            at_once[0] -= 1
        return checked

    monkeypatch.setattr(states, "check_state_file", check)
    monkeypatch.setattr(states, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(states, "BATCH_BYTES", 1)
    report = validate_store(store, None, workers=2)
    assert (report.states, report.errors, most[0]) == (6, 0, most_at_once)


def test_large_files_are_read_by_their_check_alone_and_much_of_them_at_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    brought, rooms, real_preadv = list[Path](), list[int](), os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if at == 0:
            rooms.append(len(buffers[0]))
        return real_preadv(descriptor, buffers, at)

    monkeypatch.setattr(states, "read_through", lambda path, *_: brought.append(path))
    monkeypatch.setattr(states, "is_cached", lambda *_: False)
    monkeypatch.setattr(states, "SMALL_BYTES", 1)
    monkeypatch.setattr(os, "preadv", preadv)
    assert validate_store(store, None, workers=2).states == 6
    assert (brought, rooms) == ([], [states.FIRST_BYTES] * 6)


@pytest.mark.parametrize("small_bytes", [1, 1 << 20])
def test_sector_that_cannot_be_read_is_a_finding(store: Store, monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(states, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(os, "preadv", fail)
    findings = validate_store(store, None, workers=2).findings
    assert [(one.reason, "Input/output error" in one.found) for one in findings] == [("unreadable", True)] * 6
    fsck(store, deep=True, repair=True)
    monkeypatch.undo()
    assert len(store) == 6, "what cannot be read now may be right"
    assert validate_store(store, None).errors == 0


@pytest.mark.parametrize("small_bytes", [1, 1 << 20])
def test_pipe_or_folder_in_the_place_of_a_state_is_a_finding(
    store: Store, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(states, "SMALL_BYTES", small_bytes)
    pipe, folder = (store.path_of(key) for key in list(store.keys())[:2])
    for path in (pipe, folder):
        path.unlink()
    os.mkfifo(pipe)
    folder.mkdir()
    found = {one.file: one.reason for one in validate_store(store, None).findings}
    assert found == {str(pipe): "file-size", str(folder): "file-size"}


def test_folder_that_cannot_be_looked_into_is_a_finding(store: Store) -> None:
    lost = store.path_of(next(store.keys())).parent
    lost.rename(store.root / "aside")
    lost.touch()
    assert {one.reason for one in validate_store(store, None).findings} == {"unreadable"}


def test_each_file_is_read_through_before_its_check_and_no_other_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, real_check = list[tuple[str, str]](), states.check_state_file
    wanted = set(list(store.keys())[:4])

    def read(path: Path, size: int, room: memoryview) -> None:
        time.sleep(0.02)  # a check that did not wait would come first
        assert size == path.stat().st_size
        steps.append(("read", path.stem))

    def check(path: Path, *given: object) -> object:
        steps.append(("check", path.stem))
        return real_check(path, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(states, "is_cached", lambda *_: False)
    monkeypatch.setattr(states, "read_through", read)
    monkeypatch.setattr(states, "check_state_file", check)
    monkeypatch.setattr(states, "BATCH_BYTES", 1)
    list(states.check_states(store, 2, lambda key: key in wanted))
    assert sorted(steps) == sorted((step, key) for step in ("read", "check") for key in wanted)
    assert all(steps.index(("read", key)) < steps.index(("check", key)) for key in wanted)


def test_batch_that_is_in_the_page_cache_is_not_read_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    brought, asked = list[Path](), list[Path]()
    monkeypatch.setattr(states, "read_through", lambda path, *_: brought.append(path))
    monkeypatch.setattr(states, "is_cached", lambda path, _: asked.append(path) or True)
    assert validate_store(store, None).states == 6
    assert (brought, len(asked)) == ([], 2), "the first and the last file of a batch tell"
    monkeypatch.setattr(states, "is_cached", lambda path, _: path != asked[1])
    assert validate_store(store, None).states == 6
    assert len(brought) == 6


@pytest.mark.parametrize("small_bytes", [1, 1 << 20])
def test_file_of_another_size_than_its_receipt_says_is_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    receipt, other = list(store.receipts())[:2]
    log = next((store.root / "receipts").glob("*.jsonl"))
    log.write_text(log.read_text().replace(f'"bytes":{receipt.bytes},', f'"bytes":{receipt.bytes + 1},', 1))
    sparse = store.path_of(other.state_key)
    sparse.chmod(0o600)
    header = b'{"token_ids":{"dtype":"I64","shape":[137438953472],"data_offsets":[0,1099511627776]}}'
    sparse.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(sparse, 8 + len(header) + (1 << 40))
    monkeypatch.setattr(states, "SMALL_BYTES", small_bytes)
    reopened = Store.open(store.root)
    findings = validate_store(reopened, None).findings
    assert [(one.reason, one.found) for one in findings if one.file != str(sparse)] == [("file-size", f"{receipt.bytes} bytes")]
    assert [one.reason for one in findings if one.file == str(sparse)] == ["file-size"]


def test_small_state_is_read_once_and_a_larger_one_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt, reads, real_preadv = next(store.receipts()), list[int](), os.preadv

    def preadv(*given: Any) -> int:
        reads.append(real_preadv(*given))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    path = store.path_of(receipt.state_key)
    for room, fits in ((receipt.bytes, True), (receipt.bytes + 1, True), (receipt.bytes - 1, False), (4096, False)):
        reads.clear()
        checked = check_state_file(path, receipt, store.identity, room=page_aligned(room))
        assert (checked.finding, checked.measured is not None) == (None, True)
        assert (reads == [receipt.bytes]) == fits


def test_what_is_measured_outlives_the_room_that_the_file_was_read_into(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", identity_of())
    prompts = [ids_of(3000, seed) for seed in range(3)]  # longer than what is read of a file without a room
    for ids_s in prompts:
        commit(store, ids_s)
    found = [one.measured for one in states.check_states(store, 1)]
    assert {ids_s.tobytes() for _, ids_s in filter(None, found)} == {ids_s.astype(np.int64).tobytes() for ids_s in prompts}


def test_state_that_is_cut_while_it_is_read_has_another_size(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt, real_preadv = next(store.receipts()), os.preadv
    path = store.path_of(receipt.state_key)
    path.chmod(0o600)

    def cut(*given: Any) -> int:
        os.truncate(path, receipt.bytes - 100)
        return real_preadv(*given)

    monkeypatch.setattr(os, "preadv", cut)
    for room in (None, page_aligned(1 << 20)):
        with path.open("ab") as file:
            file.truncate(receipt.bytes)
        finding = check_state_file(path, receipt, store.identity, room=room).finding
        assert finding is not None
        assert (finding.reason, finding.found) == ("file-size", f"{receipt.bytes - 100} bytes")


@pytest.mark.parametrize(("missing", "expected"), [("", 0), ("first", 1_000_000), ("middle", 1_000_000), ("last", 1_000_000)])
def test_file_is_read_unless_its_ends_and_its_middle_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, expected: int
) -> None:
    path, read, real_readv = tmp_path / "file", list[int](), os.readv
    path.write_bytes(b"x" * 1_000_000)

    def readv(descriptor: int, buffers: list[memoryview]) -> int:
        read.append(real_readv(descriptor, buffers))
        return read[-1]

    def preadv(_descriptor: int, _buffers: list[memoryview], at: int, _flags: int) -> int:
        if {0: "first", 500_000: "middle", 999_999: "last"}[at] == missing:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "readv", readv)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(files, "_NOWAIT", 8)
    read_through(path, 1_000_000, ROOM)
    assert sum(read) == expected
    assert is_cached(path, 1_000_000) == (not missing)
    monkeypatch.setattr(files, "_NOWAIT", 0)  # a system that does not tell
    read_through(path, 1_000_000, ROOM)
    assert sum(read) == expected + 1_000_000
    read_through(path, 999_999, ROOM)  # not the file that was meant, however large it is
    assert sum(read) == expected + 1_000_000


def test_what_cannot_be_read_ahead_is_left_to_the_check(tmp_path: Path) -> None:
    assert not is_cached(tmp_path / "missing", 0)
    read_through(tmp_path / "missing", 0, ROOM)
    read_through(tmp_path, tmp_path.stat().st_size, ROOM)
    (tmp_path / "empty").touch()
    read_through(tmp_path / "empty", 0, ROOM)
