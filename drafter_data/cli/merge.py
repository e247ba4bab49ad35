"""`drafter-data merge`: generation runs to a dataset version."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, cast, get_args

from data_contracts.dataset import QUARANTINE_FILE, DatasetRecord, RunReport
from data_contracts.parameters import MergeParameters, ReadRole
from drafter_data.cli.output import print_lines, print_table
from drafter_data.errors import UsageError
from drafter_data.runs.merge import check_runs, merge_runs
from drafter_data.runs.options import MergeOptions, OverLong


def merge(
    *runs: str,
    out: Path | None = None,
    check: bool = False,
    tokenizer: str = "builtin",
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
    over_long: OverLong = "drop",
    supervise_reasoning: bool = True,
    supervise_tool_calls: bool = True,
    last_turn_only: bool = False,
    special_text: Literal["drop", "keep"] = "drop",
    template_time: datetime | None = None,
    role: tuple[str, ...] = (),
    vocab_size: int | None = None,
    max_dropped_share: float = 0.5,
    sample_rows: int | None = None,
    sample_tokens: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Merge generation runs into a dataset: read, tokenise, drop exact repeats, and say what became of every row.

    Example: `drafter-data merge runs/short.jsonl runs/long --out dataset --max-tokens 8192`

    Parameters
    ----------
    runs
        Files or folders (JSONL, JSON, Parquet, Arrow; .gz and .zst of JSON), or URLs that fsspec knows.
    out
        Folder of the new dataset. A dataset never changes: the same runs into the same folder are left as they are.
    check
        Say whether the runs would pass, and what would be dropped, without writing a dataset.
    tokenizer
        `builtin`, or a local Hugging Face tokenizer folder with a chat template (extra `tokenize`).
    trust_remote_code
        Run the code that comes in the tokenizer's folder (Kimi's tokenizer is such code).
    max_tokens
        Rows above this many tokens are dropped, or cut.
    over_long
        `drop` rows above the limit, or `cut` them to the limit minus (hash of the row modulo 256).
    supervise_reasoning
        Count an answer's reasoning in the loss mask.
    supervise_tool_calls
        Count an answer's tool calls in the loss mask.
    last_turn_only
        Supervise the last answer of a conversation only.
    special_text
        Rows whose text spells a control token of the tokenizer: `drop` them, or `keep` them as an engine would read them.
    template_time
        What a template that writes the date is told; the present by default.
    role
        `written=read` adds to the role map, for example `--role narrator=system`; read is one of system, developer, user,
        assistant, tool, call.
    vocab_size
        Refuse token ids of tokenised rows that are not below it.
    max_dropped_share
        Refuse a run of which a larger share of rows cannot be used (over-long rows, repeats and rows without a supervised
        token do not count).
    sample_rows
        Keep a seeded sample of this many rows.
    sample_tokens
        Keep a seeded sample of at most this many tokens.
    seed
        Of the sample.
    workers
        Processes that read; by default as many as there are CPUs, at most 8.
    json
        Print the dataset's record as JSON.
    """
    rules = MergeParameters(
        over_long=over_long,
        supervise_reasoning=supervise_reasoning,
        supervise_tool_calls=supervise_tool_calls,
        last_turn_only=last_turn_only,
        roles=_roles(role),
        special_text=special_text,
        vocab_size=vocab_size,
        max_dropped_share=max_dropped_share,
        sample_rows=sample_rows,
        sample_tokens=sample_tokens,
        sample_seed=seed,
        template_time=template_time,
        trust_remote_code=trust_remote_code,
        workers=workers,
    )
    options = MergeOptions.of(rules, tokenizer=tokenizer, max_tokens=max_tokens)
    if check:
        reports = check_runs(runs, options, workers=workers)
        _print_check(reports, json)
        return
    if out is None:
        raise UsageError("merge: --out is missing: name the folder of the new dataset, or pass --check to look only")
    record = merge_runs(runs, out, options=options, workers=workers)
    if json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    else:
        print_record(record, out)


def print_record(record: DatasetRecord, out: Path) -> None:
    """One table row a run, then where the dataset is."""
    _print_runs(record.runs, f"dataset {record.dataset_id[:12]}")
    if record.conflicts:
        names = ", ".join(conflict.source_id for conflict in record.conflicts[:5])
        print_lines(f"ids that stand for more than one content (all of them are kept): {names} ...")
    set_aside = sum(report.quarantined for report in record.runs)
    more = f"; {set_aside:,} rows set aside in {out / QUARANTINE_FILE}" if set_aside else ""
    print_lines(f"{record.rows:,} rows, {record.tokens:,} tokens, longest {record.longest_tokens:,} in {out}{more}")


def _print_check(reports: Sequence[RunReport], json: bool) -> None:
    if json:
        sys.stdout.write(json_module.dumps([report.model_dump() for report in reports], indent=2) + "\n")
    else:
        _print_runs(reports, "check: nothing was written")
        print_lines("these runs would merge")


def _print_runs(reports: Sequence[RunReport], title: str) -> None:
    columns = ("run", "read", "kept", "dropped", "tokens", "supervised", "id conflicts")
    print_table(title, columns, [_cells(report) for report in reports])


def _cells(report: RunReport) -> tuple[object, ...]:
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.items()) or "-"
    share = f"{report.supervised_tokens / report.kept_tokens:.0%}" if report.kept_tokens else "-"
    return report.run, report.read, report.kept, dropped, report.kept_tokens, share, report.conflicts


def _roles(pairs: Sequence[str]) -> dict[str, ReadRole]:
    roles: dict[str, ReadRole] = {}
    for pair in pairs:
        written, equals, read = pair.partition("=")
        if not equals or not written:
            raise UsageError(f"--role {pair}: expected written=read, for example narrator=system")
        if read not in get_args(ReadRole):
            raise UsageError(f"--role {pair}: expected one of {', '.join(get_args(ReadRole))} behind the =")
        roles[written] = cast("ReadRole", read)
    return roles
