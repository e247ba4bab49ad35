"""A work folder: where a flow keeps dataset versions and hand-offs, and the links that name the latest of each.

FOLDER/datasets/<dataset_id>/   FOLDER/dataset -> the latest
FOLDER/handoffs/<name>/         FOLDER/handoff -> the latest
FOLDER/deltas/<dataset_id>/     what was new in a version, where a delta was handed off
FOLDER/refreshed.json, nights.jsonl    what the nightly run has worked through, and what each night did
FOLDER/store/                   unless another store is named
FOLDER/engine/                  log, dumps and model of an engine that the flow starts itself
FOLDER/sample-runs/<name>/      generated runs, where none are named
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_contracts.dataset import DatasetRecord
from data_contracts.parameters import StorageParameters
from data_contracts.plan import Exclusion
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.files import TEMPORARY_PREFIX, fsync_folder, replace_link, temporary_name
from drafter_data.runs.merge import merge_runs
from drafter_data.runs.options import MergeOptions

DATASET_LINK, HANDOFF_LINK, STORE_FOLDER = "dataset", "handoff", "store"


@dataclass(frozen=True)
class Workspace:
    """Absolute paths of a work folder and its store."""

    folder: Path
    store: Path
    keep_free_bytes: int = 0

    @classmethod
    def of(cls, storage: StorageParameters) -> Workspace:
        """The work folder of flow parameters; relative paths are taken from the current folder."""
        folder = Path(storage.folder).expanduser().absolute()
        store = Path(storage.store).expanduser().absolute() if storage.store else folder / STORE_FOLDER
        return cls(folder, store, int(storage.keep_free_gb * 1e9))

    @property
    def dataset_link(self) -> Path:
        """Names the latest dataset version."""
        return self.folder / DATASET_LINK

    @property
    def handoff_link(self) -> Path:
        """Names the latest hand-off."""
        return self.folder / HANDOFF_LINK

    @property
    def engine_folder(self) -> Path:
        """Log, dumps and model of an engine that the flow starts itself."""
        return self.folder / "engine"

    def sample_runs_folder(self, samples: int, seed: int) -> Path:
        """Where generated runs of this number and seed lie."""
        return self.folder / "sample-runs" / f"{samples}-samples-seed-{seed}"

    def prepare(self) -> None:
        """Makes the folder. Raises InputError when it cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / temporary_name("probe")
            probe.write_bytes(b"\0" * 4096)
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"work folder {self.folder} cannot be written to: {error.strerror}; free space there, or name another folder "
                "(storage.folder)",
                reason="folder-not-writable",
            ) from error

    def merge(self, sources: Sequence[str], options: MergeOptions, *, workers: int | None = None) -> DatasetRecord:
        """Merges runs into `datasets/<dataset_id>` and points `dataset` at it. Raises InputError."""
        datasets = self.folder / "datasets"
        datasets.mkdir(exist_ok=True)
        with _alone_in(datasets):
            scratch = datasets / temporary_name("merge")
            record = merge_runs(sources, scratch, options=options, workers=workers)
            final = datasets / record.dataset_id
            if final.exists():
                Dataset.open(final)
                shutil.rmtree(scratch)
            else:
                scratch.replace(final)
                fsync_folder(datasets)
            replace_link(self.dataset_link, final)
        return record

    def dataset_folder(self, dataset_id: str) -> Path:
        """Where a dataset version lies."""
        return self.folder / "datasets" / dataset_id

    def handoff_folder(self, trainer: str, dataset_id: str, exclusions: Iterable[Exclusion], options: Mapping[str, str]) -> Path:
        """A name for a hand-off that another dataset, exclusion or option changes, so that no hand-off is ever overwritten."""
        digest = hashlib.blake2b(f"{self.store}\n{sorted(options.items())}".encode(), digest_size=4)
        for exclusion in exclusions:
            digest.update(exclusion.model_dump_json().encode())
        return self.folder / "handoffs" / f"{trainer}-{dataset_id[:12]}-{digest.hexdigest()}"


@contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """One merge at a time in a work folder; what a killed one left is removed then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for stale in folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)
