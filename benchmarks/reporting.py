"""What every benchmark prints and keeps: a table for people, JSON for machines, its section of `benchmarks/results.md`.

A benchmark keeps `benchmarks/results/<name>.json`; results.md is written from all of them, so that one can be repeated alone.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS_FOLDER = HERE / "results"
RESULTS_FILE = HERE / "results.md"
Cell = str | int | float | None


@dataclass(frozen=True)
class Result:
    """One benchmark's outcome. `rows` hold raw figures under `columns`; `goals` say what was asked and what was reached."""

    name: str
    title: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    goals: Mapping[str, str]
    notes: Sequence[str] = ()
    figures: Mapping[str, object] = field(default_factory=dict[str, object])


def publish(result: Result) -> None:
    """Prints the JSON on standard output and the table on standard error, and renews results.md."""
    record = {**asdict(result), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine()}
    RESULTS_FOLDER.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, default=str)
    (RESULTS_FOLDER / f"{result.name}.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
    table = Table(*result.columns, title=result.title)
    for row in result.rows:
        table.add_row(*map(_shown, row))
    console = Console(stderr=True, width=150)
    console.print(table)
    for goal, reached in result.goals.items():
        console.print(f"{goal}: [bold]{reached}[/bold]")
    write_results()


def write_results() -> None:
    """Writes results.md from what the benchmarks kept."""
    parts = [
        "# Benchmark results\n",
        "Written by the benchmarks themselves. Repeat all: `make bench`; one: the command under its title.\n",
    ]
    parts += [_section(json.loads(path.read_bytes())) for path in sorted(RESULTS_FOLDER.glob("*.json"))]
    RESULTS_FILE.write_text("\n".join(parts))


def machine() -> str:
    """The machine in one line, with how busy it is: figures taken beside other work are to be read as ratios."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    system = f"{platform.system()} {platform.release()}, load {os.getloadavg()[0]:.1f}"
    return f"{os.cpu_count()} x {model}, {memory:.0f} GB, {system}, Python {platform.python_version()}"


def peak_rss_mb() -> float:
    """Of this process since its exec. Not getrusage's: that counts what the parent had at the fork."""
    line = next(line for line in _lines("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def median(values: Sequence[float]) -> float:
    """The median, which one disturbed repeat does not move."""
    return statistics.median(values)


def every(seconds: Sequence[float]) -> str:
    """All runs, beside their median."""
    return ", ".join(f"{one:.2f}" for one in seconds)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _section(record: dict[str, object]) -> str:
    columns, rows = record["columns"], record["rows"]
    assert isinstance(columns, list)
    assert isinstance(rows, list)
    goals, notes = record["goals"], record["notes"]
    assert isinstance(goals, dict)
    assert isinstance(notes, list)
    lines = [f"## {record['title']}\n", f"`{record['command']}` · {record['date']} · {record['machine']}\n"]
    lines += [f"| {' | '.join(map(str, columns))} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(map(_shown, row))} |" for row in rows]
    lines += ["", *(f"- {goal}: **{reached}**" for goal, reached in goals.items()), *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell if cell is not None else "")
