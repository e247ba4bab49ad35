"""Merging generation runs into a dataset version.

    runs -> pieces -> (worker processes: read, tokenise, check) -> rows spilled by range of sample key -> sorted, repeats
    dropped -> rows.parquet -> dataset.json, last

Nothing depends on the order of the runs, on the number of workers or on how files are cut: A+B and B+A give the same bytes.
Everything is written in a hidden folder beside the dataset's, which is renamed once it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_contracts.dataset import QUARANTINE_FILE, RECORD_FILE, ROWS_FILE, DatasetRecord, RunReport
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.files import fsync_folder, temporary_name, xxh3_of
from drafter_data.runs import reasons
from drafter_data.runs.finish import Written, write_rows
from drafter_data.runs.options import MergeOptions, TokenizeOptions
from drafter_data.runs.sources import Run, find_runs
from drafter_data.runs.units import Unit, cut_into_units, estimated_bytes
from drafter_data.runs.worker import UnitReport, Worker, quarantine_name
from drafter_data.tokenising.chat import load_chat_tokenizer
from drafter_data.version import code_version

_PARTITION_BYTES = 32 << 20


def merge_runs(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "builtin",
    max_tokens: int | None = None,
    options: MergeOptions | None = None,
) -> DatasetRecord:
    """Merges runs (files, folders, URLs) into the dataset folder `out` and returns its record.

    `tokenizer` and `max_tokens` are the two options that everybody needs; `options` carries all of them and takes their
    place. An `out` that already holds the same dataset is left as it is. Raises InputError, with nothing written, for runs
    that cannot be used, a share of dropped rows above the limit, or an `out` that holds something else.
    """
    options = options or MergeOptions(TokenizeOptions(tokenizer=tokenizer), max_tokens=max_tokens)
    options.check()
    _check_target(out)
    runs = find_runs(sources)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(temporary_name(out.name))
    scratch.mkdir()
    try:
        record = _merge_into(scratch, runs, options)
        return _publish(scratch, out, record)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_target(out: Path) -> None:
    if (out / RECORD_FILE).exists() or not out.exists():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise InputError(f"{out}: exists and is no dataset; name a new folder", reason="target-in-use")


def _merge_into(scratch: Path, runs: Sequence[Run], options: MergeOptions) -> DatasetRecord:
    units = cut_into_units(runs)
    partitions = max(1, min(1024, estimated_bytes(units) // _PARTITION_BYTES))
    spill = scratch / "spill"
    spill.mkdir()
    reports = _process(units, spill, partitions, options)
    lines_before = _lines_before(units, reports)
    names = [run.name for run in runs]
    written = write_rows(spill, scratch / ROWS_FILE, partitions, units, lines_before, names)
    run_reports = tuple(_run_report(number, run, units, reports, written) for number, run in enumerate(runs))
    _write_quarantine(scratch, spill, runs, units, lines_before)
    _check_outcome(run_reports, options, scratch / QUARANTINE_FILE)
    shutil.rmtree(spill)
    return _record(scratch, run_reports, written, options)


def _process(units: Sequence[Unit], spill: Path, partitions: int, options: MergeOptions) -> list[UnitReport]:
    worker = Worker(spill, partitions, options)
    reports = [worker.process(unit) for unit in units]
    worker.close()
    return reports


def _lines_before(units: Sequence[Unit], reports: Sequence[UnitReport]) -> list[int]:
    """For each piece, how many lines of its file the pieces before it have."""
    before: list[int] = []
    for unit in units:
        before.append(0 if unit.first_of_file else before[-1] + reports[unit.index - 1].lines)
    return before


def _run_report(number: int, run: Run, units: Sequence[Unit], reports: Sequence[UnitReport], written: Written) -> RunReport:
    mine = [reports[unit.index] for unit in units if unit.run == number]
    counts = written.runs[number]
    dropped = sum((report.dropped for report in mine), Counter[str]())
    if counts.repeats:
        dropped[reasons.REPEAT] += counts.repeats
    report = RunReport(
        run=run.name,
        files=tuple(file.name for file in run.files),
        read=sum(report.read for report in mine),
        kept=counts.kept,
        dropped=dict(sorted(dropped.items())),
        kept_tokens=counts.kept_tokens,
        supervised_tokens=counts.supervised_tokens,
    )
    if report.read != report.kept + sum(report.dropped.values()):
        raise AssertionError(f"run {run.name}: read {report.read}, kept {report.kept}, dropped {report.dropped}")
    return report


def _write_quarantine(scratch: Path, spill: Path, runs: Sequence[Run], units: Sequence[Unit], lines_before: Sequence[int]) -> None:
    with (scratch / QUARANTINE_FILE).open("w", encoding="utf-8", newline="\n") as out:
        for unit in units:
            with (spill / quarantine_name(unit.index)).open(encoding="utf-8") as lines:
                for line in lines:
                    entry = json.loads(line)
                    entry["line"] += lines_before[unit.index]
                    out.write(json.dumps({"run": runs[unit.run].name, "file": unit.file.name, **entry}) + "\n")


def _check_outcome(reports: Sequence[RunReport], options: MergeOptions, quarantine: Path) -> None:
    for report in reports:
        faults = {reason: count for reason, count in report.dropped.items() if reason not in reasons.BY_RULE}
        share = sum(faults.values()) / report.read if report.read else 0.0
        if share > options.max_dropped_share or (not report.kept and share == 1.0):
            worst = max(faults, key=lambda reason: (faults[reason], reason))
            raise InputError(
                f"run {report.run}: {sum(faults.values())} of {report.read} rows would be dropped ({_counts(faults)}); the limit "
                f"is a share of {options.max_dropped_share}. First: {_first_fault(quarantine, report.run, worst)}",
                reason=worst,
            )
    if not any(report.read for report in reports):
        raise InputError(f"{', '.join(report.run for report in reports)}: no rows in these generation runs", reason="run-empty")
    if not any(report.kept for report in reports):
        dropped = sum((Counter(report.dropped) for report in reports), Counter[str]())
        raise InputError(f"no row is left of these runs: {_counts(dropped)}", reason="nothing-kept")


def _counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0])))


def _first_fault(quarantine: Path, run: str, reason: str) -> str:
    with quarantine.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            if entry["run"] == run and entry["reason"] == reason:
                return f"{entry['file']}:{entry['line']}: {entry['reason']}: {entry['detail']}"
    return reason


def _record(scratch: Path, reports: tuple[RunReport, ...], written: Written, options: MergeOptions) -> DatasetRecord:
    tokenizer = load_chat_tokenizer(options.tokenize)
    rows = scratch / ROWS_FILE
    return DatasetRecord(
        dataset_id=written.key_digest.hexdigest(),
        rows=sum(report.kept for report in reports),
        distinct_states=len(np.unique(np.concatenate(written.state_heads))),
        tokens=sum(report.kept_tokens for report in reports),
        supervised_tokens=sum(report.supervised_tokens for report in reports),
        longest_tokens=written.longest_tokens,
        rows_bytes=rows.stat().st_size,
        rows_xxh3=xxh3_of(rows),
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.tokenizer_hash,
        template_hash=tokenizer.template_hash,
        runs=reports,
        code_version=code_version(),
    )


def _publish(scratch: Path, out: Path, record: DatasetRecord) -> DatasetRecord:
    """Renames the finished folder to its place; the same dataset that is there already stays as it is."""
    if (out / RECORD_FILE).exists():
        existing = Dataset.open(out).record
        if (existing.dataset_id, existing.rows_xxh3) == (record.dataset_id, record.rows_xxh3):
            return existing
        raise InputError(
            f"{out}: holds another dataset; expected {record.dataset_id} ({record.rows} rows), found {existing.dataset_id} "
            f"({existing.rows} rows); a dataset never changes: name a new folder",
            reason="target-in-use",
        )
    for name in (ROWS_FILE, QUARANTINE_FILE):
        _sync(scratch / name)
    (scratch / RECORD_FILE).write_text(record.model_dump_json(indent=2) + "\n")
    _sync(scratch / RECORD_FILE)
    fsync_folder(scratch)
    if out.exists():
        out.rmdir()  # an empty folder that was made for it
    scratch.rename(out)
    fsync_folder(out.parent)
    return record


def _sync(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
