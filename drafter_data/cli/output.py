"""Printing results: rich for people, one JSON document on standard output for machines.

Values are never read as rich's markup: "[tokens, layers, hidden]" would disappear and "[/x]" would raise.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_contracts.validation import Finding

LOG_COLUMNS = 160
"""Width where there is no terminal: rich would take 80 columns and cut tables in logs."""
SHOWN_FINDINGS = 20
_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?(e[-+]\d+)?%?")


def console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given, as wide as the terminal or as a log may be."""
    return Console(stderr=stderr, width=width_of(sys.stderr if stderr else sys.stdout), markup=False, emoji=False)


def width_of(stream: TextIO) -> int | None:
    """Columns for rich: a log's where `stream` is no terminal, None (rich finds out) where it is one."""
    return None if stream.isatty() or "COLUMNS" in os.environ else LOG_COLUMNS


def print_json(record: BaseModel) -> None:
    """The record as JSON, alone on standard output."""
    sys.stdout.write(record.model_dump_json(indent=2) + "\n")


def print_lines(*lines: str) -> None:
    """Lines as they are, never wrapped."""
    for line in lines:
        console().print(line, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; columns of numbers are set right."""
    console().print(table_of(title, columns, rows))


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """The same for a console of one's own."""
    table = Table(title=Text(title), title_justify="left")
    body = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    for place, name in enumerate(columns):
        numeric = bool(body) and all(_NUMBER.fullmatch(row[place]) for row in body if row[place] not in ("", "-"))
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    return table


def findings_table(findings: Sequence[Finding], title: str) -> Table:
    """Findings as a table for the terminal."""
    rows = [(finding.reason, finding.file, finding.expected, finding.found, finding.remedy) for finding in findings]
    return table_of(title, ("reason", "file", "expected", "found", "what to do"), rows)
