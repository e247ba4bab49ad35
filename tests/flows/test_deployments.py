"""The deployments of prefect.yaml on a real server and worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import requests

from drafter_data.dataset import Dataset
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from flows.local.following import artifact, follow, logs, read_run, send
from flows.local.services import Services
from tests.flows.conftest import parameters, write_run

LIMIT_SECONDS = 240.0


def ended(services: Services, run_id: str) -> dict[str, object]:
    return follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)


def flow_name(services: Services, run_id: str) -> str:
    flow_id = read_run(services, run_id)["flow_id"]
    return requests.get(f"{services.api}/flows/{flow_id}", timeout=30).json()["name"]


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
    sent = {
        "extract": send(services, "extract/extract-100k", parameters(run, tmp_path / "full", extraction=on_hosts)),
        "extract-chunk": send(services, "extract-chunk", {"chunk": chunk}),
        "refresh": send(services, "nightly-refresh", parameters(run, tmp_path / "refreshed")),
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
        assert (tmp_path / folder / "handoff" / "manifest.json").is_file()
    published = {
        key: artifact(services, short, key) for key in ("merge", "lengths", "preflight", "forecast", "validation", "hand-off")
    }
    assert all(published.values())
    facts = {row["what"]: row["value"] for row in (published["hand-off"] or {})["rows"]}
    assert Path(facts["drafter"]).is_file()


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
