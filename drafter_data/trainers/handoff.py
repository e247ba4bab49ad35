"""The hand-off as one step: needs against free space, then the view. The CLI and the flow call this."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from data_contracts.handoff import HandoffManifest
from data_contracts.plan import Exclusion
from drafter_data.dataset import Dataset
from drafter_data.errors import PreflightRefused
from drafter_data.files import existing_parent
from drafter_data.store.activity import working
from drafter_data.store.store import Store
from drafter_data.trainers.base import Trainer


def hand_off(
    trainer: Trainer,
    dataset: Dataset,
    store: Store,
    out: Path,
    *,
    model: Path,
    exclusions: Iterable[Exclusion] = (),
    options: Mapping[str, str] | None = None,
    keep_free_bytes: int = 0,
) -> HandoffManifest:
    """Writes the trainer's view into `out` and returns its manifest.

    Raises PreflightRefused (`handoff-space`) before anything is written when the view would not fit and leave `keep_free_bytes`.
    """
    check_space(trainer, dataset, store, out, keep_free_bytes)
    with ExitStack() as stack:
        if os.access(store.root, os.W_OK):  # from a store that is mounted read-only nothing can be removed
            stack.enter_context(working(store.root, f"hand-off to {trainer.name}"))
            store.record_handoff(out)
        return trainer.materialise(dataset, store, out, model=model, exclusions=tuple(exclusions), options=options or {})


def check_space(
    trainer: Trainer, dataset: Dataset, store: Store, out: Path, keep_free_bytes: int = 0, states_to_come_bytes: int = 0
) -> None:
    """Compares what the trainer's view takes with what is free on its target, after the states that are still to come to the
    same disk. Raises PreflightRefused.
    """
    need = trainer.needs(dataset, store)
    target = existing_parent(out)
    free = shutil.disk_usage(target).free
    if target.stat().st_dev == store.root.stat().st_dev:
        free -= states_to_come_bytes
    if need.bytes + keep_free_bytes > free:
        raise PreflightRefused(
            f"the hand-off to {trainer.name} takes {need.bytes / 1e9:.2f} GB on {target} ({need.means}) beside the "
            f"{keep_free_bytes / 1e9:.2f} GB to keep free, found {free / 1e9:.2f} GB; name a folder with more space",
            reason="handoff-space",
        )
