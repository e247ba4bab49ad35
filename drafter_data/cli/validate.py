"""`drafter-data validate`: every sample, or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from data_contracts.validation import ValidationReport
from drafter_data.cli.output import SHOWN_FINDINGS, console, findings_table, print_json, print_lines, print_table
from drafter_data.dataset import Dataset
from drafter_data.report.text import rechecks_text
from drafter_data.store.store import Store
from drafter_data.validation import validate_store


def validate(
    store: Path,
    *,
    dataset: Path | None = None,
    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=256))] = 2,
    json: bool = False,
) -> int:
    """Check every state of a store, byte for byte, against its receipt and the dataset. Changes nothing.

    Example: `drafter-data validate .demo/store --dataset .demo/dataset --json`

    Exit code 1 when there are errors.

    Parameters
    ----------
    store
        Folder of the store.
    dataset
        Folder of a dataset: its rows are checked too, and those without a state are errors.
    workers
        Threads for states of 8 MB and more; smaller ones are checked in one.
    json
        Print the report as JSON.
    """
    opened = Store.open(store)
    report = validate_store(opened, Dataset.open(dataset) if dataset is not None else None, workers=workers)
    opened.close()
    if json:
        print_json(report)
    else:
        _print(report)
    return 1 if report.errors else 0


def _print(report: ValidationReport) -> None:
    rate = report.bytes / 1e9 / max(report.seconds, 1e-9)
    print_lines(
        f"{report.samples:,} samples, {report.states:,} states, {report.bytes / 1e9:.2f} GB in {report.seconds:.1f} s "
        f"({rate:.2f} GB/s): {report.errors} errors, {report.missing} missing, {report.orphans} orphans"
    )
    if report.rechecks is not None:
        print_lines(rechecks_text(report.rechecks))
    if report.layers:
        rows = [(one.layer, f"{one.rms_p01:.4g}", f"{one.rms_p50:.4g}", f"{one.rms_p99:.4g}") for one in report.layers]
        print_table("Root mean square of each stored layer", ("layer", "RMS p1", "p50", "p99"), rows)
    if report.findings:
        console().print(findings_table(report.findings[:SHOWN_FINDINGS], f"Findings ({len(report.findings)}; --json lists all)"))
