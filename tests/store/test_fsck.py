"""fsck finds, explains and mends, and touches nothing that is good."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from drafter_data.cli.fsck import fsck as fsck_command
from drafter_data.cli.status import status as status_command
from drafter_data.errors import InputError, LeaseHeld
from drafter_data.files import xxh3_of
from drafter_data.store.fsck import fsck
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.store.making import commit, identity_of, ids_of, key_of
from tests.store.mounts import remount, small_tmpfs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "store", identity_of())
    for k in range(10):
        commit(store, ids_of(8 + k, k), chunk="a")
    return store


def path_of(store: Store, k: int) -> Path:
    return store.path_of(key_of(ids_of(8 + k, k)))


def damage(store: Store) -> None:
    """One of everything."""
    path_of(store, 0).unlink()
    path_of(store, 1).chmod(0o644)
    os.truncate(path_of(store, 1), 100)
    path_of(store, 2).chmod(0o644)
    with path_of(store, 2).open("r+b") as handle:
        handle.seek(-3, 2)
        handle.write(b"\x01")
    (path_of(store, 3).parent / ".tmp-x.1.abc").write_bytes(b"half")
    old = store.root / ".tmp-store.json.1.abc"
    old.write_bytes(b"half")
    os.utime(old, (time.time() - 600, time.time() - 600))
    orphan = store.root / "states" / "ff" / ("ff" * 20 + ".safetensors")
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(path_of(store, 4).read_bytes())
    (store.root / "receipts" / "b.killed.jsonl").write_bytes(b'{"nothing": 1}\n{"state_key":"12')
    (store.root / "leases" / f"{'d' * 40}.json").write_text(
        '{"holder": "gone", "host": "elsewhere", "process": "b/1/2", "expires_at": 1}'
    )


SHALLOW = ["file-missing", "file-size", "lease-ended", "orphan", "receipt-torn", "receipt-unreadable", "temporary", "temporary"]


def test_fsck_good_store_finds_nothing(store: Store) -> None:
    assert fsck(store).problems == ()
    assert fsck(store, deep=True).problems == ()


def test_fsck_without_repair_names_everything_and_changes_nothing(store: Store) -> None:
    damage(store)
    before = sorted((str(path), path.stat().st_size) for path in store.root.rglob("*"))
    assert sorted(problem.reason for problem in fsck(store).problems) == SHALLOW
    deep = fsck(store, deep=True)
    assert sorted(problem.reason for problem in deep.problems) == sorted([*SHALLOW, "checksum"])
    assert all(problem.expected and problem.found and problem.remedy for problem in deep.problems)
    assert sorted((str(path), path.stat().st_size) for path in store.root.rglob("*")) == before


def test_fsck_repair_mends_and_what_was_dropped_is_extracted_again(store: Store) -> None:
    good = {k: xxh3_of(path_of(store, k)) for k in range(10)}
    damage(store)
    report = fsck(store, repair=True, deep=True)
    assert report.repaired == len(report.problems) == 9
    fresh = Store.open(store.root)
    assert fsck(fresh, deep=True).problems == ()
    assert len(fresh) == 7
    for k in range(3):
        assert key_of(ids_of(8 + k, k)) not in fresh
        commit(fresh, ids_of(8 + k, k))
    assert {k: xxh3_of(path_of(fresh, k)) for k in range(10)} == good
    assert validate_store(fresh, None).errors == 0


def test_fsck_repair_is_refused_while_a_run_works_and_leaves_its_temporaries(store: Store) -> None:
    damage(store)
    with store.lease("e" * 40, "the run"):
        with pytest.raises(LeaseHeld, match="the run"):
            fsck(store, repair=True)
        reasons = [problem.reason for problem in fsck(store).problems]
        assert "orphan" not in reasons
        assert reasons.count("temporary") == 1


def test_fsck_foreign_file_is_named_and_never_removed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = path_of(store, 1).parent / "notes.txt"
    foreign.write_text("mine")
    assert fsck_command(store.root, repair=True, json=True) == 1
    assert '"foreign-file"' in capsys.readouterr().out
    assert foreign.read_text() == "mine"


def test_fsck_and_status_commands_print_what_they_found(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert fsck_command(store.root) == 0
    damage(store)
    assert fsck_command(store.root) == 1
    text = capsys.readouterr().out
    assert "8 problems" in text and "--repair" in text
    assert fsck_command(store.root, repair=True) == 0
    capsys.readouterr()
    with store.lease("e" * 40, "the run"):
        status_command(store.root)
    text = " ".join(capsys.readouterr().out.split())
    assert "8 states" in text and "the run" in text
    assert np.array_equal(store.read(key_of(ids_of(12, 4))).token_ids_s, ids_of(12, 4))


def test_fsck_repair_on_a_read_only_store_is_one_clear_line(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "ro", "size=2M") as folder:
        store = Store.open(folder / "store", identity_of())
        commit(store, ids_of(8, 1))
        store.path_of(key_of(ids_of(8, 1))).unlink()
        store.close()
        remount(folder, "ro")
        with pytest.raises(InputError, match=r"cannot repair .*Read-only file system; make the store writable") as raised:
            fsck(Store.open(store.root), repair=True)
        assert "\n" not in str(raised.value)
