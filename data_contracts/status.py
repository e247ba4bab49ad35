"""The state of a store, for people and machines that look."""

from __future__ import annotations

from data_contracts.forecast import Forecast
from data_contracts.handoff import HandoffManifest, TrainingPoint
from data_contracts.identity import StoreIdentity
from data_contracts.lengths import LengthProfile
from data_contracts.record import Record
from data_contracts.validation import ValidationReport

VALIDATION_FILE = "validation.json"
"""A plan folder keeps its dataset's latest validation under this name, for whoever asks how it stands."""


class LeaseStatus(Record):
    """Who holds a chunk, until when (`time.time()` seconds), and whether the holder still lives as far as this host can tell."""

    chunk_key: str
    holder: str
    host: str
    expires_at: float
    live: bool


class ChunkStatus(Record):
    """How far one chunk is; `failed` counts missing samples whose failure was written down."""

    index: int
    key: str
    samples: int
    done: int
    missing_tokens: int
    failed: int = 0
    holder: str = ""


class PlanStatus(Record):
    """How far one plan is, and what the rest will take (None where no engine has been measured)."""

    dataset_id: str
    samples: int
    done: int
    missing: int
    excluded: int
    chunks: tuple[ChunkStatus, ...]
    forecast: Forecast | None = None
    validation: ValidationReport | None = None


class Throughput(Record):
    """The latest stretch of work in equal steps: what was committed, whoever extracted it (`time.time()` seconds)."""

    started_at: float
    ended_at: float
    tokens_per_second: tuple[float, ...]


class HandoffStatus(Record):
    """The latest hand-off of a work folder, and the curve of its job as its log tells it."""

    manifest: HandoffManifest
    curve: tuple[TrainingPoint, ...] = ()


class StoreStatus(Record):
    """What a store holds and what is going on in it; in a work folder also its latest dataset's lengths and its latest hand-off."""

    store: str
    identity: StoreIdentity
    states: int
    bytes: int
    free_bytes: int
    plans: tuple[PlanStatus, ...] = ()
    leases: tuple[LeaseStatus, ...] = ()
    throughput: Throughput | None = None
    lengths: LengthProfile | None = None
    handoff: HandoffStatus | None = None
