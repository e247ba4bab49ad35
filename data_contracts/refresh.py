"""What the nightly refresh keeps in its work folder: which runs it has worked through, and what each night did."""

from __future__ import annotations

from pydantic import Field

from data_contracts.identity import CONTRACT_VERSION
from data_contracts.record import Record

MARK_FILE = "refreshed.json"
NIGHTS_FILE = "nights.jsonl"


class RefreshMark(Record):
    """`refreshed.json`: the last complete night."""

    contract_version: int = CONTRACT_VERSION
    runs: dict[str, str] = Field(default={}, description="digest over names, sizes and times of a run's files, by the run's URL")
    settings: dict[str, str] = Field(default={}, description="how the runs became rows; others mean merging all anew")
    dataset_id: str = Field(default="", description="the version that this night made or found")
    handed_off: str = Field(default="", description="the version that a delta counts from")


class Night(Record):
    """One line of `nights.jsonl`. `reused` prompts were new in the dataset but in the store already; `outcome` is one word."""

    started_at: float
    run: str = ""
    outcome: str = "failed"
    dataset_id: str = ""
    new_rows: int = 0
    reused: int = 0
    extracted: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    note: str = ""
