"""What the preflight found: the engine's settings, the canary's figures, the tolerance that they calibrate."""

from __future__ import annotations

from data_contracts.identity import Provenance, StoreIdentity
from data_contracts.record import Record


class CanaryFigures(Record):
    """Real requests sent before the first sample. `repeat_error` is the relative Frobenius distance of one prompt sent twice,
    `tolerance` the one that follows from it for samples that are extracted again.
    """

    requests: int
    longest_tokens: int
    repeat_error: float
    tolerance: float
    proof_error: float | None = None
    tokens_per_second: float


class CanaryRecord(Record):
    """What the canary found for an engine, named by its fingerprint (settings, model, host)."""

    engine: str
    fingerprint: str
    figures: CanaryFigures


class PreflightReport(Record):
    """Everything that was checked, and what follows from it for the run. `notes` are one line each, for people.

    `in_flight`: the most requests the run may have in flight, `first_in_flight`: what it begins with.
    """

    engine: str
    url: str
    fingerprint: str
    identity: StoreIdentity
    provenance: Provenance
    in_flight: int
    first_in_flight: int
    lengths_must_differ: bool
    max_prompt_tokens: int
    bytes_per_token: int
    canary: CanaryFigures
    notes: tuple[str, ...] = ()
