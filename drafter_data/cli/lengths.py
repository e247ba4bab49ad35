"""`drafter-data lengths`: token histogram and quantiles of a dataset."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from data_contracts.lengths import LengthProfile
from drafter_data.cli.output import console, print_lines, print_table
from drafter_data.dataset import Dataset
from drafter_data.lengths import profile_lengths, save_profile

_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


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
    _keep(opened, profile)
    if json:
        sys.stdout.write(profile.model_dump_json(indent=2) + "\n")
    else:
        _print(profile)


def _keep(dataset: Dataset, profile: LengthProfile) -> None:
    """A dataset that may not be written to can still be measured; that nothing is kept is said."""
    try:
        save_profile(dataset, profile)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        console(stderr=True).print(f"{dataset.folder}: {error.strerror}; the profile is shown, not kept", soft_wrap=True)


def _print(profile: LengthProfile) -> None:
    columns = ("run", "rows", "tokens", "supervised", *profile.groups[0].quantiles_tokens)
    rows = [
        (
            group.run,
            group.samples,
            group.tokens,
            f"{group.supervised_tokens / group.tokens:.0%}" if group.tokens else "-",
            *group.quantiles_tokens.values(),
        )
        for group in profile.groups
    ]
    print_table(f"dataset {profile.dataset_id[:12]}, tokens a row", columns, rows)
    most = max(profile.histogram_samples, default=1) or 1
    for lower, samples in zip(profile.histogram_lower_tokens, profile.histogram_samples, strict=True):
        print_lines(f"{lower:>9,} to {2 * lower - 1:>9,}  {samples:>9,}  {'#' * round(40 * samples / most)}")
    if profile.bytes_per_token:
        print_lines(f"states to come: {profile.state_bytes / 1e9:,.2f} GB at {profile.bytes_per_token:,} bytes a token")
