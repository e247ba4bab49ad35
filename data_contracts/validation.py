"""What validation finds."""

from __future__ import annotations

from data_contracts.record import Record


class Finding(Record):
    """One fault of one sample: what, where, expected, found, what to do."""

    reason: str
    state_key: str
    file: str
    expected: str
    found: str
    remedy: str


class LayerStatistics(Record):
    """Spread of one layer's root-mean-square norm over the checked samples."""

    layer: str
    rms_p01: float
    rms_p50: float
    rms_p99: float


class ValidationReport(Record):
    """`samples` counts dataset rows (or state files without a dataset); `errors` those with a finding or without a state."""

    store: str
    dataset_id: str | None
    samples: int
    states: int
    errors: int
    missing: int
    orphans: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    layers: tuple[LayerStatistics, ...] = ()


class FsckReport(Record):
    """What fsck found, and how much of it it mended. Without `repair` nothing is changed."""

    store: str
    states: int
    deep: bool
    repair: bool
    problems: tuple[Finding, ...] = ()
    repaired: int = 0
