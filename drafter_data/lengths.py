"""The lengths of a dataset: what its time and its bytes follow from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from data_contracts.lengths import LengthGroup, LengthProfile
from drafter_data.dataset import Dataset
from drafter_data.files import write_atomic

PROFILE_FILE: Final = "lengths.json"
_QUANTILES: Final = {"min": 0.0, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99, "max": 1.0}


def profile_lengths(dataset: Dataset, *, bytes_per_token: int = 0) -> LengthProfile:
    """Histogram and quantiles of tokens, for the whole dataset (`all`) and each run, and the bytes of states to come.

    `bytes_per_token` is layers x hidden x itemsize; every distinct prompt counts once, since the store holds it once.
    Quantiles are lengths that occur (the lower one of two), bins are powers of two.
    """
    lengths: pd.DataFrame = dataset.columns("run", "state_key", "num_tokens", "num_supervised").to_pandas()
    groups = [_group("all", lengths)] + [_group(str(run), rows) for run, rows in lengths.groupby("run", sort=True)]
    longest = int(lengths["num_tokens"].max()) if len(lengths) else 1
    edges = 2 ** np.arange(int(longest).bit_length() + 1)
    bins = pd.cut(lengths["num_tokens"], [*edges.tolist()], right=False, labels=edges[:-1].tolist())
    histogram = bins.value_counts(sort=False)
    distinct_tokens = int(lengths.drop_duplicates("state_key")["num_tokens"].sum())
    return LengthProfile(
        dataset_id=dataset.record.dataset_id,
        groups=tuple(groups),
        histogram_lower_tokens=tuple(int(edge) for edge in histogram.index),
        histogram_samples=tuple(int(count) for count in histogram),
        bytes_per_token=bytes_per_token,
        state_bytes=distinct_tokens * bytes_per_token,
    )


def save_profile(dataset: Dataset, profile: LengthProfile) -> Path:
    """Writes the profile beside the dataset's rows, whole or not at all."""
    path = dataset.folder / PROFILE_FILE
    write_atomic(path, profile.model_dump_json(indent=2) + "\n")
    return path


def _group(run: str, rows: pd.DataFrame) -> LengthGroup:
    tokens: Any = rows["num_tokens"]
    quantiles = tokens.quantile(list(_QUANTILES.values()), interpolation="lower")
    return LengthGroup(
        run=run,
        samples=len(rows),
        tokens=int(tokens.sum()),
        supervised_tokens=int(rows["num_supervised"].sum()),
        quantiles_tokens={name: int(value) for name, value in zip(_QUANTILES, quantiles, strict=True)},
    )
