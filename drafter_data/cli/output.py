"""Printing results: rich for people, one JSON document on standard output for machines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

console = Console()


def print_json(record: BaseModel) -> None:
    """The record as JSON, alone on standard output."""
    sys.stdout.write(record.model_dump_json(indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; numbers are set right."""
    table = Table(title=title, title_justify="left")
    body = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    for place, name in enumerate(columns):
        numeric = bool(body) and all(row[place].replace(",", "").replace(".", "").isdigit() for row in body if row[place])
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    console.print(table)
