"""A training job as a deployment of its own, for a host that has the accelerators and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from data_contracts.parameters import HandoffParameters
from drafter_data.errors import InputError
from drafter_data.trainers.folder import read_manifest
from flows.outcome import in_one_line
from tasks import handoff as trainer


@flow(name="train", persist_result=False)
def train(handoff: str, command: tuple[str, ...] = ()) -> State[Any] | None:
    """Runs the training job of a hand-off and watches it to its end.

    Args:
        handoff: Folder of the hand-off, as this host sees it.
        command: What to run, one argument a line. Empty: the command in the hand-off's manifest.
    """
    return in_one_line(run_training, handoff, command)


def run_training(handoff: str, command: tuple[str, ...]) -> State[Any]:
    """The manifest says which trainer and how, and names the folder in which the job reads and writes."""
    folder = Path(handoff).expanduser().absolute()
    manifest = read_manifest(folder)
    if Path(manifest.folder).resolve() != folder.resolve():  # a link to it is as good
        raise InputError(
            f"hand-off {folder} was made as {manifest.folder}, where its job reads and writes: mount it at that path on this host "
            "too and name that one, or hand off again to where both hosts see it alike",
            reason="handoff-moved",
        )
    parameters = HandoffParameters.model_validate({"trainer": manifest.trainer, "options": manifest.options})
    checkpoint = trainer.train(manifest, parameters, command)
    return Completed(message=f"trained {trainer.told(checkpoint)}")
