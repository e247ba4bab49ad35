"""fsck: finds what a crash, a full disk or bit rot left in a store, explains it and, asked to, mends it.

Nothing that has a matching receipt and file is ever touched. A state that does not match is taken out (its receipt is taken back by
a later line, then its file removed), so that the next run extracts it again. Without `deep` files are compared by size; with it
every byte is read and checked as `validate` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from data_contracts.validation import Finding, FsckReport
from drafter_data.errors import InputError, LeaseHeld
from drafter_data.files import TEMPORARY_PREFIX
from drafter_data.store.store import Store, is_state_name
from drafter_data.validation.state_file import UNREADABLE
from drafter_data.validation.store import check_receipts

WRITING_SECONDS = 60.0
"""A temporary file outside states/ that is younger may be somebody's who is just writing it."""


@dataclass
class _Pass:
    """One run of fsck: what was found, and how each thing can be mended."""

    problems: list[Finding] = field(default_factory=list[Finding])
    mend: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    discard: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, finding: Finding, mend: Callable[[], object]) -> None:
        self.problems.append(finding)
        self.mend.append(mend)


def fsck(store: Store, *, repair: bool = False, deep: bool = False, workers: int = 2) -> FsckReport:
    """Checks `store`; with `repair` mends what it finds. Raises LeaseHeld when asked to repair while a run works on the store."""
    store.refresh()
    live = [lease for lease, alive in store.leases().values() if alive]
    if repair and live:
        raise LeaseHeld(
            f"store {store.root} is being worked on by {live[0].holder} on {live[0].host}; expected no live lease for a repair, "
            f"found {len(live)}; wait for that run or stop it"
        )
    found = _Pass()
    _old_temporaries(store, found)
    _receipt_lines(store, found)
    _states(store, found, deep, workers)
    if not live:  # while a run is on, temporaries and files without a receipt may be its own
        _unfinished_states(store, found)
        _orphans(store, found)
    _ended_leases(store, found)
    if repair:
        _mend(store, found)
    return FsckReport(
        store=str(store.root),
        states=len(store),
        deep=deep,
        repair=repair,
        problems=tuple(found.problems),
        repaired=len(found.mend) + len(found.discard) if repair else 0,
    )


def _mend(store: Store, found: _Pass) -> None:
    try:
        for mend in found.mend:
            mend()
        store.discard(found.discard)
    except OSError as error:
        raise InputError(
            f"cannot repair {store.root}: {error.strerror}; make the store writable and run fsck again", reason="store-not-writable"
        ) from error


def _problem(reason: str, path: Path, expected: str, found: str, remedy: str, state_key: str = "") -> Finding:
    return Finding(reason=reason, state_key=state_key, file=str(path), expected=expected, found=found, remedy=remedy)


def _old_temporaries(store: Store, found: _Pass) -> None:
    """What killed writers of small files left."""
    patterns = ("", "receipts/", "leases/", "costs/", "plans/*/", "plans/*/*/")
    for path in (path for pattern in patterns for path in sorted(store.root.glob(f"{pattern}{TEMPORARY_PREFIX}*"))):
        if time.time() - path.stat().st_mtime > WRITING_SECONDS:
            found.add(_temporary(path), partial(path.unlink, missing_ok=True))


def _unfinished_states(store: Store, found: _Pass) -> None:
    """What killed commits left."""
    for path in sorted(store.root.glob(f"states/*/{TEMPORARY_PREFIX}*")):
        found.add(_temporary(path), partial(store.remove_orphan, path))


def _temporary(path: Path) -> Finding:
    return _problem(
        "temporary", path, "no temporary file", f"{path.stat().st_size} bytes of a killed writer", "removed by --repair"
    )


def _receipt_lines(store: Store, found: _Pass) -> None:
    for line in store.receipt_lines():
        if line.key is None:
            what = "a torn line, cut off by a crash" if line.torn else "a line that is no receipt"
            found.add(
                _problem(
                    "receipt-torn" if line.torn else "receipt-unreadable",
                    line.path,
                    f"a receipt at byte {line.offset}",
                    what,
                    "it was never counted; --repair marks it as seen, and its state is extracted again",
                ),
                partial(store.set_aside, line),
            )


def _states(store: Store, found: _Pass, deep: bool, workers: int) -> None:
    """Receipts whose file is not there, or not what they say. What only cannot be read now may be right: it stays."""
    for finding in check_receipts(store, deep=deep, workers=workers):
        found.problems.append(finding)
        if finding.reason != UNREADABLE:
            found.discard[finding.state_key] = finding.reason


def _orphans(store: Store, found: _Pass) -> None:
    """State files without a receipt: a commit that was killed between its rename and its receipt, or somebody else's file."""
    for path in sorted(store.root.glob("states/*/*")):
        if path.name.startswith(TEMPORARY_PREFIX) or (is_state_name(path.name) and path.stem in store):
            continue
        if not is_state_name(path.name):
            found.problems.append(
                _problem("foreign-file", path, "only <state key>.safetensors", path.name, "not ours: move it away by hand")
            )
            continue
        found.add(
            _problem(
                "orphan", path, "a receipt for each state file", "none: a commit was killed before its receipt",
                "removed by --repair; the state is extracted again", path.stem,
            ),
            partial(store.remove_orphan, path),
        )  # fmt: skip


def _ended_leases(store: Store, found: _Pass) -> None:
    for key, (lease, alive) in store.leases().items():
        if not alive:
            path = store.root / "leases" / f"{key}.json"
            gone = f"{lease.holder} on {lease.host}, gone"
            remedy = "taken over by the next run, or removed by --repair"
            found.add(_problem("lease-ended", path, "a living holder", gone, remedy), partial(store.end_lease, key))
