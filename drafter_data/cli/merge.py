"""`drafter-data merge`: generation runs to a dataset version."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_contracts.dataset import QUARANTINE_FILE, DatasetRecord, RunReport
from drafter_data.runs.merge import merge_runs
from drafter_data.runs.options import MergeOptions, TokenizeOptions


def merge(*runs: str, out: Path, tokenizer: str = "builtin", max_tokens: int | None = None, json: bool = False) -> None:
    """Merge generation runs into a dataset: read, tokenise, drop exact repeats, report every row.

    Example: `drafter-data merge runs/short.jsonl runs/long --out dataset --max-tokens 8192`

    Parameters
    ----------
    runs
        Files or folders (JSONL, JSON, Parquet, Arrow; .gz and .zst of JSON), or URLs that fsspec knows.
    out
        Folder of the new dataset. A dataset never changes: the same runs into the same folder are left as they are.
    tokenizer
        `builtin`, or a local Hugging Face tokenizer folder with a chat template (extra `tokenize`).
    max_tokens
        Longer rows are dropped.
    json
        Print the dataset's record as JSON.
    """
    options = MergeOptions(TokenizeOptions(tokenizer=tokenizer), max_tokens=max_tokens)
    record = merge_runs(runs, out, options=options)
    if json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    else:
        print_record(record, out)


def print_record(record: DatasetRecord, out: Path) -> None:
    """One table row a run, then where the dataset is."""
    console = Console()
    table = Table("run", "read", "kept", "dropped", "tokens", "supervised", title=f"dataset {record.dataset_id[:12]}")
    for report in record.runs:
        table.add_row(*_cells(report))
    console.print(table)
    set_aside = (out / QUARANTINE_FILE).stat().st_size
    more = f"; rows set aside are in {out / QUARANTINE_FILE}" if set_aside else ""
    console.print(f"{record.rows:,} rows, {record.tokens:,} tokens, longest {record.longest_tokens:,} in {out}{more}")


def _cells(report: RunReport) -> tuple[str, ...]:
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.items()) or "-"
    share = f"{report.supervised_tokens / report.kept_tokens:.0%}" if report.kept_tokens else "-"
    return report.run, f"{report.read:,}", f"{report.kept:,}", dropped, f"{report.kept_tokens:,}", share
