"""What validation finds."""

from __future__ import annotations

from data_contracts.extraction import Recheck
from data_contracts.record import Record


class Finding(Record):
    """One fault of one sample: what, where, expected, found, what to do."""

    reason: str
    state_key: str
    file: str
    expected: str
    found: str
    remedy: str


QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""The shares that `LayerStatistics` gives quantiles of; the first and last are the smallest and the largest value."""
RUN_PARTS = 20


class LayerStatistics(Record):
    """Spread of one layer's size over the checked samples that have no finding.

    `rms_...` is the layer's root mean square; `ratio_...` is that divided by the geometric mean of all stored layers' in the same
    sample, which hardly varies between samples: what lies far out is another layer, or one on the other side of a norm. Quantiles
    are those of `QUANTILES`. `ratio_over_run` is the median ratio in each of up to `RUN_PARTS` equal parts of the samples in the
    order of their commits: a step in it is an engine that changed on the way.
    """

    layer: str
    rms_p01: float
    rms_p50: float
    rms_p99: float
    rms_quantiles: tuple[float, ...] = ()
    ratio_quantiles: tuple[float, ...] = ()
    ratio_over_run: tuple[float, ...] = ()


class RecheckStatistics(Record):
    """Samples that the extraction asked for a second time and compared with what is stored (`extraction.recheck_samples`).

    `compared` in all, `earlier` of them from the beginning of the run (`Recheck`); `largest` distance of those that agreed, and the
    `tolerance` that the canary calibrated (the largest, where runs differ). `differing` did not agree: they were extracted anew
    until two extractions did, or are among the missing. `chunks_without`: chunks of the plan of which none was compared.
    """

    compared: int
    earlier: int
    largest: float
    tolerance: float
    chunks: int
    chunks_without: int
    differing: tuple[Recheck, ...] = ()


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
    rechecks: RecheckStatistics | None = None


class FsckReport(Record):
    """What fsck found, and how much of it it mended. Without `repair` nothing is changed."""

    store: str
    states: int
    deep: bool
    repair: bool
    problems: tuple[Finding, ...] = ()
    repaired: int = 0
