"""The Trainer seam: a layout, a command, a curve, a checkpoint. A trainer is one file in this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from data_contracts.handoff import Checkpoint, HandoffManifest, SpaceNeed, TrainingPoint
from data_contracts.plan import Exclusion
from drafter_data.dataset import Dataset
from drafter_data.store.store import Store


class Trainer(Protocol):
    """What the hand-off knows of a training job.

    `materialise` writes the trainer's view of every row of `dataset` that `store` holds (others must be in `exclusions`) into the
    folder `out`, all or nothing, and returns the manifest whose file it wrote last. `command` is an argument list, never a shell
    string. `progress` reads one line of the job's output. `finished` raises TrainingFailed unless a complete fresh checkpoint is
    there.
    """

    name: str

    def needs(self, dataset: Dataset, store: Store) -> SpaceNeed: ...

    def materialise(
        self,
        dataset: Dataset,
        store: Store,
        out: Path,
        *,
        model: Path,
        exclusions: tuple[Exclusion, ...],
        options: Mapping[str, str],
    ) -> HandoffManifest: ...

    def command(self, manifest: HandoffManifest, options: Mapping[str, str]) -> list[str]: ...

    def progress(self, line: str) -> TrainingPoint | None: ...

    def finished(self, manifest: HandoffManifest, started_at: float) -> Checkpoint: ...
