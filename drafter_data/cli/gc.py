"""`drafter-data gc`: states that no kept dataset version and no live hand-off names."""

from __future__ import annotations

from pathlib import Path

from drafter_data.cli.output import print_json, print_lines, print_table
from drafter_data.errors import UsageError
from drafter_data.store.retention import collect_garbage
from drafter_data.store.store import Store
from drafter_data.units import gigabytes

SHOWN_STATES = 20


def gc(store: Path, *, keep: tuple[Path, ...] = (), remove: bool = False, json: bool = False) -> None:
    """List the states that no kept dataset version and no live hand-off names; with --remove, remove them.

    Example: `drafter-data gc .demo/store`

    Hand-offs that were made from this store are kept wherever they are, as long as their folder is there; what one has hard-linked
    stays its own in any case. Let go of a version by removing its folder, or by naming only those to keep.

    Parameters
    ----------
    store
        Folder of the store.
    keep
        Dataset versions, hand-offs, or work folders with all of theirs. Default: the work folder in which the store lies.
    remove
        Remove what is listed. Refused while a run works on the store.
    json
        Print the report as JSON.
    """
    opened = Store.open(store)
    try:
        report = collect_garbage(opened, keep or _work_folder(opened), remove=remove)
    finally:
        opened.close()
    if json:
        print_json(report)
        return
    print_lines(
        f"{report.states:,} states, {gigabytes(report.bytes)}; kept: {len(report.kept_datasets)} dataset versions, "
        f"{len(report.kept_handoffs)} hand-offs"
    )
    if report.unknown_plans:
        some = ", ".join(one[:12] for one in report.unknown_plans[:10])
        print_lines(f"planned here once, and not kept: {len(report.unknown_plans)} datasets ({some})")
    if report.unneeded:
        rows = [(one.state_key, one.tokens, one.bytes, "yes" if one.linked else "") for one in report.unneeded[:SHOWN_STATES]]
        print_table(f"Not needed ({len(report.unneeded):,}; --json lists all)", ("state", "tokens", "bytes", "linked"), rows)
    what = f"{len(report.unneeded):,} states that nothing kept names, {gigabytes(report.unneeded_bytes)}"
    print_lines(f"removed {what}" if remove else f"{what}" + ("; remove them with --remove" if report.unneeded else ""))


def _work_folder(store: Store) -> tuple[Path, ...]:
    folder = store.root.absolute().parent
    if not (folder / "datasets").is_dir():
        raise UsageError(
            f"{folder} is no work folder (no datasets/ in it): name the dataset versions and work folders to keep with --keep",
            reason="nothing-to-keep",
        )
    return (folder,)
