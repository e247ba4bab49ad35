"""Locks on keys: who waits for whom, across threads and processes, and where the system lacks such locks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drafter_data.store import locks
from drafter_data.store.locks import StateLocks

KEY = "ab12" + "0" * 36
NEXT = "ab13" + "0" * 36
FAR = "ac12" + "0" * 36


_started: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def nobody_waits_any_more() -> Iterator[None]:
    """What one test has waiting has its descriptor closed before the next one begins."""
    yield
    while _started:
        _started.pop().join(10)


def waits(take: Callable[[], None]) -> bool:
    """Whether something does not end at once; what it waits for must then be let go of."""
    thread = threading.Thread(target=take, daemon=True)
    _started.append(thread)
    thread.start()
    thread.join(0.1)
    return thread.is_alive()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def taker(path: Path, beginning: str) -> Callable[[], None]:
    def take() -> None:
        with StateLocks(path).hold(beginning):
            pass

    return take


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        (KEY, KEY, True), (KEY, NEXT, False), (KEY, FAR, False), (KEY, "ab", True), (KEY, "ac", False), ("ab", KEY, True),
        ("ab", NEXT, True), ("ab", FAR, False), (KEY, "lost+found", True), ("lost+found", FAR, True), ("", FAR, True),
        (NEXT, "ab", True), ("ffff", "ff", True), ("0000", "00", True), ("0100", "00", False), (KEY, "AB", True),
        ("a", KEY, True), ("a", "b", False),
    ],
)  # fmt: skip
def test_who_waits_for_whom(tmp_path: Path, held: str, asked: str, expected: bool) -> None:
    path = tmp_path / "locks"
    with StateLocks(path).hold(held):
        assert waits(taker(path, asked)) == expected
    assert not waits(taker(path, asked))


def test_thread_waits_for_another_of_the_same_store(tmp_path: Path) -> None:
    mine, order = StateLocks(tmp_path / "locks"), list[str]()

    def take() -> None:
        with mine.hold(KEY):
            order.append("second")

    with mine.hold(KEY):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    code = (
        "import sys, time; from pathlib import Path; from drafter_data.store.locks import StateLocks\n"
        f"with StateLocks(Path(sys.argv[1])).hold({KEY!r}):\n    print('held', flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    taken = threading.Event()

    def take() -> None:
        with StateLocks(path).hold(KEY):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert not taken.wait(0.1)
    child.kill()
    child.wait()
    child.stdout.close()
    assert taken.wait(10)


@pytest.mark.parametrize("lacking", ["the constant", "the call"])
def test_system_without_such_locks_holds_all_keys_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    if lacking == "the constant":
        monkeypatch.setattr(locks, "_LOCK_AND_WAIT", None)
    else:
        monkeypatch.setattr(locks, "_LOCK_AND_WAIT", 9999)
        with (tmp_path / "other").open("w") as other, pytest.raises(OSError) as caught:
            locks.fcntl.fcntl(other, 9999, b"")
        assert caught.value.errno == errno.EINVAL
    mine = StateLocks(tmp_path / "locks")
    with mine.hold(KEY):
        assert waits(taker(tmp_path / "locks", FAR))
    assert not waits(taker(tmp_path / "locks", FAR))


def test_error_within_lets_go_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    mine, before = StateLocks(tmp_path / "locks"), open_descriptors()
    with pytest.raises(ValueError, match="within"), mine.hold(KEY):
        raise ValueError("within")
    assert not waits(taker(tmp_path / "locks", KEY))
    with mine.hold(KEY), mine.hold(FAR):
        pass
    with mine.hold("lost+found"):
        pass
    assert open_descriptors() == before
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {f"states-{first}" for first in locks.HEX}


def test_bytes_are_unlocked_before_their_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some FUSE file systems let go of such a lock when it is unlocked, and not when its file is closed."""
    calls, real_fcntl, real_close = list[str](), locks.fcntl.fcntl, os.close

    def fcntl(descriptor: int, command: int, record: bytes) -> object:
        calls.append("unlock" if record[:2] == locks.fcntl.F_UNLCK.to_bytes(2, "little") else "lock")
        return real_fcntl(descriptor, command, record)

    def close(descriptor: int) -> None:
        calls.append("close")
        real_close(descriptor)

    monkeypatch.setattr(locks.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(os, "close", close)
    with StateLocks(tmp_path / "locks").hold(KEY):
        assert calls == ["lock"]
    assert calls == ["lock", "unlock", "close"]


def test_read_only_file_system_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with StateLocks(tmp_path / "locks").hold(KEY):
        pass
