"""Retention: what nothing kept names goes, what a kept version or a live hand-off names stays, whenever it is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_contracts.dataset import RECORD_FILE
from data_contracts.handoff import MANIFEST_FILE
from drafter_data.cli.main import run
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError, LeaseHeld
from drafter_data.refresh.delta import write_delta
from drafter_data.store.activity import working
from drafter_data.store.fsck import fsck
from drafter_data.store.retention import collect_garbage
from drafter_data.store.store import Store
from drafter_data.trainers.folder import check_folder
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named
from drafter_data.validation import validate_store
from tests.trainers.world import World

KILLED_GC = """
import os, shutil, signal, sys
from pathlib import Path
from drafter_data.store.retention import collect_garbage
from drafter_data.store.store import Store

STEPS = {"open", "write", "fsync", "unlink", "fcntl", "replace"}

def gc(root, kept, kill_at):
    \"\"\"Removes, and is gone before step `kill_at`; returns the number of steps.\"\"\"
    seen = []

    def before_call(frame, event, function):
        if event == "c_call" and getattr(function, "__name__", "") in STEPS:
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(function.__name__)

    store = Store.open(root)
    sys.setprofile(before_call)
    collect_garbage(store, [kept], remove=True)
    sys.setprofile(None)
    return len(seen)

folder, kept = Path(sys.argv[1]), Path(sys.argv[2])
shutil.copytree(folder / "store", folder / "whole")
steps = gc(folder / "whole", kept, -1)
for kill_at in range(0, steps, max(1, steps // 40)):
    shutil.copytree(folder / "store", folder / f"killed-{kill_at}")
    child = os.fork()
    if not child:
        gc(folder / f"killed-{kill_at}", kept, kill_at)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def part_of(world: World, folder: Path, rows: slice) -> Dataset:
    """A dataset version of some of the world's rows."""
    import numpy as np

    chosen = np.zeros(world.dataset.record.rows, dtype=bool)
    chosen[rows] = True
    return write_delta(world.dataset, chosen, folder)


def keys(dataset: Dataset) -> set[str]:
    return {sample.state_key for sample in dataset.samples()}


def stored(store: Store) -> set[str]:
    store.refresh()
    return {receipt.state_key for receipt in store.receipts()}


def files(store: Path) -> set[str]:
    return {path.stem for path in store.glob("states/*/*")}


def test_states_of_no_kept_version_are_listed_then_removed_and_come_back_when_extracted(world: World, tmp_path: Path) -> None:
    kept = part_of(world, tmp_path / "kept", slice(0, 10))
    everything = stored(world.store)
    listed = collect_garbage(world.store, [kept.folder])
    assert {one.state_key for one in listed.unneeded} == everything - keys(kept)
    assert listed.removed == 0 and stored(world.store) == everything, "a list changes nothing"

    report = collect_garbage(world.store, [kept.folder], remove=True)
    assert report.removed == len(everything) - 10
    for store in (world.store, Store.open(world.store.root)):
        assert stored(store) == keys(kept) == files(store.root)
        assert validate_store(store, kept).errors == 0
        assert not fsck(store, deep=True).problems
    assert collect_garbage(world.store, [kept.folder]).unneeded == ()


def test_live_hand_off_anywhere_keeps_its_states_and_a_removed_one_does_not(world: World, tmp_path: Path) -> None:
    kept, handed = part_of(world, tmp_path / "kept", slice(0, 6)), part_of(world, tmp_path / "handed", slice(4, 14))
    out = tmp_path / "elsewhere" / "handoff"
    hand_off(trainer_named("speculators"), handed, world.store, out, model=world.model)
    report = collect_garbage(world.store, [kept.folder], remove=True)
    assert report.kept_handoffs == (str(out),)
    assert stored(world.store) == keys(kept) | keys(handed)
    assert check_folder(out) == []

    (out / MANIFEST_FILE).unlink()  # let go of, its files still there
    report = collect_garbage(world.store, [kept.folder], remove=True)
    assert all(one.linked for one in report.unneeded) and len(report.unneeded) == 8
    assert stored(world.store) == keys(kept)
    assert len(list(out.glob("states/*.safetensors"))) == 10, "what was linked stays whole"


def test_hand_off_on_a_disk_that_is_not_mounted_here_stops_removal(world: World, tmp_path: Path) -> None:
    kept, handed = part_of(world, tmp_path / "kept", slice(0, 6)), part_of(world, tmp_path / "handed", slice(4, 14))
    disk = tmp_path / "disk"
    hand_off(trainer_named("speculators"), handed, world.store, disk / "handoff", model=world.model)
    before = stored(world.store)
    disk.rename(tmp_path / "unmounted")
    with pytest.raises(InputError, match=r"cannot be seen from here.*handoffs\.txt"):
        collect_garbage(world.store, [kept.folder], remove=True)
    assert stored(world.store) == before


def test_folder_of_a_work_folder_without_its_record_stops_removal(world: World, tmp_path: Path) -> None:
    part_of(world, tmp_path / "datasets", slice(0, 3))
    damaged = part_of(world, tmp_path / "datasets", slice(3, 6))
    (damaged.folder / RECORD_FILE).unlink()
    before = stored(world.store)
    with pytest.raises(InputError, match="what it needs is not known"):
        collect_garbage(world.store, [tmp_path], remove=True)
    assert stored(world.store) == before


def test_removal_is_refused_while_anyone_works_on_the_store_and_listing_is_not(world: World, tmp_path: Path) -> None:
    kept = part_of(world, tmp_path / "kept", slice(0, 3))
    before = stored(world.store)
    for busy in (working(world.store.root, "a run"), world.store.lease("c" * 40, "a chunk")):
        with busy:
            assert collect_garbage(world.store, [kept.folder]).unneeded
            with pytest.raises(LeaseHeld) as refused:
                collect_garbage(world.store, [kept.folder], remove=True)
            assert refused.value.reason == "store-busy"
    assert stored(world.store) == before


def test_kept_version_that_is_damaged_stops_everything(world: World, tmp_path: Path) -> None:
    kept = part_of(world, tmp_path / "datasets", slice(0, 3))
    before = stored(world.store)
    os.truncate(kept.rows_path, 100)
    for keep in (kept.folder, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError):
            collect_garbage(world.store, [keep], remove=True)
    assert stored(world.store) == before and not world.store.leases()


def test_killed_removal_leaves_what_is_kept_whole_and_the_next_ends_it(world: World, tmp_path: Path) -> None:
    kept = part_of(world, tmp_path / "kept", slice(0, 18))
    shutil.copytree(world.store.root, tmp_path / "stores" / "store")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", KILLED_GC, str(tmp_path / "stores"), str(kept.folder)]
    subprocess.run(argv, env=environment, check=True, timeout=120)
    killed = sorted((tmp_path / "stores").glob("killed-*"))
    assert len(killed) > 10
    for root in killed:
        store = Store.open(root)
        assert keys(kept) <= stored(store)
        assert stored(store) <= files(root), "no receipt without its file"
        assert validate_store(store, kept).errors == 0
        collect_garbage(store, [kept.folder], remove=True)
        assert stored(store) == keys(kept) == files(root)
        assert not fsck(store).problems, root.name


def test_command_lists_then_removes_what_the_work_folder_does_not_name(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(world.store.root)
    assert run(["gc", store]) == 2
    assert "--keep" in capsys.readouterr().err
    kept = part_of(world, world.store.root.parent / "datasets", slice(0, 20))
    assert run(["gc", store]) == 0
    assert "4 states that nothing kept names" in capsys.readouterr().out
    assert run(["gc", store, "--remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 4
    assert stored(world.store) == keys(kept)
