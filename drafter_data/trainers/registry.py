"""The trainers by name. A further one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable

from drafter_data.errors import UsageError
from drafter_data.trainers.base import Trainer
from drafter_data.trainers.ridge import RidgeTrainer
from drafter_data.trainers.specforge import SpecForgeTrainer
from drafter_data.trainers.speculators import SpeculatorsTrainer

TRAINERS: dict[str, Callable[[], Trainer]] = {
    "ridge": RidgeTrainer,
    "specforge": SpecForgeTrainer,
    "speculators": SpeculatorsTrainer,
}


def trainer_named(name: str) -> Trainer:
    """The trainer of that name. Raises UsageError with the names that there are."""
    if name not in TRAINERS:
        raise UsageError(f"no trainer {name!r}; there are {', '.join(sorted(TRAINERS))}", reason="trainer-unknown")
    return TRAINERS[name]()
