"""Stage 1: generation runs become one dataset version."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.runtime import task_run

from data_contracts.dataset import DatasetRecord
from data_contracts.parameters import InputParameters
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.sample_process import make_sample_runs as sample_runs_of
from drafter_data.runs.options import MergeOptions
from drafter_data.workspace import Workspace
from tasks.publishing import STAGE, name_run, publish_table, say


@task(name="sample runs", task_run_name="sample runs: {samples} samples, seed {seed}", **STAGE)
def make_sample_runs(workspace: Workspace, samples: int, seed: int) -> list[str]:
    """Two generated runs, where the user names none. Made once for each number and seed."""
    out = workspace.sample_runs_folder(samples, seed)
    model = ensure_checkpoint(workspace.engine_folder / "model")
    return sample_runs_of(out, samples=samples, seed=seed, model=model)


def names_of_runs() -> str:
    """The merge's name in the UI: its runs, where they are few."""
    names = [Path(source).name for source in task_run.parameters["sources"]]
    return f"merge {', '.join(names)}" if len(names) <= 3 else f"merge {len(names)} runs"


@task(name="merge", task_run_name=names_of_runs, **STAGE)
def merge_runs(workspace: Workspace, sources: list[str], parameters: InputParameters) -> DatasetRecord:
    """Publishes what was read, kept and dropped, by run and reason, and names the flow run after the dataset."""
    options = MergeOptions.of(parameters.merge, tokenizer=parameters.tokenizer, max_tokens=parameters.max_tokens)
    record = workspace.merge(sources, options, workers=parameters.merge.workers)
    publish_table("merge", _summary(record), merge_rows(record))
    say(_summary(record))
    name_run(f"dataset {record.dataset_id[:12]}, {record.rows:,} samples, {record.tokens:,} tokens")
    return record


def merge_rows(record: DatasetRecord) -> list[dict[str, object]]:
    """One row a run, and the total."""
    rows: list[dict[str, object]] = [
        {
            "run": report.run,
            "read": report.read,
            "kept": report.kept,
            "dropped": sum(report.dropped.values()),
            "why dropped": ", ".join(f"{reason} {count}" for reason, count in report.dropped.items()) or "-",
            "tokens": report.kept_tokens,
            "supervised": report.supervised_tokens,
        }
        for report in record.runs
    ]
    total = {name: sum(int(str(row[name])) for row in rows) for name in ("read", "kept", "dropped", "tokens", "supervised")}
    rows.append({"run": "all", "why dropped": "-", **total})
    return rows


def _summary(record: DatasetRecord) -> str:
    return (
        f"dataset {record.dataset_id[:12]}: {record.rows:,} rows of {len(record.runs)} runs, {record.tokens:,} tokens, "
        f"longest {record.longest_tokens:,}, tokenizer {record.tokenizer}"
    )
