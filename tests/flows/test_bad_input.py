"""Bad input ends a flow with one clear line as its state's message, without a traceback and with nothing half-written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings

from data_contracts.identity import StoreIdentity
from data_contracts.parameters import (
    EngineParameters,
    ExtractionParameters,
    HandoffParameters,
    InputParameters,
    StorageParameters,
    WatchParameters,
)
from drafter_data.files import TEMPORARY_PREFIX
from drafter_data.store.store import Store
from flows.extract import extract
from flows.local.services import Services
from flows.refresh import refresh
from tests.flows.conftest import parameters, write_run
from tests.store.mounts import small_tmpfs


@pytest.fixture(autouse=True)
def api(services: Services) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: services.api}):
        yield


def run_flow(flow: Any, given: dict[str, Any]) -> State[Any]:
    return flow(
        input=(WatchParameters if flow is refresh else InputParameters)(**given["input"]),
        engine=EngineParameters(**given["engine"]),
        extraction=ExtractionParameters(**given["extraction"]),
        handoff=HandoffParameters(**given["handoff"]),
        storage=StorageParameters(**given["storage"]),
        return_state=True,
    )


def refused(given: dict[str, Any], work: Path, reason: str, *parts: str, caplog: pytest.LogCaptureFixture) -> None:
    """The run fails with `reason` in one line that has all `parts`; nothing half-written is left in `work`."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addHandler(caplog.handler)
    state = run_flow(extract, given)
    assert state.is_failed()
    message = state.message or ""
    assert message.startswith(f"{reason}: "), message
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert caplog.records
    assert not [record for record in caplog.records if record.exc_info], "a traceback was logged"
    assert not list(work.rglob(f"{TEMPORARY_PREFIX}*"))
    assert not (work / "handoff").exists()


def test_runs_folder_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = parameters(tmp_path / "nowhere", tmp_path / "work")
    refused(given, tmp_path / "work", "run-missing", str(tmp_path / "nowhere"), caplog=caplog)


def test_empty_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.jsonl").touch()
    given = parameters(tmp_path / "run.jsonl", tmp_path / "work")
    refused(given, tmp_path / "work", "run-empty", "run.jsonl", caplog=caplog)
    assert not (tmp_path / "work" / "dataset").exists()


def test_share_of_faulty_rows_above_the_forms_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Path(write_run(tmp_path / "run.jsonl", 12))
    run.write_text(run.read_text() + '{"messages": []}\n')
    given = parameters(run, tmp_path / "work")
    given["input"]["merge"] = {"max_dropped_share": 0.01}
    refused(given, tmp_path / "work", "empty-conversation", "1 of 13 rows", "run.jsonl:13", caplog=caplog)
    assert not (tmp_path / "work" / "dataset").exists()


def test_engine_that_is_not_there(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = {"url": "http://127.0.0.1:9", "model": str(model), "dump_folder": str(tmp_path)}
    given = parameters(write_run(tmp_path / "run.jsonl", 12), tmp_path / "work", engine=engine)
    refused(given, tmp_path / "work", "engine-not-there", "http://127.0.0.1:9", caplog=caplog)


def test_dump_folder_open_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dumps").mkdir(mode=0o755)
    given = parameters(write_run(tmp_path / "run.jsonl", 12), tmp_path / "work", engine={"dump_folder": str(tmp_path / "dumps")})
    refused(given, tmp_path / "work", "dump-folder-not-ours", "chmod 700", caplog=caplog)


def test_dump_folder_on_a_read_only_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_tmpfs(tmp_path / "mount", "size=1m,mode=0700,ro") as dumps:
        given = parameters(write_run(tmp_path / "run.jsonl", 12), tmp_path / "work", engine={"dump_folder": str(dumps)})
        refused(given, tmp_path / "work", "dump-folder-not-writable", str(dumps), caplog=caplog)


def test_work_folder_on_a_read_only_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_tmpfs(tmp_path / "mount", "size=1m,ro") as disk:
        given = parameters(write_run(tmp_path / "run.jsonl", 12), disk / "work")
        refused(given, disk, "folder-not-writable", str(disk / "work"), caplog=caplog)


def test_disk_too_small_for_the_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_tmpfs(tmp_path / "mount", "size=1m") as disk:
        storage = {"store": str(disk / "store"), "keep_free_gb": 0.0}
        given = parameters(write_run(tmp_path / "run.jsonl", 40), tmp_path / "work", storage=storage)
        refused(given, tmp_path / "work", "disk-too-small", str(disk / "store"), caplog=caplog)


def test_disk_that_fills_during_the_merge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_tmpfs(tmp_path / "mount", "size=200k") as disk:
        given = parameters(write_run(tmp_path / "run.jsonl", 400, longest=400), disk / "work")
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addHandler(caplog.handler)
        state = run_flow(extract, given)
        assert state.is_failed()
        assert "No space left" in (state.message or "")
        assert "\n" not in (state.message or "")
        assert not (disk / "work" / "dataset").exists()


def test_store_of_another_identity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = StoreIdentity(weights_digest="0" * 32, num_layers=8, hidden_size=64, layers=(2, 4, 5, 8), dtype="F32")
    Store.open(tmp_path / "store", other).close()
    storage = {"store": str(tmp_path / "store")}
    given = parameters(write_run(tmp_path / "run.jsonl", 12), tmp_path / "work", storage=storage)
    refused(given, tmp_path / "work", "identity-mismatch", "weights_digest", str(tmp_path / "store"), caplog=caplog)
    assert not list((tmp_path / "store").glob("states/*/*"))


def test_refresh_without_new_runs_completes_and_says_so(tmp_path: Path) -> None:
    given = parameters("unused", tmp_path / "work")
    given["input"] = {"runs": []}
    state = run_flow(refresh, given)
    assert state.is_completed()
    assert "nothing new" in (state.message or "")

    given["input"] = {"runs": [str(write_run(tmp_path / "run.jsonl", 12))], "settled_minutes": 0}
    assert run_flow(refresh, given).is_completed()
    assert (tmp_path / "work" / "handoff" / "manifest.json").is_file()
    again = run_flow(refresh, given)
    assert again.is_completed()
    assert "nothing new" in (again.message or "")
