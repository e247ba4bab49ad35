"""Retry in the UI, and kill -9 of a flow in mid-chunk: what is stored is never extracted again, what is missing is."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from data_contracts.dataset import DatasetRecord
from drafter_data.dataset import Dataset
from drafter_data.files import TEMPORARY_PREFIX
from drafter_data.planning import chunk_rows, load_plan
from drafter_data.store.fsck import fsck
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from flows.local.following import artifact, follow, read_run, send
from flows.local.processes import descendants
from flows.local.services import Services
from tests.flows.conftest import Door, parameters, write_run

LIMIT_SECONDS = 240.0
CANCEL_SECONDS = 30.0
FAILING = (3, 7)


def keys_of_chunks(store: Path, dataset: DatasetRecord, chunks: tuple[int, ...]) -> set[str]:
    return {one.state_key for index in chunks for one in chunk_rows(store, dataset.dataset_id, index)}


def retry_as_the_ui_does(services: Services, run_id: str) -> None:
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    reply = requests.post(f"{services.api}/flow_runs/{run_id}/set_state", json={"state": state, "force": True}, timeout=30)
    assert reply.json()["status"] == "ACCEPT"


def chunk_tasks(services: Services, run_id: str, flow_run_count: int) -> list[tuple[str, str]]:
    body = {"flow_runs": {"id": {"any_": [run_id]}}}
    found: list[dict[str, Any]] = requests.post(f"{services.api}/task_runs/filter", json=body, timeout=30).json()
    mine = [one for one in found if one["flow_run_run_count"] == flow_run_count and one["name"].startswith("chunk ")]
    return sorted((one["name"].split(":")[0], one["state_type"]) for one in mine)


def test_retry_of_a_run_with_two_failed_chunks_extracts_exactly_those(services: Services, door: Door, tmp_path: Path) -> None:
    run, work = write_run(tmp_path / "run.jsonl", 80), tmp_path / "work"
    store = work / "store"

    def in_a_failing_chunk(key: str) -> bool:
        if not list(store.glob("plans/*/plan.json")):
            return False  # the preflight's canary
        return key in keys_of_chunks(store, Dataset.open(work / "dataset").record, FAILING)

    door.refuses = in_a_failing_chunk
    engine = {"url": door.url, "dump_folder": str(tmp_path / "dumps")}
    run_id = send(services, "extract-100k", parameters(run, work, engine=engine))
    first = follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)

    record = Dataset.open(work / "dataset").record
    failed = keys_of_chunks(store, record, FAILING)
    assert first["state_type"] == "FAILED"
    assert first["state"]["message"].startswith("gate-closed: ")
    assert len(load_plan(store, record.dataset_id).chunks) == 10
    assert [name for name, state in chunk_tasks(services, run_id, 1) if state == "FAILED"] == ["chunk 3", "chunk 7"]
    assert [one for one in chunk_tasks(services, run_id, 1) if one[1] == "COMPLETED"] and not (work / "handoff").exists()
    table = artifact(services, run_id, "failed-chunks")
    assert table is not None
    assert [row["chunk"] for row in table["rows"]] == list(FAILING)
    assert all("request-refused" in row["why"] and "retry" in row["what to do"] for row in table["rows"])

    shutil.rmtree(services.folder / "storage", ignore_errors=True)  # the results cache
    door.refuses, door.asked = lambda key: False, []
    retry_as_the_ui_does(services, run_id)
    wait_for(lambda: read_run(services, run_id)["run_count"] == 2)
    second = follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)

    assert second["state_type"] == "COMPLETED"
    assert chunk_tasks(services, run_id, 2) == [("chunk 3", "COMPLETED"), ("chunk 7", "COMPLETED")]
    rows = {sample.state_key for sample in Dataset.open(work / "dataset").samples()}
    assert sorted(key for key in door.asked if key in rows) == sorted(failed), "each of theirs once, no other"
    assert validate_store(Store.open(store), Dataset.open(work / "dataset")).errors == 0
    assert (work / "handoff" / "manifest.json").is_file()


def test_kill_of_the_flow_in_mid_chunk_then_a_new_run_extracts_what_is_missing_once(
    services: Services, door: Door, tmp_path: Path
) -> None:
    run, work = write_run(tmp_path / "run.jsonl", 300), tmp_path / "work"
    store = work / "store"
    engine = {"url": door.url, "dump_folder": str(tmp_path / "dumps")}
    given = parameters(run, work, engine=engine, extraction={"chunk_samples": 20})
    killed = send(services, "extract-100k", given)
    wait_for(lambda: sum(path.read_bytes().count(b"\n") for path in store.glob("receipts/*.jsonl")) >= 10)
    door.open.clear()  # what is in flight stays in flight
    worker = next(process for process in services.running() if process.name == "worker")
    for process in descendants(worker.pid):
        os.kill(process.pid, signal.SIGKILL)
    assert follow(services, killed, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "CRASHED"
    receipts = {receipt.state_key for receipt in Store.open(store).receipts()}
    rows = {sample.state_key for sample in Dataset.open(work / "dataset").samples()}
    assert 0 < len(receipts) < len(rows)

    door.asked = []
    door.open.set()
    again = send(services, "extract-100k", given)
    assert follow(services, again, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"

    asked = [key for key in door.asked if key in rows]
    assert not receipts & set(asked), "no prompt is extracted twice whose receipt was written"
    assert set(asked) == rows - receipts, "none is missing"
    assert validate_store(Store.open(store), Dataset.open(work / "dataset")).errors == 0
    assert not list(work.rglob(f"{TEMPORARY_PREFIX}*")), "no temporary file stays"
    assert not list((tmp_path / "dumps").glob("dd1-*"))


def test_cancel_in_mid_chunk_ends_all_within_30_seconds_and_a_new_run_resumes(services: Services, tmp_path: Path) -> None:
    run, work = write_run(tmp_path / "run.jsonl", 150), tmp_path / "work"
    slowly = {"launch_flags": ["--fault", "late"]}  # a tenth of a second each, one at a time
    run_id = send(services, "extract-100k", parameters(run, work, engine=slowly, extraction={"in_flight": 1}))
    wait_for(lambda: bool(list(work.glob("store/states/*/*.safetensors"))))
    worker = next(process for process in services.running() if process.name == "worker")
    family = descendants(worker.pid)
    assert len(family) > 2, "the flow's process, its supervisor and the engine's"

    state, cancelled_at = {"type": "CANCELLING", "name": "Cancelling"}, time.monotonic()
    requests.post(f"{services.api}/flow_runs/{run_id}/set_state", json={"state": state}, timeout=30).raise_for_status()
    wait_for(lambda: not any(process.alive() for process in family))
    print(f"cancelled: all processes had ended after {time.monotonic() - cancelled_at:.1f} s")
    assert time.monotonic() - cancelled_at < CANCEL_SECONDS
    assert follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "CANCELLED"

    assert not list(work.rglob(f"{TEMPORARY_PREFIX}*.safetensors*"))
    assert not list((work / "store" / "leases").glob("*.json")), "no lease is left to wait for"
    store = Store.open(work / "store")
    assert fsck(store, deep=True).problems == (), "nothing half-committed"
    assert 0 < len(store) < 150

    again = send(services, "extract-100k", parameters(run, work))
    assert follow(services, again, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"
    receipts = [line.key for line in Store.open(work / "store").receipt_lines()]
    assert len(receipts) == len(set(receipts)) == 150, "each was extracted once"


def wait_for(happened: Callable[[], bool]) -> None:
    """Until something has happened."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)
