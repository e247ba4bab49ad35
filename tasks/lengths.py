"""Stage 2: lengths, which time and bytes follow from."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from data_contracts.lengths import LengthProfile
from drafter_data.dataset import Dataset
from drafter_data.lengths import profile_lengths
from drafter_data.report.drawing import embedded
from drafter_data.report.pictures import lengths_picture
from drafter_data.report.text import markdown_table
from drafter_data.units import gigabytes
from tasks.publishing import STAGE, publish_page, say


@task(name="lengths", task_run_name="lengths of {dataset.name:.12}", **STAGE)
def profile(dataset: Path, bytes_per_token: int) -> LengthProfile:
    """Publishes a picture and quantiles by run, and the bytes to come."""
    found = profile_lengths(Dataset.open(dataset), bytes_per_token=bytes_per_token)
    to_come = f"{gigabytes(found.state_bytes)} of states" if bytes_per_token else "bytes to come: known with the engine"
    told = f"Tokens a sample, by run; {to_come}"
    picture = embedded(lengths_picture(found), "Histogram of lengths, and quantiles of each run")
    publish_page("lengths", told, picture, markdown_table(length_rows(found)))
    say(f"lengths: median {found.groups[0].quantiles_tokens['p50']:,}, p99 {found.groups[0].quantiles_tokens['p99']:,}; {to_come}")
    return found


def length_rows(found: LengthProfile) -> list[dict[str, object]]:
    """One row a run, the whole dataset first."""
    return [
        {
            "run": group.run,
            "samples": group.samples,
            "tokens": group.tokens,
            "supervised": f"{group.supervised_tokens / max(group.tokens, 1):.1%}",
            **group.quantiles_tokens,
        }
        for group in found.groups
    ]
