"""Sample runs for a flow, made in a process of their own with one BLAS thread: several threads take five times the work for
matrices this small, and another number of them gives other bits and so other rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from drafter_data.embedded.launch import SINGLE_THREADED
from drafter_data.errors import InputError


def make_sample_runs(out: Path, *, samples: int, seed: int, model: Path) -> list[str]:
    """`drafter-data sample-runs`; returns the paths. Raises InputError with the line that it ends with."""
    options = ["--out", str(out), "--samples", str(samples), "--seed", str(seed), "--model", str(model), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "drafter_data", "sample-runs", *options],
        env={**os.environ, **SINGLE_THREADED},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"sample runs could not be made in {out}: {last}", reason="sample-runs-failed")
    return json.loads(done.stdout)["runs"]
