"""Lengths of a dataset: what its time and its bytes follow from."""

from __future__ import annotations

from data_contracts.record import Record


class LengthGroup(Record):
    """Lengths of one run, or of the whole dataset (`run == "all"`). Quantile names are `min p10 p25 p50 p75 p90 p99 max`."""

    run: str
    samples: int
    tokens: int
    supervised_tokens: int
    quantiles_tokens: dict[str, int]


class LengthProfile(Record):
    """Token histogram and quantiles. A histogram bin counts samples with `lower <= tokens < next lower`."""

    dataset_id: str
    groups: tuple[LengthGroup, ...]
    histogram_lower_tokens: tuple[int, ...]
    histogram_samples: tuple[int, ...]
    bytes_per_token: int = 0
    state_bytes: int = 0
