"""Full dump folder, full and read-only store: the run says which and goes on when there is room again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drafter_data.errors import StoreError, StoreFull
from tests.faults.cells import UNLABELLED_FLAGS, Bench, Setting, digest
from tests.store.mounts import remount, small_tmpfs
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import running_engine

SAMPLES = 4
SETTINGS = [Setting(labelled, in_flight) for labelled in (True, False) for in_flight in (1, 16)]


def plain_bench(setting: Setting, model: Path, folder: Path, dump_folder: Path | None = None) -> tuple[Bench, object]:
    dataset = write_dataset(folder / "dataset", random_prompts(SAMPLES, 40, 60, seed=21))
    script = folder / "faults.json"
    script.write_text(json.dumps({"faults": []}))
    flags = () if setting.labelled else UNLABELLED_FLAGS
    running = running_engine(model, "--faults", str(script), *flags, dump_folder=dump_folder)
    return Bench(setting, None, script, dataset, folder), running  # type: ignore[arg-type]


def fill(folder: Path, leave_bytes: int) -> Path:
    """A foreign file that takes all room but `leave_bytes`."""
    filler = folder / "filler.bin"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler.write_bytes(b"\0" * max(0, free - leave_bytes))
    return filler


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.title)
def test_dump_folder_full_fails_by_that_name_and_goes_on_when_emptied(small_model: Path, tmp_path: Path, setting: Setting) -> None:
    with small_tmpfs(tmp_path / "dumps", "size=1m,mode=0700") as dumps:
        bench, running = plain_bench(setting, small_model, tmp_path, dumps)
        with running as bench.engine:  # type: ignore[attr-defined]
            bench.checked = bench.preflight(tmp_path / "preflight")
            filler = fill(dumps, 8192)
            report = bench.extract(tmp_path / "store")
            reasons = {failure.reason for chunk in report.failed_chunks for failure in chunk.failures}
            assert (report.stored, reasons) == (0, {"dump-folder-full"})
            filler.unlink()
            for stray in dumps.glob("req_*/*"):  # what the engine could not finish
                stray.unlink()
            report = bench.extract(tmp_path / "store")
            assert (report.stored, report.failed) == (SAMPLES, 0)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.title)
def test_store_full_or_read_only_stops_by_that_name_and_goes_on(small_model: Path, tmp_path: Path, setting: Setting) -> None:
    bench, running = plain_bench(setting, small_model, tmp_path)
    with small_tmpfs(tmp_path / "disk", "size=4m") as disk, running as bench.engine:  # type: ignore[attr-defined]
        quiet = bench.extract(tmp_path / "quiet")
        assert quiet.failed == 0
        store = disk / "store"
        bench.set_faults({"name": "cut-prompt"})  # nothing is stored, so that plan and folders are there
        assert bench.extract(store).stored == 0
        bench.set_faults()
        filler = fill(disk, 120_000)
        with pytest.raises(StoreFull) as full:
            bench.extract(store)
        assert full.value.reason == "store-full"
        filler.unlink()
        remount(disk, "ro")
        try:
            with pytest.raises(StoreError) as read_only:
                bench.extract(store)
            assert read_only.value.reason == "store-read-only"
        finally:
            remount(disk, "rw")
        report = bench.extract(store)
        assert (report.stored, report.failed) == (SAMPLES, 0)
        assert list(store.rglob(".tmp-*")) == []
        expected = {path.name: digest(path) for path in (tmp_path / "quiet").glob("states/*/*.safetensors")}
        assert {path.name: digest(path) for path in store.glob("states/*/*.safetensors")} == expected
