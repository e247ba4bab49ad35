"""What an extracted chunk reports, and what it leaves for the gate.

`STORE/plans/<dataset_id>/failures/<chunk_key>.json` holds a `ChunkFailures` while a chunk has failed samples; a later complete run
of the chunk removes it.
"""

from __future__ import annotations

from data_contracts.record import Record

FAILURES_FOLDER = "failures"
RECHECKS_FOLDER = "rechecks"


class SampleFailure(Record):
    """A sample that did not make it: after how many attempts, and the last one's reason."""

    state_key: str
    tokens: int
    reason: str
    detail: str
    attempts: int


class ChunkFailures(Record):
    """The failed samples of a chunk, and what stopped the chunk itself (empty when it ran to its end)."""

    chunk_index: int
    chunk_key: str
    stopped_by: str = ""
    failures: tuple[SampleFailure, ...] = ()


class Recheck(Record):
    """A sample that was extracted again: how far the second states were from the stored ones (`states_distance`).

    `earlier`: it is from the beginning of the run, or from before it, and shows whether the engine still is the same.
    """

    state_key: str
    distance: float
    tolerance: float
    earlier: bool = False


class ChunkRechecks(Record):
    """All comparisons that the runs of a chunk made: `STORE/plans/<dataset_id>/rechecks/<chunk_key>.json`."""

    chunk_key: str
    rechecks: tuple[Recheck, ...] = ()


class ChunkResult(Record):
    """What one run of a chunk did. `reused` were in the store already."""

    chunk_index: int
    chunk_key: str
    samples: int
    reused: int
    extracted: int
    tokens: int
    bytes: int
    seconds: float
    retried: int
    rechecked: int
    failures: tuple[SampleFailure, ...] = ()


class GateReport(Record):
    """The decision before the hand-off. `error_rate` = failed / (planned, excluded ones left out)."""

    dataset_id: str
    planned: int
    stored: int
    excluded: int
    failed: int
    error_rate: float
    max_error_rate: float
    open: bool
    failed_chunks: tuple[ChunkFailures, ...] = ()
