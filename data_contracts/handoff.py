"""The hand-off: what a trainer is given, and what came of it."""

from __future__ import annotations

from pydantic import Field

from data_contracts.identity import CONTRACT_VERSION, Provenance, StoreIdentity
from data_contracts.plan import Exclusion
from data_contracts.preflight import CanaryRecord
from data_contracts.record import Record

MANIFEST_FILE = "manifest.json"
FILES_FILE = "files.parquet"
FILE_COLUMNS: dict[str, str] = {
    "sample_key": "string",
    "state_key": "string",
    "num_tokens": "int32",
    "num_supervised": "int32",
    "split": "string",
    "file": "string",
    "bytes": "int64",
    "xxh3": "string",
}
"""One row a handed-off sample, in the trainer's order; `file` is relative to the hand-off folder."""


class SpaceNeed(Record):
    """Bytes that a hand-off will take on its target, and by what means."""

    bytes: int
    means: str


class HandoffManifest(Record):
    """The completion record of a hand-off folder, written last."""

    contract_version: int = CONTRACT_VERSION
    trainer: str
    folder: str
    dataset: str
    dataset_id: str
    store: str
    request: str = Field(default="", description="digest of what was asked for: equal ones give equal views")
    identity: StoreIdentity
    provenance: tuple[Provenance, ...] = ()
    canaries: tuple[CanaryRecord, ...] = Field(default=(), description="the last canary of each engine that filled the store")
    model: str
    samples: int
    train_samples: int
    validation_samples: int
    tokens: int
    supervised_tokens: int
    bytes: int
    longest_tokens: int
    files_xxh3: str = Field(description="xxh3-128 hex of files.parquet")
    other_files: dict[str, str] = Field(default={}, description="xxh3-128 hex of each further file, by path in the folder")
    exclusions: tuple[Exclusion, ...] = ()
    options: dict[str, str] = {}
    command: tuple[str, ...] = ()
    code_version: str = ""
    trainer_version: str = Field(default="", description="of the trainer's package, where its interpreter has it")


class TrainingPoint(Record):
    """One point of a training curve."""

    step: int
    loss: float
    accuracy: float | None = None
    seconds: float | None = None


class Checkpoint(Record):
    """A finished training job's result: `digest` is xxh3-128 hex over the weights file, `curve` at most about a thousand points."""

    folder: str
    weights_file: str
    bytes: int
    digest: str
    metrics: dict[str, float] = {}
    curve: tuple[TrainingPoint, ...] = ()
