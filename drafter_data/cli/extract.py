"""`drafter-data extract`."""

from __future__ import annotations

from pathlib import Path

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
    in_flight: int = 16,
    chunk_samples: int = 200,
    max_error_rate: float = 0.0,
    keep_free_gb: float = 1.0,
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
