"""`drafter-data fsck`: finds what crashes and bit rot left in a store, explains it and mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from drafter_data.cli.output import SHOWN_FINDINGS, console, findings_table, print_json, print_lines
from drafter_data.store.fsck import fsck as check_store
from drafter_data.store.store import Store


def fsck(
    store: Path,
    *,
    repair: bool = False,
    deep: bool = False,
    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=256))] = 2,
    json: bool = False,
) -> int:
    """Find left-overs and damage in a store; with --repair, mend it: what does not match is extracted again by the next run.

    Example: `drafter-data fsck .demo/store --deep --repair`

    Exit code 1 when problems were found and are still there.

    Parameters
    ----------
    store
        Folder of the store.
    repair
        Sweep temporaries and files without a receipt, take out states that do not match. Refused while a run works on the store.
    deep
        Read every byte and compare checksums and content, not only sizes.
    workers
        Threads of a deep check, for states of 8 MB and more; smaller ones are checked in one.
    json
        Print the report as JSON.
    """
    opened = Store.open(store)
    report = check_store(opened, repair=repair, deep=deep, workers=workers)
    opened.close()
    left = len(report.problems) - report.repaired
    if json:
        print_json(report)
    else:
        print_lines(f"{report.states:,} states, {len(report.problems)} problems, {report.repaired} repaired")
        if report.problems:
            title = f"Problems ({len(report.problems)}; --json lists all)"
            console().print(findings_table(report.problems[:SHOWN_FINDINGS], title))
        if left and not repair:
            print_lines(f"Mend with: drafter-data fsck {store} {'--deep ' if deep else ''}--repair")
    return 1 if left else 0
