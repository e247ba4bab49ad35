"""The plan: which chunk brings which states. Made once per dataset and store, then kept.

A plan folder `STORE/plans/<dataset_id>/` holds `samples.parquet` (one row group a chunk, columns below) and `plan.json`
(a `Plan`, written last).
"""

from __future__ import annotations

from data_contracts.identity import CONTRACT_VERSION
from data_contracts.record import Record

PLAN_FILE = "plan.json"
SAMPLES_FILE = "samples.parquet"
SAMPLE_COLUMNS: dict[str, str] = {"chunk": "int32", "row": "int64", "state_key": "string", "num_tokens": "int32"}
"""`row` is the position in the dataset's rows.parquet of the first row that has this state key."""


class Chunk(Record):
    """The unit of work and of retry."""

    index: int
    key: str
    samples: int
    tokens: int
    predicted_seconds: float


class Exclusion(Record):
    """A row that will not be, or was not, extracted. `kind` excluded = known before sending, failed = tried."""

    sample_key: str
    state_key: str
    kind: str
    reason: str
    detail: str = ""


class Plan(Record):
    """All chunks of a dataset over one store, in the order in which they are sent."""

    contract_version: int = CONTRACT_VERSION
    dataset_id: str
    chunks: tuple[Chunk, ...]
    already_stored: int
    excluded: tuple[Exclusion, ...] = ()
    max_prompt_tokens: int
