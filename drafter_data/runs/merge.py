"""Merging generation runs into a dataset version.

    runs -> pieces -> (processes: read, tokenise, check) -> rows spilled by range of sample key -> sorted, repeats dropped
    -> rows.parquet -> dataset.json, last

Nothing depends on the order of the runs, on the number of processes or on how files are cut: A+B and B+A give the same
bytes. Everything is written in a hidden folder beside the dataset's, which is renamed once it is complete.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from data_contracts.dataset import QUARANTINE_FILE, ROWS_FILE, DatasetRecord, RunReport
from drafter_data.files import xxh3_of
from drafter_data.runs.finish import Finished, Finisher
from drafter_data.runs.options import MergeOptions, TokenizeOptions
from drafter_data.runs.pool import process_units
from drafter_data.runs.report import check_outcome, lines_before, named_conflicts, quarantine_entries, run_reports
from drafter_data.runs.scratch import check_target, publish, scratch_folder
from drafter_data.runs.sources import Run, find_runs
from drafter_data.runs.units import UNIT_BYTES, Unit, cut_into_units, estimated_bytes
from drafter_data.runs.worker import TokenizerNote
from drafter_data.version import code_version

PARTITION_BYTES: Final = 32 << 20
_MOST_PARTITIONS: Final = 1024


def merge_runs(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "builtin",
    max_tokens: int | None = None,
    options: MergeOptions | None = None,
    workers: int | None = None,
) -> DatasetRecord:
    """Merges runs (files, folders, URLs) into the dataset folder `out` and returns its record.

    `tokenizer` and `max_tokens` are the two options that everybody needs; `options` carries all of them and takes their
    place. An `out` that already holds the same dataset is left as it is. Raises InputError, with nothing written, for runs
    that cannot be used, a share of faulty rows above the limit, or an `out` that holds something else.
    """
    options = options or MergeOptions(TokenizeOptions(tokenizer=tokenizer), max_tokens=max_tokens)
    options.check()
    check_target(out)
    runs = find_runs(sources)
    with scratch_folder(out) as scratch:
        work = scratch / "spill"
        work.mkdir()
        reports, finished, note = _merge(runs, work, scratch, options, workers)
        shutil.rmtree(work)
        return publish(scratch, out, _record(scratch / ROWS_FILE, reports, finished, options, note))


def check_runs(sources: Sequence[str], options: MergeOptions, *, workers: int | None = None) -> tuple[RunReport, ...]:
    """What a merge of these runs would report, without writing a dataset. Raises InputError where it would refuse."""
    options.check()
    runs = find_runs(sources)
    with tempfile.TemporaryDirectory(prefix="drafter-data-check-") as folder:
        return _merge(runs, Path(folder), None, options, workers)[0]


def _merge(
    runs: Sequence[Run], work: Path, target: Path | None, options: MergeOptions, workers: int | None
) -> tuple[tuple[RunReport, ...], Finished, TokenizerNote]:
    """Reads, selects, and writes rows and quarantine into `target`; where that is None, only counts."""
    units = cut_into_units(runs, UNIT_BYTES)
    partitions = max(1, min(_MOST_PARTITIONS, estimated_bytes(units) // PARTITION_BYTES))
    unit_reports, note = process_units(units, work, partitions, options, workers=workers, keys_only=target is None)
    before = lines_before(units, unit_reports)
    finisher = Finisher(work, partitions, units, before, [run.name for run in runs])
    finished = finisher.finish(None if target is None else target / ROWS_FILE, options)
    reports = run_reports(runs, units, unit_reports, finished)
    check_outcome(reports, options.max_dropped_share, quarantine_entries(work, runs, units, before))
    if target is not None:
        _write_quarantine(target / QUARANTINE_FILE, work, runs, units, before)
    return reports, finished, note


def _write_quarantine(path: Path, work: Path, runs: Sequence[Run], units: Sequence[Unit], before: Sequence[int]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for entry in quarantine_entries(work, runs, units, before):
            out.write(json.dumps(entry) + "\n")


def _record(
    rows: Path, reports: tuple[RunReport, ...], finished: Finished, options: MergeOptions, tokenizer: TokenizerNote
) -> DatasetRecord:
    return DatasetRecord(
        dataset_id=finished.dataset_id,
        rows=sum(report.kept for report in reports),
        distinct_states=finished.distinct_states,
        tokens=sum(report.kept_tokens for report in reports),
        supervised_tokens=sum(report.supervised_tokens for report in reports),
        longest_tokens=finished.longest_tokens,
        rows_bytes=rows.stat().st_size,
        rows_xxh3=xxh3_of(rows),
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.tokenizer_hash,
        template_hash=tokenizer.template_hash,
        runs=reports,
        conflicts=named_conflicts(rows, finished),
        options=options.changed(),
        code_version=code_version(),
    )
