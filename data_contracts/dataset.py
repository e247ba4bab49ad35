"""The dataset: merged, de-duplicated, tokenised rows, one version of which never changes.

A dataset folder holds `dataset.json` (a `DatasetRecord`, written last: without it the folder is no dataset),
`rows.parquet` (the columns below, sorted by `sample_key`, row groups bounded by tokens) and `quarantine.jsonl`.
"""

from __future__ import annotations

from pydantic import Field

from data_contracts.identity import CONTRACT_VERSION
from data_contracts.record import Record

RECORD_FILE = "dataset.json"
ROWS_FILE = "rows.parquet"
QUARANTINE_FILE = "quarantine.jsonl"

COLUMNS: dict[str, str] = {
    "sample_key": "string",
    "state_key": "string",
    "run": "string",
    "source_id": "string",
    "input_ids": "list<int32>",
    "loss_mask": "list<uint8>",
    "num_tokens": "int32",
    "num_supervised": "int32",
}
"""Column name to Arrow type, in file order; none is nullable."""


class RunReport(Record):
    """What became of one generation run. `read == kept + sum(dropped.values())` always."""

    run: str
    files: tuple[str, ...]
    read: int
    kept: int
    dropped: dict[str, int] = {}
    kept_tokens: int = 0
    supervised_tokens: int = 0
    quarantined: int = Field(default=0, description="dropped rows that are set aside in quarantine.jsonl")
    conflicts: int = Field(default=0, description="ids of this run that stand for more than one content, here or in another run")
    skipped_files: tuple[str, ...] = Field(default=(), description="files of the run's folder that hold no rows")


class IdConflict(Record):
    """One id that the runs gave to more than one content. All of its rows are kept: identity is content."""

    source_id: str
    runs: tuple[str, ...]
    contents: int


class DatasetRecord(Record):
    """The completion record of a dataset."""

    contract_version: int = CONTRACT_VERSION
    dataset_id: str
    rows: int
    distinct_states: int
    tokens: int
    supervised_tokens: int
    longest_tokens: int
    rows_bytes: int
    rows_xxh3: str = Field(description="xxh3-128 hex of rows.parquet")
    tokenizer: str
    tokenizer_hash: str
    template_hash: str
    runs: tuple[RunReport, ...]
    conflicts: tuple[IdConflict, ...] = Field(default=(), description="the first ones by id; RunReport counts all")
    options: dict[str, str] = Field(default={}, description="what the merge was asked to do, where it is not the default")
    code_version: str = ""
