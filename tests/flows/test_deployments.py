"""The deployments of prefect.yaml on a real server and worker."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from prefect.settings import PREFECT_API_URL, temporary_settings

from drafter_data.dataset import Dataset
from drafter_data.errors import InputError, TrainingFailed, UsageError
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.folder import read_manifest
from drafter_data.validation import validate_store
from flows.local.following import artifact, follow, logs, read_run, send
from flows.local.services import Services
from flows.train import run_training
from tasks.training_run import check_deployment, train_by_deployment
from tests.flows.conftest import parameters, write_run
from tests.flows.test_resuming import wait_for
from tests.trainers.test_job import is_running

LIMIT_SECONDS = 240.0


def ended(services: Services, run_id: str) -> dict[str, object]:
    return follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)


def flow_name(services: Services, run_id: str) -> str:
    flow_id = read_run(services, run_id)["flow_id"]
    return requests.get(f"{services.api}/flows/{flow_id}", timeout=30).json()["name"]


def runs_of_flow(services: Services, flow: str) -> list[dict[str, Any]]:
    found = requests.post(f"{services.api}/flow_runs/filter", json={"flows": {"name": {"any_": [flow]}}}, timeout=30)
    return found.json()


def test_each_deployment_by_its_names_resolves_to_its_flow_and_completes(services: Services, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.jsonl", 12)
    short = send(services, "extract-100k", parameters(run, tmp_path / "short", handoff={"launch": True}))
    assert ended(services, short)["state_type"] == "COMPLETED"
    done = tmp_path / "short"
    shutil.copytree(done, tmp_path / "other", symlinks=True)
    store = Store.open(tmp_path / "other" / "store")
    store.discard({sample.state_key: "test" for sample in Dataset.open(done / "dataset").samples()})
    store.close()

    chunk = {"dataset": str(tmp_path / "other/dataset"), "store": str(tmp_path / "other/store"), "index": 0, "keep_free_gb": 0.01}
    on_hosts = {"fan_out": "deployment", "chunk_samples": 12}
    elsewhere = {"launch": True, "deployment": "train/train"}
    full = parameters(run, tmp_path / "full", extraction=on_hosts, handoff=elsewhere)
    sent = {
        "extract": send(services, "extract/extract-100k", full),
        "extract-chunk": send(services, "extract-chunk", {"chunk": chunk}),
        "refresh": send(services, "nightly-refresh", parameters(run, tmp_path / "refreshed", input={"settled_minutes": 0})),
    }
    runs = {flow: ended(services, run_id) for flow, run_id in sent.items()}

    assert {flow: run["state_type"] for flow, run in runs.items()} == dict.fromkeys(sent, "COMPLETED")
    assert {flow: flow_name(services, run_id) for flow, run_id in sent.items()} == {flow: flow for flow in sent}
    stored = Store.open(tmp_path / "other" / "store")
    assert len(stored) > 0
    for folder in ("short", "full", "refreshed"):
        dataset = Dataset.open(tmp_path / folder / "dataset")
        report = validate_store(Store.open(tmp_path / folder / "store"), dataset)
        assert (report.errors, report.samples) == (0, 12)
        (canary,) = read_manifest(tmp_path / folder / "handoff").canaries
        assert canary.engine == "embedded" and canary.figures.repeat_error <= canary.figures.tolerance
    published = {
        key: artifact(services, short, key) for key in ("merge", "lengths", "preflight", "forecast", "validation", "hand-off")
    }
    assert all(published.values())
    pages = {
        key: str((artifact(services, short, key) or {})["data"]) for key in ("lengths", "extraction-report", "training", "report")
    }
    assert all("](data:image/png;base64," in text for key, text in pages.items() if key != "report")
    linked = [f"[{key}]({services.url}/artifacts/artifact/{(found or {})['id']})" for key, found in published.items()]
    assert all(link in pages["report"] for link in linked), "the last page links to each artifact"
    updates = {"filter": {"event": {"name": ["prefect.artifact.updated"]}}}
    events = requests.post(f"{services.api}/events/filter", json=updates, timeout=30).json()["events"]
    assert "image/png" not in str(events), "pictures are not kept once more in events"
    assert f" · dataset {Dataset.open(done / 'dataset').record.dataset_id[:12]}, 12 samples, " in read_run(services, short)["name"]
    facts = {row["what"]: row["value"] for row in (published["hand-off"] or {})["rows"]}
    assert Path(facts["drafter"]).is_file()
    assert xxh3_of(Path(facts["drafter"])) == facts["drafter's xxh3-128"] in str(read_run(services, short)["state"]["message"])

    on_hosts = artifact(services, sent["extract"], "extraction-report") or {}
    assert on_hosts["description"] == "12 of 12 samples stored" and "](data:image/png;base64," in on_hosts["data"]
    assert [line for line in logs(services, short) if str(line["message"]).startswith("done ")], "the job's own lines"

    facts = {row["what"]: row["value"] for row in (artifact(services, sent["extract"], "hand-off") or {})["rows"]}
    assert Path(facts["drafter"]).is_relative_to((tmp_path / "full/handoff").resolve()), "trained by the other deployment"
    assert xxh3_of(Path(facts["drafter"])) == facts["drafter's xxh3-128"]
    (trained,) = runs_of_flow(services, "train")
    assert trained["state_type"] == "COMPLETED"
    assert trained["parameters"]["handoff"] == str((tmp_path / "full/handoff").resolve())
    assert shlex.join(trained["parameters"]["command"]) == facts["command"]
    again = send(services, "train/train", {"handoff": str(tmp_path / "full/handoff"), "command": ["false"]})  # by its link
    failed = ended(services, again)
    assert failed["state_type"] == "FAILED"
    assert str(failed["state"]["message"]).startswith("exit-status: trainer ridge")  # type: ignore[index]
    shutil.copytree(tmp_path / "full/handoff", tmp_path / "moved", symlinks=True)
    with pytest.raises(InputError, match=f"{trained['parameters']['handoff']}, where its job reads and writes") as refused:
        run_training(str(tmp_path / "moved"), ())
    assert refused.value.reason == "handoff-moved"


def test_training_deployment_that_is_not_there_or_takes_something_else_is_refused_before_anything_is_done(
    services: Services, tmp_path: Path
) -> None:
    elsewhere = {"launch": True, "deployment": "train/nowhere"}
    run_id = send(services, "extract-100k", parameters(write_run(tmp_path / "run.jsonl", 12), tmp_path / "work", handoff=elsewhere))
    with temporary_settings({PREFECT_API_URL: services.api}):
        with pytest.raises(UsageError, match="its flow has no parameter command"):
            check_deployment("refresh/nightly-refresh")
        with pytest.raises(UsageError, match="the Prefect server has none of that name"):
            check_deployment("no-slash")
    refused = ended(services, run_id)
    assert refused["state_type"] == "FAILED"
    assert "deployment-missing: training deployment 'train/nowhere'" in str(refused["state"]["message"])  # type: ignore[index]
    assert not (tmp_path / "work/dataset").exists()


def test_cancel_while_another_deployment_trains_cancels_its_run_and_ends_the_whole_job_of_which_there_is_one(
    services: Services, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pids = tmp_path / "pids"
    job = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} '); time.sleep(600)"
    )
    elsewhere = {"launch": True, "deployment": "train/train", "options": {"submit": shlex.join([sys.executable, "-c", job])}}
    run = write_run(tmp_path / "run.jsonl", 12)
    run_id = send(services, "extract-100k", parameters(run, tmp_path / "work", handoff=elsewhere))
    wait_for(lambda: pids.is_file() and pids.read_text().endswith(" "))

    def send_again() -> None:
        """As a retry does whose first try was killed."""
        with temporary_settings({PREFECT_API_URL: services.api}):
            train_by_deployment("train/train", read_manifest(tmp_path / "work/handoff"), ["false"])

    caplog.set_level(logging.INFO, logger="drafter_data")
    second_try = ThreadPoolExecutor(1).submit(send_again)
    wait_for(lambda: second_try.done() or "still trains on this hand-off" in caplog.text)
    state = {"type": "CANCELLING", "name": "Cancelling"}
    requests.post(f"{services.api}/flow_runs/{run_id}/set_state", json={"state": state}, timeout=30).raise_for_status()

    assert ended(services, run_id)["state_type"] == "CANCELLED"
    wait_for(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))
    with pytest.raises(TrainingFailed, match="ended Cancelled"):
        second_try.result(LIMIT_SECONDS)
    here = str((tmp_path / "work/handoff").resolve())
    sent = [run["state_type"] for run in runs_of_flow(services, "train") if run["parameters"]["handoff"] == here]
    assert sent == ["CANCELLED"], "one run, which both tries waited for"


def test_bad_input_through_the_worker_fails_with_one_line_and_no_traceback(services: Services, tmp_path: Path) -> None:
    run_id = send(services, "extract-100k", parameters(tmp_path / "not-there", tmp_path / "work"))
    run = ended(services, run_id)
    assert run["state_type"] == "FAILED"
    message = str(run["state"]["message"])  # type: ignore[index]
    assert str(tmp_path / "not-there") in message
    assert "\n" not in message
    assert not [line for line in logs(services, run_id) if "Traceback" in str(line["message"])]


def test_schedule_of_nightly_refresh_is_there_and_inactive(services: Services) -> None:
    found = requests.get(f"{services.api}/deployments/name/refresh/nightly-refresh", timeout=30).json()
    schedules = [(one["schedule"]["cron"], one["active"]) for one in found["schedules"]]
    assert schedules == [("0 2 * * *", False)]


def test_form_of_extract_100k_needs_nothing_and_reads_in_order(services: Services) -> None:
    found = requests.get(f"{services.api}/deployments/name/extract/extract-100k", timeout=30).json()
    schema = found["parameter_openapi_schema"]
    assert list(schema["properties"]) == ["input", "engine", "extraction", "handoff", "storage"]
    assert not schema.get("required")
    assert found["parameters"] == {}
    for section in schema["definitions"].values():
        assert all("title" in field and "description" in field for field in section["properties"].values())
