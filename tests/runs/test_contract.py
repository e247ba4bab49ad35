"""The published contract (ODCS) equals the code, and what merge writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

import data_contracts
from data_contracts.dataset import COLUMNS, QUARANTINE_FILE, RECORD_FILE, ROWS_FILE
from data_contracts.identity import CONTRACT_VERSION, KEY_HEX_DIGITS
from drafter_data.dataset import DATASET_SCHEMA
from drafter_data.runs.merge import merge_runs
from drafter_data.runs.rows_file import GROUP_ROWS, GROUP_TOKENS
from tests.runs.forms import chat, tokens, write_run

CONTRACT: dict[str, Any] = yaml.safe_load((Path(data_contracts.__path__[0]) / "dataset.odcs.yaml").read_text())
LOGICAL = {"string": "string", "list<int32>": "array", "list<uint8>": "array", "int32": "integer"}


def test_contract_columns_equal_the_code() -> None:
    (rows,) = CONTRACT["schema"]
    properties = rows["properties"]
    assert {p["name"]: p["physicalType"] for p in properties} == COLUMNS
    assert [p["name"] for p in properties] == list(COLUMNS)
    assert all(p["logicalType"] == LOGICAL[p["physicalType"]] for p in properties)
    assert all(p["required"] is not DATASET_SCHEMA.field(p["name"]).nullable for p in properties)
    for p in properties:
        if p["logicalType"] == "array":
            assert p["physicalType"] == f"list<{p['items']['physicalType']}>"
            assert p["items"]["name"] == DATASET_SCHEMA.field(p["name"]).type.value_field.name
    assert [p["name"] for p in properties if p.get("primaryKey")] == ["sample_key"]
    assert CONTRACT["version"].split(".")[0] == str(CONTRACT_VERSION)
    assert rows["physicalName"] == ROWS_FILE
    assert RECORD_FILE in CONTRACT["description"]["usage"]
    assert QUARANTINE_FILE in CONTRACT["description"]["usage"]
    assert f"{GROUP_TOKENS:,}" in rows["description"]
    assert f"{GROUP_ROWS:,}" in rows["description"]
    for p in properties[:2]:
        assert p["logicalTypeOptions"]["minLength"] == p["logicalTypeOptions"]["maxLength"] == KEY_HEX_DIGITS


def test_written_rows_keep_the_contract(tmp_path: Path) -> None:
    run = write_run(tmp_path, "r", "jsonl", [chat("q", "a"), tokens([0, 2**31 - 1], [0, 1])])
    merge_runs([run], tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / ROWS_FILE)
    assert table.schema.remove_metadata() == DATASET_SCHEMA
    for row in table.to_pylist():
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["num_tokens"]
        assert 1 <= row["num_supervised"] == sum(row["loss_mask"])
