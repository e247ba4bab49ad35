"""The trainer that ships: a linear drafter, NumPy only, over the linked view. It is also the cheapest alarm for shuffled states."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from data_contracts.handoff import Checkpoint, HandoffManifest, SpaceNeed, TrainingPoint
from data_contracts.plan import Exclusion
from drafter_data.dataset import Dataset
from drafter_data.errors import TrainingFailed
from drafter_data.store.store import Store
from drafter_data.trainers.checkpoint_files import fresh_checkpoint
from drafter_data.trainers.folder import CHECKPOINT_FOLDER
from drafter_data.trainers.linked_view import linked_view_need, write_linked_view
from drafter_data.trainers.options import environment_prefix, flag_list, trainer_flags

_NUMBER = r"(nan|-?inf|[-+]?[0-9][0-9.eE+-]*)"
_LINE = re.compile(rf"^step=(\d+)/\d+ loss={_NUMBER} agreement={_NUMBER} .*seconds={_NUMBER}$")


class RidgeTrainer:
    """The Trainer seam for ridge_job.py."""

    name = "ridge"

    def needs(self, dataset: Dataset, store: Store) -> SpaceNeed:  # noqa: ARG002 - the seam's signature
        """Bytes on the target; the states are linked."""
        return linked_view_need(dataset)

    def materialise(
        self,
        dataset: Dataset,
        store: Store,
        out: Path,
        *,
        model: Path,
        exclusions: tuple[Exclusion, ...],
        options: Mapping[str, str],
    ) -> HandoffManifest:
        """Writes the view; see write_linked_view."""
        return write_linked_view(
            self.name,
            dataset,
            store,
            out,
            model=model,
            exclusions=exclusions,
            options=options,
            command=lambda manifest: self.command(manifest, options),
        )

    def command(self, manifest: HandoffManifest, options: Mapping[str, str]) -> list[str]:
        """`python -m drafter_data.trainers.ridge_job`; the only flag of its own is `penalty`."""
        python = options.get("python", sys.executable)
        job = [python, "-m", "drafter_data.trainers.ridge_job", "--handoff", manifest.folder]
        return [*environment_prefix(options), *job, *flag_list(trainer_flags(options))]

    def progress(self, line: str) -> TrainingPoint | None:
        """A point from a line such as `step=40/280 loss=0.41 agreement=0.62 baseline=0.05 seconds=1.2`."""
        found = _LINE.match(line.strip())
        if found is None:
            return None
        step, loss, accuracy, seconds = found.groups()
        return TrainingPoint(step=int(step), loss=float(loss), accuracy=float(accuracy), seconds=float(seconds))

    def finished(self, manifest: HandoffManifest, started_at: float) -> Checkpoint:
        """The checkpoint with its held-out metrics. Raises TrainingFailed."""
        from drafter_data.trainers.ridge_job import METRICS_FILE, RIDGE_FOLDER, WEIGHTS_FILE

        folder = Path(manifest.folder) / CHECKPOINT_FOLDER / RIDGE_FOLDER
        checkpoint = fresh_checkpoint(folder, folder / WEIGHTS_FILE, (METRICS_FILE,), started_at)
        record = json.loads((folder / METRICS_FILE).read_bytes())
        if record["weights_xxh3"] != checkpoint.digest:
            raise TrainingFailed(f"{folder}: the metrics are not those of the weights beside them", reason="bad-checkpoint")
        return checkpoint.model_copy(update={"metrics": record["metrics"]})
