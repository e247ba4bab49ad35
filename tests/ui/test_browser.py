"""What a person does in the UI: fill the form, watch, see a failed chunk, press Retry, see it complete, look at the pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Page, expect

from drafter_data.dataset import Dataset
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from flows.local.following import artifact, read_run
from flows.local.services import Services
from tests.ui.walk import Walk

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
PAGES = ("lengths", "extraction-report", "validation", "training")
NAN_IN_SOME = {"seed": 1, "faults": [{"name": "nan", "rate": 0.1, "per_prompt": True, "after": 20}]}


def chunk_states(services: Services, run_id: str, try_number: int) -> list[str]:
    body = {"flow_runs": {"id": {"any_": [run_id]}}}
    found: list[dict[str, Any]] = requests.post(f"{services.api}/task_runs/filter", json=body, timeout=30).json()
    return [one["state_type"] for one in found if one["name"].startswith("chunk ") and one["flow_run_run_count"] == try_number]


def test_form_progress_failed_chunk_retry_and_pictures_in_a_browser(
    services: Services, browser_page: Page, shots: Path, tmp_path: Path
) -> None:
    work, faults, walk = tmp_path / "work", tmp_path / "faults.json", Walk(browser_page, services.url, shots)
    faults.write_text(json.dumps(NAN_IN_SOME))

    walk.open_form("extract-100k")
    walk.fill("Samples to generate", "60")
    walk.fill("Samples a chunk", "10")
    walk.fill("Retries a chunk", "0")
    walk.fill("Work folder", str(work))
    walk.add_items("Launch flags", "--faults", str(faults))
    walk.shot("form")
    walk.submit()
    run_id = walk.run_id
    expect(browser_page.get_by_text("merge short-prompts.jsonl").first).to_be_visible(timeout=240_000)
    walk.shot("running")

    assert walk.wait_for_state("Failed", "Completed") == "Failed"
    expect(browser_page.get_by_text("gate-closed").first).to_be_visible()
    walk.shot("failed")
    failed = artifact(services, run_id, "failed-chunks")
    assert failed is not None and {row["why"].split()[0] for row in failed["rows"]} == {"not-finite"}
    walk.open_artifact(failed["id"])
    expect(browser_page.get_by_text("not-finite").first).to_be_visible()
    walk.shot("failed-chunks")
    states = chunk_states(services, run_id, 1)
    assert 0 < states.count("FAILED") == len(failed["rows"]) < len(states)

    faults.write_text(json.dumps({"faults": []}))  # the engine is mended
    walk.open_run(run_id)
    walk.retry()
    walk.shot("retry")
    assert walk.wait_for_state("Completed") == "Completed"
    walk.shot("completed")
    assert chunk_states(services, run_id, 2) == ["COMPLETED"] * len(failed["rows"]), "the failed chunks and no other"
    assert validate_store(Store.open(work / "store"), Dataset.open(work / "dataset")).errors == 0
    assert " · dataset " in read_run(services, run_id)["name"]

    for key in PAGES:
        walk.open_artifact((artifact(services, run_id, key) or {})["id"])
        walk.expect_picture()
        walk.shot(key)
    walk.open_artifact((artifact(services, run_id, "report") or {})["id"])
    walk.follow_link("lengths")
    walk.expect_picture()
    shutil.rmtree(work)
