"""Conversations as other projects publish them, through the whole flow with the shipped tokenizer on the embedded engine."""

from __future__ import annotations

import json
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
ROWS = 60


def head_of(source: Path, folder: Path) -> str:
    """The first rows of a file, in its own form: the whole of all three takes minutes."""
    copy = folder / source.name
    if source.suffix == ".json":
        copy.write_text(json.dumps(json.loads(source.read_text())[:ROWS]))
    else:
        copy.write_text("\n".join(source.read_text().splitlines()[:ROWS]) + "\n")
    return str(copy)


def test_published_conversations_go_through_the_whole_flow(services: Services, tmp_path: Path) -> None:
    if not all((FIXTURES / name).is_file() for name in FILES):
        pytest.skip("the shared fixtures are not here")
    (tmp_path / "runs").mkdir()
    runs = tuple(head_of(FIXTURES / name, tmp_path / "runs") for name in FILES)
    work = tmp_path / "work"
    with temporary_settings({PREFECT_API_URL: services.api}):
        state = extract(
            input=InputParameters(runs=runs, max_tokens=1024),
            extraction=ExtractionParameters(chunk_samples=60),
            storage=StorageParameters(folder=str(work), keep_free_gb=0.01),
            return_state=True,
        )
    assert state.is_completed(), state.message
    dataset = Dataset.open(work / "dataset")
    reports = dataset.record.runs
    assert len(reports) == len(FILES)
    assert all(report.read == report.kept + sum(report.dropped.values()) > 0 for report in reports)
    assert dataset.record.rows == sum(report.kept for report in reports)
    report = validate_store(Store.open(work / "store"), dataset)
    assert (report.errors, report.samples) == (0, dataset.record.rows)
    assert check_folder(work / "handoff") == []
    assert list((work / "handoff" / "checkpoints").rglob("*.safetensors"))
