"""Committing a state: link or copy, whole or not at all, refused content, full and read-only disks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from drafter_data.errors import DumpRejected, IdentityMismatch, InputError
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from tests.store.making import commit, dump_of, identity_of, ids_of, key_of, states_of, whole_file_dump
from tests.store.mounts import bind_mount, remount, small_tmpfs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", identity_of())


def everything(root: Path) -> list[Path]:
    return [path for path in root.glob("states/*/*") if path.is_file()]


def test_commit_dump_of_another_file_system_is_copied_and_reads_back(store: Store) -> None:
    ids = ids_of(20, 1)
    receipt = commit(store, ids, chunk="c", attempts=2, engine_seconds=0.5)
    path = store.path_of(key_of(ids))
    tensors = load_file(path)  # an independent reader
    assert np.array_equal(tensors["hidden_states"], states_of(ids))
    assert np.array_equal(tensors["token_ids"], ids)
    assert (receipt.bytes, receipt.xxh3) == (path.stat().st_size, xxhash.xxh3_128(path.read_bytes()).hexdigest())
    assert (receipt.tokens, receipt.shape, receipt.attempts, receipt.chunk) == (20, (20, 4, 32), 2, "c")
    assert path.stat().st_mode & 0o777 == 0o444
    assert everything(store.root) == [path]


def test_commit_whole_file_on_the_same_file_system_keeps_its_blocks(tmp_path: Path, store: Store) -> None:
    ids = ids_of(20, 1)
    dump = whole_file_dump(tmp_path, ids)
    inode = (tmp_path / "dump.safetensors").stat().st_ino
    receipt = store.commit(dump, key_of(ids), ids)
    path = store.path_of(key_of(ids))
    assert path.stat().st_ino == inode
    assert path.stat().st_nlink == 1, "it has left the dump folder"
    assert receipt.xxh3 == xxh3_of(path)
    assert np.array_equal(load_file(path)["hidden_states"], states_of(ids))


def test_commit_whole_file_on_another_file_system_is_copied_with_the_same_bytes(tmp_path: Path, store: Store) -> None:
    ids = ids_of(20, 1)
    with small_tmpfs(tmp_path / "shm", "size=4M") as folder:
        dump = whole_file_dump(folder, ids)
        receipt = store.commit(dump, key_of(ids), ids)
        assert dump.whole_file is not None
        os.close(dump.whole_file[0])
    other = Store.open(tmp_path / "other", identity_of())
    linked = other.commit(whole_file_dump(tmp_path, ids), key_of(ids), ids)
    assert (receipt.xxh3, receipt.bytes) == (linked.xxh3, linked.bytes)
    assert store.path_of(key_of(ids)).stat().st_nlink == 1


def test_commit_whole_file_on_another_mount_of_the_same_file_system_is_copied(tmp_path: Path, store: Store) -> None:
    ids = ids_of(20, 1)
    (tmp_path / "dumps").mkdir()
    with bind_mount(tmp_path / "dumps", tmp_path / "mounted") as folder:
        dump = whole_file_dump(folder, ids)
        receipt = store.commit(dump, key_of(ids), ids)
        assert dump.whole_file is not None
        os.close(dump.whole_file[0])
    path = store.path_of(key_of(ids))
    assert (xxh3_of(path), path.stat().st_nlink) == (receipt.xxh3, 1)
    assert everything(store.root) == [path]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOENT])
def test_commit_whole_file_where_none_can_be_linked_is_copied(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(source: str, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), source)

    monkeypatch.setattr(os, "link", link)
    ids = ids_of(20, 1)
    dump = whole_file_dump(tmp_path, ids)
    receipt = store.commit(dump, key_of(ids), ids)
    path = store.path_of(key_of(ids))
    assert xxh3_of(path) == receipt.xxh3
    assert np.array_equal(load_file(path)["hidden_states"], states_of(ids))
    assert (tmp_path / "dump.safetensors").exists(), "the engine's release removes it"
    assert everything(store.root) == [path]


def test_commit_of_a_state_that_is_there_leaves_it_alone(store: Store) -> None:
    ids = ids_of(20, 1)
    first = commit(store, ids)
    inode = store.path_of(key_of(ids)).stat().st_ino
    assert commit(store, ids) == first
    assert store.path_of(key_of(ids)).stat().st_ino == inode
    assert len(list(store.receipt_lines())) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [("rows", "row-count"), ("shape", "shape"), ("ids", "token-ids"), ("nan", "not-finite"), ("zero", "zero-rows"),
     ("equal", "layers-equal")],
)  # fmt: skip
def test_commit_bad_content_is_refused_and_leaves_nothing(store: Store, change: str, reason: str) -> None:
    ids = ids_of(20, 1)
    states = states_of(ids)
    carried = ids.copy()
    if change == "rows":
        states = states[:-1]
    elif change == "shape":
        states = states[:, :3]
    elif change == "ids":
        carried[3] += 1
    elif change == "nan":
        states[4, 1, 7] = np.nan
    elif change == "zero":
        states[4, 1] = 0
    elif change == "equal":
        states[:, 1] = states[:, 3]
    with pytest.raises(DumpRejected) as raised:
        store.commit(dump_of(ids, states_slh=states, token_ids_s=carried), key_of(ids), ids)
    assert raised.value.reason == reason
    assert everything(store.root) == []
    assert key_of(ids) not in store


def test_commit_full_disk_leaves_nothing_and_can_go_on_when_there_is_room(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "size=1M") as folder:
        store = Store.open(folder / "store", identity_of(hidden=512))
        ids = ids_of(200, 1)  # 1.6 MB
        with pytest.raises(OSError, match="No space left"):
            commit(store, ids)
        assert everything(store.root) == []
        assert key_of(ids) not in store
        remount(folder, "size=8M")
        commit(store, ids)
        assert everything(store.root) == [store.path_of(key_of(ids))]


def test_store_read_only_mount_gives_one_clear_line(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "ro", "size=1M") as folder:
        store = Store.open(folder / "store", identity_of())
        kept = commit(store, ids_of(8, 1))
        store.close()
        remount(folder, "ro")
        with pytest.raises(InputError) as raised:
            Store.open(folder / "other", identity_of())
        assert raised.value.exit_code == 2
        assert "\n" not in str(raised.value)
        assert "Read-only file system; name a writable folder" in str(raised.value)
        with pytest.raises(OSError, match="Read-only"):
            commit(store, ids_of(8, 2))
        reopened = Store.open(folder / "store", identity_of())
        assert reopened.find(kept.state_key) == kept


def test_store_of_another_identity_is_refused_with_both_shown(store: Store) -> None:
    with pytest.raises(IdentityMismatch) as raised:
        Store.open(store.root, identity_of(hidden=64, final_norm="post"))
    assert "hidden_size: 32 != 64" in str(raised.value)
    assert "final_norm: pre != post" in str(raised.value)
    assert raised.value.exit_code == 2


def test_store_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no store at .*: expected store\.json"):
        Store.open(tmp_path / "nothing")


def test_commit_from_many_threads_and_two_stores_gives_one_file_a_state(tmp_path: Path, store: Store) -> None:
    other = Store.open(store.root, identity_of())
    prompts = [ids_of(8 + k, k) for k in range(12)]

    def work(mine: Store) -> None:
        for ids in prompts:
            commit(mine, ids)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (store, other, store, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = Store.open(store.root)
    assert len(fresh) == len(everything(store.root)) == 12
    assert all(xxh3_of(fresh.path_of(receipt.state_key)) == receipt.xxh3 for receipt in fresh.receipts())
