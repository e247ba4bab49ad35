"""`drafter-data preflight`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from data_contracts.parameters import ExtractionParameters
from drafter_data.cli.engine_options import EngineOptions
from drafter_data.cli.output import print_json, print_table
from drafter_data.dataset import Dataset
from drafter_data.engines.connect import connect
from drafter_data.preflight import run_preflight


def preflight(
    dataset: Path,
    /,
    *,
    store: Path,
    engine: EngineOptions,
    in_flight: Annotated[int, Parameter(validator=Number(gte=1, lte=512))] = 64,
    keep_free_gb: Annotated[float, Parameter(validator=Number(gte=0, lte=1e6))] = 1.0,
    json: bool = False,
) -> None:
    """Check engine, dump folder, store and disk with real requests before anything is extracted.

    Example: drafter-data preflight data/dataset --store data/store --url http://127.0.0.1:30000 --model models/verifier

    Parameters
    ----------
    dataset
        Dataset folder.
    store
        Store folder; made when the preflight passes.
    in_flight
        Most requests in flight.
    keep_free_gb
        Space to leave free on the store's disk.
    json
        Print one JSON document.
    """
    connected = connect(engine.parameters(), request_timeout_seconds=120)
    try:
        report = run_preflight(
            connected,
            Dataset.open(dataset),
            store,
            ExtractionParameters(in_flight=in_flight),
            keep_free_bytes=int(keep_free_gb * 1e9),
        )
    finally:
        connected.close()
    if json:
        print_json(report)
        return
    figures, identity = report.canary, report.identity
    print_table(
        "Preflight passed",
        ("what", "found"),
        [
            ("engine", f"{report.engine} {report.provenance.engine_version} at {report.url}"),
            (
                "layers (Hugging Face), final norm, dtype",
                f"{identity.layers}, {identity.final_norm}, {identity.dtype}",
            ),
            ("requests in flight", f"{report.first_in_flight} at first, at most {report.in_flight}"),
            ("longest prompt (tokens)", report.max_prompt_tokens),
            ("bytes a token", report.bytes_per_token),
            (
                "canary requests, repeat error, tolerance",
                f"{figures.requests}, {figures.repeat_error:.2e}, {figures.tolerance:.2e}",
            ),
            ("canary proof error (nats)", "none" if figures.proof_error is None else f"{figures.proof_error:.2e}"),
            *(("note", note) for note in report.notes),
        ],
    )
