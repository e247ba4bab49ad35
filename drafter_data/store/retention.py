"""Retention: states that no kept dataset version and no live hand-off names.

Nothing is guessed: what is kept is what the caller names, every hand-off that the store has on record and whose manifest is still
there, and nothing else. What cannot be read is no reason to remove anything: it is refused. Removal is `Store.discard`: receipts
are taken back first, then files go, so that a kill in between leaves only files that no receipt names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from data_contracts.dataset import RECORD_FILE as DATASET_RECORD
from data_contracts.handoff import FILES_FILE, MANIFEST_FILE
from data_contracts.plan import PLAN_FILE
from data_contracts.retention import GcReport, Unneeded
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.store.activity import Beside, working
from drafter_data.store.store import HANDOFFS_FILE, Store, is_state_name
from drafter_data.trainers.folder import read_manifest

REASON = "not-kept"
_INSIDE = ("datasets", "deltas", "handoffs")


@dataclass
class _Kept:
    """State keys (20 bytes each) that something kept names, and what that is."""

    keys: set[bytes] = field(default_factory=set[bytes])
    datasets: dict[str, str] = field(default_factory=dict[str, str])
    handoffs: list[str] = field(default_factory=list[str])


def collect_garbage(store: Store, keep: Sequence[Path], *, remove: bool = False) -> GcReport:
    """Compares the store with what is kept; with `remove` takes out the rest.

    `keep` names dataset versions, hand-offs, or work folders with all of theirs. Raises InputError for a path that is none or is
    damaged, LeaseHeld (`store-busy`) when asked to remove while a run works on the store; no run begins meanwhile.
    """
    if not remove:
        return _compare(store, keep)
    with working(store.root, "drafter-data gc", beside=Beside.ALONE):
        report = _compare(store, keep)
        store.discard({one.state_key: REASON for one in report.unneeded}, by="gc")
        for path in list(_orphans(store)):
            store.remove_orphan(path)
    return report.model_copy(update={"removed": len(report.unneeded)})


def _compare(store: Store, keep: Sequence[Path]) -> GcReport:
    store.refresh()
    kept = _kept(store, keep)
    unneeded: list[Unneeded] = []
    size = 0
    for receipt in store.receipts():
        size += receipt.bytes
        if bytes.fromhex(receipt.state_key) not in kept.keys:
            path = store.path_of(receipt.state_key)
            linked = path.is_file() and path.stat().st_nlink > 1
            unneeded.append(Unneeded(state_key=receipt.state_key, tokens=receipt.tokens, bytes=receipt.bytes, linked=linked))
    plans = sorted(path.parent.name for path in store.root.glob(f"plans/*/{PLAN_FILE}"))
    return GcReport(
        store=str(store.root),
        states=len(store),
        bytes=size,
        kept_datasets=tuple(sorted(kept.datasets.values())),
        kept_handoffs=tuple(sorted(kept.handoffs)),
        unknown_plans=tuple(one for one in plans if one not in kept.datasets),
        unneeded=tuple(sorted(unneeded, key=lambda one: one.state_key)),
        orphans=sum(1 for _ in _orphans(store)),
    )


def _kept(store: Store, keep: Sequence[Path]) -> _Kept:
    kept = _Kept()
    folders = [folder for path in keep for folder in _folders(path)]
    recorded = [folder for folder in map(Path, store.handoffs()) if _is_there(store, folder)]
    for folder in dict.fromkeys(one.resolve() for one in [*folders, *recorded]):
        if (folder / MANIFEST_FILE).is_file():
            _keep_handoff(kept, store, folder)
        else:
            dataset = Dataset.open(folder)
            kept.datasets[dataset.record.dataset_id] = str(folder)
            _keep_keys(kept, dataset.rows_path)
    return kept


def _is_there(store: Store, handoff: Path) -> bool:
    """Whether a recorded hand-off still is; one on a disk that is not mounted here may still be linked to."""
    if (handoff / MANIFEST_FILE).is_file():
        return True
    if not handoff.parent.is_dir():
        raise InputError(
            f"hand-off {handoff}: its place cannot be seen from here and it may need states; mount it, or take its line out of "
            f"{store.root / HANDOFFS_FILE}",
            reason="handoff-unreachable",
        )
    return False


def _keep_handoff(kept: _Kept, store: Store, folder: Path) -> None:
    """A hand-off's states, unless it is known to be another store's."""
    manifest = read_manifest(folder)
    if manifest.identity != store.identity:
        return
    if not (folder / FILES_FILE).is_file():
        raise InputError(f"hand-off {folder}: no {FILES_FILE}; remove the folder, or hand off again", reason="handoff-damaged")
    kept.handoffs.append(str(folder))
    _keep_keys(kept, folder / FILES_FILE)


def _keep_keys(kept: _Kept, table: Path) -> None:
    with pq.ParquetFile(table) as file:
        for batch in file.iter_batches(65_536, columns=["state_key"]):
            kept.keys.update(map(bytes.fromhex, batch.column("state_key").to_pylist()))


def _folders(path: Path) -> list[Path]:
    """The dataset versions and hand-offs that a path stands for."""
    if (path / DATASET_RECORD).is_file() or (path / MANIFEST_FILE).is_file():
        return [path]
    parts = [path / name for name in _INSIDE if (path / name).is_dir()]
    if not parts:
        raise InputError(
            f"{path}: neither a dataset version, nor a hand-off, nor a work folder with {' or '.join(_INSIDE)} in it",
            reason="nothing-to-keep",
        )
    folders = (folder for part in parts for folder in part.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    found = sorted(folder for folder in folders if any(folder.iterdir()))
    for one in found:
        if not (one / DATASET_RECORD).is_file() and not (one / MANIFEST_FILE).is_file():
            raise InputError(
                f"{one}: neither {DATASET_RECORD} nor {MANIFEST_FILE} in it: what it needs is not known; mend or remove it",
                reason="keep-unreadable",
            )
    return found


def _orphans(store: Store) -> Iterator[Path]:
    """State files that no receipt names."""
    for path in store.root.glob("states/*/*"):
        if is_state_name(path.name) and path.stem not in store:
            yield path
