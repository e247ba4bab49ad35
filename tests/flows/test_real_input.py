"""Conversations as other projects publish them, through the whole flow with the shipped tokenizer on the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from data_contracts.parameters import ExtractionParameters, InputParameters, StorageParameters
from drafter_data.dataset import Dataset
from drafter_data.store.store import Store
from drafter_data.trainers.folder import check_folder
from drafter_data.validation import validate_store
from flows.extract import extract
from flows.local.services import Services

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
FILES = (
    "TorchSpec__sample_conversations.jsonl",
    "FastChat__dummy_conversation.json",
    "Model-Optimizer__synthetic_conversations_1k.jsonl",
)


def test_published_conversations_go_through_the_whole_flow(services: Services, tmp_path: Path) -> None:
    if not all((FIXTURES / name).is_file() for name in FILES):
        pytest.skip("the shared fixtures are not here")
    runs, work = tuple(str(FIXTURES / name) for name in FILES), tmp_path / "work"
    with temporary_settings({PREFECT_API_URL: services.api}):
        state = extract(
            input=InputParameters(runs=runs, max_tokens=1024),
            extraction=ExtractionParameters(chunk_samples=200),
            storage=StorageParameters(folder=str(work), keep_free_gb=0.01),
            return_state=True,
        )
    assert state.is_completed(), state.message
    dataset = Dataset.open(work / "dataset")
    reports = dataset.record.runs
    assert sum(report.read for report in reports) == 2501, "rows of the three files"
    assert all(report.read == report.kept + sum(report.dropped.values()) > 0 for report in reports)
    assert dataset.record.rows == sum(report.kept for report in reports)
    report = validate_store(Store.open(work / "store"), dataset)
    assert (report.errors, report.samples) == (0, dataset.record.rows)
    assert check_folder(work / "handoff") == []
    assert list((work / "handoff" / "checkpoints").rglob("*.safetensors"))
