"""`drafter-data extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from data_contracts.extraction import GateReport
from data_contracts.parameters import ExtractionParameters
from drafter_data.cli.engine_options import EngineOptions
from drafter_data.cli.output import print_json, print_table
from drafter_data.cli.progress_bar import TerminalProgress
from drafter_data.extraction.campaign import run_campaign
from drafter_data.gate import require_open


def extract(
    dataset: Path,
    /,
    *,
    store: Path,
    engine: EngineOptions,
    in_flight: Annotated[int, Parameter(validator=Number(gte=1, lte=512))] = 64,
    chunk_samples: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 200,
    max_error_rate: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = 0.0,
    keep_free_gb: Annotated[float, Parameter(validator=Number(gte=0, lte=1e6))] = 1.0,
    json: bool = False,
) -> None:
    """Extract what the store lacks of a dataset: preflight, plan, all chunks, gate. Goes on where an earlier run stopped.

    Example: drafter-data extract data/dataset --store data/store --url http://127.0.0.1:30000 --model models/verifier

    Parameters
    ----------
    dataset
        Dataset folder.
    store
        Store folder.
    in_flight
        Most requests in flight; the preflight may allow fewer.
    chunk_samples
        About how many samples a chunk has.
    max_error_rate
        Largest share of failed samples.
    keep_free_gb
        Space to leave free on the store's disk.
    json
        Print the gate's report as one JSON document.
    """
    extraction = ExtractionParameters(in_flight=in_flight, chunk_samples=chunk_samples, max_error_rate=max_error_rate)
    with TerminalProgress() as progress:
        report = run_campaign(
            dataset, store, engine.parameters(), extraction, keep_free_bytes=int(keep_free_gb * 1e9), report=progress.show
        )
    if json:
        print_json(report)
    else:
        print_gate(report)
    require_open(report)


def print_gate(report: GateReport) -> None:
    """What was extracted, and each failed sample."""
    print_table(
        "Extraction",
        ("planned", "stored", "excluded", "failed"),
        [(report.planned, report.stored, report.excluded, report.failed)],
    )
    if report.failed:
        print_table(
            "Failed samples",
            ("chunk", "sample", "tokens", "reason", "detail"),
            [
                (chunk.chunk_index, failure.state_key[:12], failure.tokens, failure.reason, failure.detail)
                for chunk in report.failed_chunks
                for failure in chunk.failures[:20]
            ],
        )
