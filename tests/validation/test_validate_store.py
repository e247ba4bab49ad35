"""Validation of a finished store: every sample, or a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.identity import StateDtype
from data_contracts.receipt import Receipt
from data_contracts.validation import QUANTILES
from drafter_data.costs import CostModel
from drafter_data.dataset import Dataset
from drafter_data.files import TEMPORARY_PREFIX
from drafter_data.planning import make_plan
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.store.making import commit, identity_of, ids_of, small_dataset, write_dataset


def filled(tmp_path: Path, dataset: Dataset, dtype: StateDtype = "F32") -> Store:
    store = Store.open(tmp_path / "store", identity_of(dtype=dtype))
    for sample in dataset.samples():
        commit(store, sample.input_ids_s.astype(np.int64))
    return store


def overwrite(store: Store, receipt: Receipt, at: int, data: bytes) -> None:
    path = store.path_of(receipt.state_key)
    path.chmod(0o644)
    with path.open("r+b") as handle:
        handle.seek(at)
        handle.write(data)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_validation_good_store_has_no_errors_and_counts_rows(tmp_path: Path, dtype: StateDtype) -> None:
    dataset = small_dataset(tmp_path / "data", 40)
    store = filled(tmp_path, dataset, dtype)
    report = validate_store(store, dataset)
    assert (report.errors, report.samples, report.states, report.missing, report.orphans) == (0, 40, 40, 0, 0)
    assert report.bytes == sum(path.stat().st_size for path in store.root.glob("states/*/*"))
    assert [layer.layer for layer in report.layers] == ["2", "4", "5", "8"]
    assert all(layer.rms_p01 <= layer.rms_p50 <= layer.rms_p99 for layer in report.layers)


def test_validation_layer_statistics_agree_with_a_direct_computation(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "data", 9)
    store = filled(tmp_path, dataset)
    rms = []
    for receipt in store.receipts():
        states = np.asarray(store.read(receipt.state_key).states_slh).astype(np.float64)
        states = states[4:] if len(states) > 8 else states  # the first tokens may be attention sinks
        rms.append(np.sqrt((states**2).mean(axis=(0, 2))))
    report = validate_store(store, dataset)
    assert [layer.rms_p50 for layer in report.layers] == pytest.approx(np.median(rms, axis=0))
    ratios = np.array(rms) / np.prod(rms, axis=1, keepdims=True) ** 0.25
    for place, layer in enumerate(report.layers):
        assert layer.rms_quantiles == pytest.approx(np.quantile(rms, QUANTILES, axis=0)[:, place])
        assert layer.ratio_quantiles == pytest.approx(np.quantile(ratios, QUANTILES, axis=0)[:, place])
        assert layer.ratio_over_run == pytest.approx(ratios[:, place])  # nine samples in the order of their commits


def test_validation_rows_with_one_state_count_each(tmp_path: Path) -> None:
    ids = ids_of(12, 1)
    masks = [(np.arange(12) >= start).astype(np.uint8) for start in (2, 5)]
    dataset = write_dataset(tmp_path / "data", [(ids, mask) for mask in masks])
    store = filled(tmp_path, dataset)
    assert validate_store(store, dataset).samples == 2
    overwrite(store, next(store.receipts()), 200, b"\x01\x02")
    report = validate_store(store, dataset)
    assert (report.errors, report.states, len(report.findings)) == (2, 1, 1)


def test_validation_missing_states_and_orphans_are_told_apart(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "data", 10)
    store = filled(tmp_path, dataset)
    victim = next(store.receipts())
    store.path_of(victim.state_key).unlink()
    receipts_file = next((store.root / "receipts").glob("*.jsonl"))
    lines = receipts_file.read_bytes().splitlines(keepends=True)
    receipts_file.write_bytes(b"".join(lines[:-1]))
    (store.path_of(victim.state_key).parent / f"{TEMPORARY_PREFIX}of-a-killed-commit").touch()  # swept by its own kind
    report = validate_store(Store.open(store.root), dataset)
    assert (report.errors, report.missing, report.orphans) == (2, 1, 1)
    assert sorted(finding.reason for finding in report.findings) == ["file-missing", "state-missing"]


def test_validation_rows_excluded_by_the_plan_are_no_errors(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "data", 20, longest=60)
    store = Store.open(tmp_path / "store", identity_of())
    plan = make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=40)
    assert plan.excluded
    for sample in dataset.samples():
        if sample.tokens <= 40:
            commit(store, sample.input_ids_s.astype(np.int64))
    report = validate_store(store, dataset)
    assert (report.errors, report.samples) == (0, 20)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("flip", "checksum"), ("nan", "not-finite"), ("zero", "zero-rows"), ("cut", "file-size"), ("longer", "file-size"),
     ("header", "header"), ("ids", "token-ids"), ("same-layers", "layers-equal")],
)  # fmt: skip
def test_validation_damaged_file_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    dataset = small_dataset(tmp_path / "data", 6)
    store = filled(tmp_path, dataset)
    receipt = list(store.receipts())[2]
    path = store.path_of(receipt.state_key)
    data = receipt.bytes - receipt.tokens * 4 * 32 * 4
    layer = 32 * 4
    first = np.fromfile(path, np.uint8)[data : data + layer].tobytes()
    if name == "flip":
        overwrite(store, receipt, data + 5, bytes([first[5] ^ 1]))
    elif name == "nan":
        overwrite(store, receipt, data + 8, np.float32(np.nan).tobytes())
    elif name == "zero":
        overwrite(store, receipt, data + layer, b"\0" * layer)
    elif name == "cut":
        path.chmod(0o644)
        os.truncate(path, receipt.bytes - 4)
    elif name == "longer":
        overwrite(store, receipt, receipt.bytes, b"\0\0")
    elif name == "header":
        overwrite(store, receipt, 8, b"[")
    elif name == "ids":
        overwrite(store, receipt, data - 8, np.int64(1).tobytes())
    elif name == "same-layers":
        states = np.array(store.read(receipt.state_key).states_slh)
        states[:, 1] = states[:, 2]
        overwrite(store, receipt, data, states.tobytes())
    report = validate_store(store, dataset)
    assert [(finding.reason, finding.state_key) for finding in report.findings] == [(reason, receipt.state_key)]
    finding = report.findings[0]
    assert finding.file == str(path)
    assert finding.expected and finding.found and "fsck" in finding.remedy


def test_validation_wrong_mask_in_the_dataset_is_named(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "data", 6)
    store = filled(tmp_path, dataset)
    table = pq.read_table(dataset.rows_path)
    rows = table.to_pylist()
    rows[3]["loss_mask"][0] = 1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), dataset.rows_path)
    record = json.loads((dataset.folder / "dataset.json").read_text()) | {"rows_bytes": dataset.rows_path.stat().st_size}
    (dataset.folder / "dataset.json").write_text(json.dumps(record))
    report = validate_store(store, Dataset.open(dataset.folder))
    assert [finding.reason for finding in report.findings] == ["row-sample-key"]
    assert report.errors == 1
