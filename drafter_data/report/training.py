"""The training curve of a job that has ended, or runs elsewhere, from its log."""

from __future__ import annotations

from pathlib import Path

from data_contracts.handoff import HandoffManifest, TrainingPoint
from drafter_data.trainers.curve import Curve
from drafter_data.trainers.job import JOB_LOG
from drafter_data.trainers.registry import trainer_named


def read_curve(manifest: HandoffManifest) -> list[TrainingPoint]:
    """The curve of the latest job of a hand-off, from its log; empty where there is none."""
    log, trainer, curve = Path(manifest.folder) / JOB_LOG, trainer_named(manifest.trainer), Curve()
    if not log.is_file():
        return []
    with log.open(errors="replace") as lines:
        for line in lines:
            point = trainer.progress(line)
            if point is not None:
                curve.take(point)
    return curve.points()
