"""`drafter-data sample-runs`: two generation runs to try everything with."""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from drafter_data.cli.engine import cached_model
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.sample_process import make_sample_runs
from drafter_data.embedded.sample_runs import write_sample_runs


def sample_runs(
    *,
    out: Path,
    samples: Annotated[int, Parameter(validator=Number(gte=2, lte=100_000))] = 300,
    seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    model: Path | None = None,
    json: bool = False,
) -> None:
    """Write two generation runs shaped like real ones: short conversations (JSONL) and longer tokenised rows (Parquet).

    Example: `drafter-data sample-runs --out runs --samples 300 --seed 0`

    Parameters
    ----------
    out
        Folder for the two files.
    samples
        Rows in all, about 3 % of them exact repeats.
    seed
        The same seed gives the same rows.
    model
        Checkpoint folder whose answers are sampled. Default: the embedded engine's own.
    json
        Print the paths as JSON.
    """
    folder = model or ensure_checkpoint(cached_model())
    # NumPy's BLAS takes its number of threads from the environment when it is first imported, which was before this.
    single_threaded = os.environ.get("OPENBLAS_NUM_THREADS") == "1"
    make = write_sample_runs if single_threaded else make_sample_runs
    paths = [str(path) for path in make(out, samples=samples, seed=seed, model=folder)]
    if json:
        sys.stdout.write(json_format.dumps({"runs": paths}, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{path}\n" for path in paths))
