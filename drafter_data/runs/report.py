"""What became of each run: the numbers, the quarantine file, and whether that is good enough."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from data_contracts.dataset import IdConflict, RunReport
from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.finish import Finished, id_hash
from drafter_data.runs.sources import Run
from drafter_data.runs.units import Unit
from drafter_data.runs.worker import UnitReport, quarantine_name

SHOWN_CONFLICTS: Final = 20


def lines_before(units: Sequence[Unit], reports: Sequence[UnitReport]) -> list[int]:
    """For each piece, how many lines the pieces before it in the same file have."""
    before: list[int] = []
    for unit in units:
        before.append(0 if unit.first_of_file else before[-1] + reports[unit.index - 1].lines)
    return before


def run_reports(
    runs: Sequence[Run], units: Sequence[Unit], reports: Sequence[UnitReport], finished: Finished
) -> tuple[RunReport, ...]:
    """One report a run; read = kept + dropped is checked here, for every run."""
    return tuple(
        _run_report(number, run, [reports[unit.index] for unit in units if unit.run == number], finished)
        for number, run in enumerate(runs)
    )


def _run_report(number: int, run: Run, parts: Sequence[UnitReport], finished: Finished) -> RunReport:
    counts = finished.runs[number]
    dropped = sum((part.dropped for part in parts), Counter[str]())
    dropped += Counter({reasons.REPEAT: counts.repeats, reasons.NOT_SAMPLED: counts.not_sampled})
    report = RunReport(
        run=run.name,
        files=tuple(file.name for file in run.files),
        read=sum(part.read for part in parts),
        kept=counts.kept,
        dropped=dict(sorted(dropped.items())),
        kept_tokens=counts.kept_tokens,
        supervised_tokens=counts.supervised_tokens,
        quarantined=sum(faults_of(dropped).values()),
        conflicts=finished.conflicts.per_run.get(number, 0),
        skipped_files=run.skipped,
    )
    if report.read != report.kept + sum(report.dropped.values()):
        raise AssertionError(f"run {run.name}: read {report.read}, kept {report.kept}, dropped {report.dropped}")
    return report


def faults_of(dropped: Mapping[str, int]) -> dict[str, int]:
    """The part of the dropped rows that were no rows to keep, whatever the rules."""
    return {reason: count for reason, count in dropped.items() if reason not in reasons.BY_RULE}


def quarantine_entries(folder: Path, runs: Sequence[Run], units: Sequence[Unit], before: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What was set aside, in the order of run, file and line: run, file, line, reason, detail, record."""
    for unit in units:
        with (folder / quarantine_name(unit.index)).open(encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                entry["line"] += before[unit.index]
                yield {"run": runs[unit.run].name, "file": unit.file.name, **entry}


def check_outcome(reports: Sequence[RunReport], max_dropped_share: float, quarantine: Iterator[dict[str, Any]]) -> None:
    """Raises InputError where a run lost more than the limit to faults, or nothing is left at all."""
    for report in reports:
        faults = faults_of(report.dropped)
        share = sum(faults.values()) / report.read if report.read else 0.0
        if share > max_dropped_share or share == 1.0:
            worst = max(faults, key=lambda reason: (faults[reason], reason))
            entry = next(entry for entry in quarantine if entry["run"] == report.run and entry["reason"] == worst)
            raise InputError(
                f"run {report.run}: {sum(faults.values())} of {report.read} rows cannot be used ({counted(faults)}); the limit is "
                f"a share of {max_dropped_share}. First: {entry['file']}:{entry['line']}: {worst}: {entry['detail']}",
                reason=worst,
            )
    if not any(report.read for report in reports):
        raise InputError(f"{', '.join(report.run for report in reports)}: no rows in these generation runs", reason="run-empty")
    if not any(report.kept for report in reports):
        dropped = sum((Counter(report.dropped) for report in reports), Counter[str]())
        raise InputError(f"no row is left of these runs: {counted(dropped)}", reason="nothing-kept")


def counted(dropped: Mapping[str, int]) -> str:
    """`repeat 43, over-long 2`, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0])))


def named_conflicts(rows: Path, finished: Finished) -> tuple[IdConflict, ...]:
    """The first conflicts by id, with their runs; the rows file is read again for their names, only where there are any."""
    if not finished.conflicts.ids:
        return ()
    runs_of: dict[str, set[str]] = {}
    contents: Counter[str] = Counter()
    with pq.ParquetFile(rows) as file:
        for batch in file.iter_batches(columns=["source_id", "run"]):
            for source_id, run in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if id_hash(source_id) in finished.conflicts.ids:
                    runs_of.setdefault(source_id, set()).add(run)
                    contents[source_id] += 1
    return tuple(
        IdConflict(source_id=source_id, runs=tuple(sorted(runs_of[source_id])), contents=contents[source_id])
        for source_id in sorted(runs_of)[:SHOWN_CONFLICTS]
    )
