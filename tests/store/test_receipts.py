"""Receipts: torn lines, taking back by position, other writers."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_data.store.store import Store
from tests.store.making import commit, identity_of, ids_of, key_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", identity_of())


def receipts_file(store: Store) -> Path:
    return next((store.root / "receipts").glob("*.jsonl"))


@pytest.mark.parametrize("kept_bytes", [1, 40, -1])
def test_receipt_torn_last_line_does_not_count(store: Store, kept_bytes: int) -> None:
    prompts = [ids_of(8, k) for k in range(3)]
    for ids in prompts:
        commit(store, ids)
    store.close()
    path = receipts_file(store)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept_bytes])
    fresh = Store.open(store.root)
    assert [key_of(ids) in fresh for ids in prompts] == [True, True, False]
    commit(fresh, prompts[2])
    assert len(Store.open(store.root)) == 3


def test_receipt_of_another_process_counts_after_refresh(store: Store) -> None:
    other = Store.open(store.root)
    ids = ids_of(8, 1)
    receipt = commit(other, ids)
    assert key_of(ids) not in store
    store.refresh()
    assert store.find(key_of(ids)) == receipt


@pytest.mark.parametrize("names", ["ab", "ba", "az", "za"])
def test_receipt_of_a_state_extracted_again_counts_in_any_order_of_files(store: Store, names: str) -> None:
    ids = ids_of(8, 1)
    commit(store, ids, chunk=names[0])
    store.discard({key_of(ids): "checksum"})
    again = commit(Store.open(store.root), ids, chunk=names[1])
    fresh = Store.open(store.root)
    assert fresh.find(key_of(ids)) == again
    assert list(fresh.receipts()) == [again]
    fresh.discard({key_of(ids): "checksum"})
    assert key_of(ids) not in Store.open(store.root)


def test_receipt_taken_back_does_not_count_in_any_process_and_in_any_order_of_files(store: Store) -> None:
    prompts = [ids_of(8, k) for k in range(4)]
    for k, ids in enumerate(prompts):
        commit(
            store, ids, chunk=f"{'az'[k % 2]}{k}"
        )  # files before and behind the one of the tombstones ("fsck…") in order of name
    watcher = Store.open(store.root)
    store.discard({key_of(prompts[0]): "checksum", key_of(prompts[1]): "checksum"})
    watcher.refresh()
    for view in (store, watcher, Store.open(store.root)):
        assert [key_of(ids) in view for ids in prompts] == [False, False, True, True]
        assert sorted(receipt.state_key for receipt in view.receipts()) == sorted(key_of(ids) for ids in prompts[2:])
        assert view.find(key_of(prompts[0])) is None
    assert not store.path_of(key_of(prompts[0])).exists()


def test_receipt_written_again_after_taking_back_counts(store: Store) -> None:
    ids = ids_of(8, 1)
    commit(store, ids, chunk="a")
    store.discard({key_of(ids): "checksum"})
    again = commit(store, ids, chunk="a")
    for view in (store, Store.open(store.root)):
        assert view.find(key_of(ids)) == again
        assert len(view) == 1


def test_receipts_lookup_of_fifty_thousand_stays_cheap(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", identity_of())
    template = commit(store, ids_of(8, 1), chunk="a").model_dump_json()
    key = key_of(ids_of(8, 1))
    lines = (template.replace(key, f"{k:040x}") + "\n" for k in range(50_000))
    (store.root / "receipts" / "b.other.jsonl").write_text("".join(lines))
    store.refresh()
    assert len(store) == 50_001
    found = store.find(f"{4321:040x}")
    assert found is not None and found.state_key == f"{4321:040x}"
