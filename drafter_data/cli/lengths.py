"""`drafter-data lengths`: token histogram and quantiles of a dataset."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_contracts.lengths import LengthProfile
from drafter_data.dataset import Dataset
from drafter_data.lengths import profile_lengths, save_profile


def lengths(dataset: Path, *, bytes_per_token: int = 0, json: bool = False) -> None:
    """Show how long the rows of a dataset are, and how many bytes their states will take; kept as lengths.json beside it.

    Example: `drafter-data lengths .demo/dataset --bytes-per-token 65536`

    Parameters
    ----------
    dataset
        Folder of the dataset.
    bytes_per_token
        Bytes of the states of one token: layers x hidden size x bytes of the dtype.
    json
        Print the profile as JSON.
    """
    opened = Dataset.open(dataset)
    profile = profile_lengths(opened, bytes_per_token=bytes_per_token)
    save_profile(opened, profile)
    if json:
        sys.stdout.write(profile.model_dump_json(indent=2) + "\n")
    else:
        _print(profile)


def _print(profile: LengthProfile) -> None:
    console = Console()
    names = list(profile.groups[0].quantiles_tokens)
    table = Table("run", "rows", "tokens", "supervised", *names, title=f"dataset {profile.dataset_id[:12]}, tokens a row")
    for group in profile.groups:
        share = f"{group.supervised_tokens / group.tokens:.0%}" if group.tokens else "-"
        quantiles = [f"{value:,}" for value in group.quantiles_tokens.values()]
        table.add_row(group.run, f"{group.samples:,}", f"{group.tokens:,}", share, *quantiles)
    console.print(table)
    most = max(profile.histogram_samples, default=1) or 1
    for lower, samples in zip(profile.histogram_lower_tokens, profile.histogram_samples, strict=True):
        console.print(f"{lower:>9,} to {2 * lower - 1:>9,}  {samples:>9,}  {'#' * round(40 * samples / most)}")
    if profile.bytes_per_token:
        console.print(f"states to come: {profile.state_bytes / 1e9:,.2f} GB at {profile.bytes_per_token:,} bytes a token")
