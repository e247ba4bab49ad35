"""Status: what is done, what is missing, who holds what, how long the rest takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from drafter_data.cli.plan import plan as plan_command
from drafter_data.cli.status import status as status_command
from drafter_data.costs import CostModel, costs_path
from drafter_data.planning import make_plan
from drafter_data.status import store_status
from drafter_data.store.store import Store
from tests.store.making import commit, identity_of, small_dataset


def test_status_half_done_plan_shows_missing_per_chunk_holder_and_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = small_dataset(tmp_path / "data", 40)
    store = Store.open(tmp_path / "store", identity_of())
    costs = CostModel("engine")
    for k in range(200):
        costs.observe(10 + k % 40, 0.1 + 0.001 * (10 + k % 40), 1, finished_at=k * 0.2)
    costs.save(costs_path(store.root, "engine"))
    plan = make_plan(dataset, store, costs, chunk_samples=10, max_prompt_tokens=512)
    samples = list(dataset.samples())
    for sample in samples[:25]:
        commit(store, sample.input_ids_s.astype(np.int64))
    with store.lease(plan.chunks[-1].key, "run seven"):
        report = store_status(store)
        status_command(store.root)
    assert (report.states, len(report.plans)) == (25, 1)
    assert report.bytes == sum(path.stat().st_size for path in store.root.glob("states/*/*"))
    status = report.plans[0]
    assert (status.samples, status.done, status.missing, status.excluded) == (40, 25, 15, 0)
    assert sum(chunk.missing_tokens for chunk in status.chunks) == sum(sample.tokens for sample in samples[25:])
    assert [chunk.holder for chunk in status.chunks][-1] == "run seven"
    assert status.forecast is not None
    assert status.forecast.seconds == pytest.approx(15 * 0.2, rel=0.1)
    assert status.forecast.bytes == sum(sample.tokens for sample in samples[25:]) * (4 * 32 * 4 + 8)
    text = " ".join(capsys.readouterr().out.split())
    assert "25 of 40 done" in text and "run seven" in text


def test_plan_and_status_commands_print_json_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = small_dataset(tmp_path / "data", 20)
    store = Store.open(tmp_path / "store", identity_of())
    plan_command(dataset.folder, store=store.root, chunk_samples=5, json=True)
    plan = json.loads(capsys.readouterr().out)
    assert [chunk["samples"] for chunk in plan["chunks"]] and sum(chunk["samples"] for chunk in plan["chunks"]) == 20
    status_command(store.root, json=True)
    status = json.loads(capsys.readouterr().out)
    assert status["plans"][0]["missing"] == 20
    assert status["plans"][0]["forecast"] is None
    plan_command(dataset.folder, store=store.root)
    assert plan["dataset_id"] in capsys.readouterr().out
