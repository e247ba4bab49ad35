"""`make demo-train`: goes on from a finished demo hand-off to an EAGLE-3 drafter that speculators trains on the CPU.

Usage: python -m drafter_data.trainers.demo_train HANDOFF OUT TRAINER_PYTHON
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_contracts.handoff import Checkpoint, HandoffManifest, TrainingPoint
from drafter_data.cli.output import width_of
from drafter_data.dataset import Dataset
from drafter_data.errors import DrafterDataError
from drafter_data.store.store import Store
from drafter_data.trainers.folder import read_manifest
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.job import run_job
from drafter_data.trainers.registry import trainer_named

SPECULATORS_OPTIONS = {
    "device": "cpu",
    "epochs": "2",
    "checkpoint_freq": "2",
    "save_best": "false",
    "lr": "5e-3",
    "mask_token_id": "0",
    "total_seq_len": "2048",
    "hidden_states_dtype": "float32",
}
"""Enough for the demo's small model: a few minutes on two cores."""


@dataclass(frozen=True)
class Outcome:
    """What a trainer reached: mean losses of its first and last steps, held-out top-1 agreement where it measured that."""

    trainer: str
    first_loss: float
    last_loss: float
    agreement: float | None
    checkpoint: Checkpoint


def train_both(demo: Path, out: Path, python: Path, say: Callable[[str], None], **changes: str) -> list[Outcome]:
    """Trains ridge and speculators on the demo's rows; `changes` to SPECULATORS_OPTIONS. Raises DrafterDataError."""
    made = read_manifest(demo)
    outcomes: list[Outcome] = []
    for name, options in (("ridge", {}), ("speculators", {**SPECULATORS_OPTIONS, "python": str(python), **changes})):
        manifest = _hand_off(name, made, out / name, options)
        say(f"{name}: {manifest.train_samples} samples to train on, {manifest.validation_samples} held out")
        points: list[TrainingPoint] = []
        checkpoint = _run(name, manifest, options, points)
        losses = [point.loss for point in points]
        few = max(1, min(10, len(losses) // 4))
        agreement = checkpoint.metrics.get("held_out_agreement")
        outcomes.append(Outcome(name, sum(losses[:few]) / few, sum(losses[-few:]) / few, agreement, checkpoint))
    return outcomes


def table_of_outcomes(outcomes: list[Outcome]) -> Table:
    """The report. The losses are of different kinds: each is to be compared with its own start, the agreements with each other."""
    table = Table("trainer", "loss, first steps", "loss, last steps", "held-out top-1 agreement", "checkpoint")
    for one in outcomes:
        agreement = "not its best epoch" if one.agreement is None else f"{one.agreement:.1%}"
        table.add_row(one.trainer, f"{one.first_loss:.4g}", f"{one.last_loss:.4g}", agreement, one.checkpoint.folder)
    return table


def _hand_off(name: str, made: HandoffManifest, out: Path, options: dict[str, str]) -> HandoffManifest:
    store = Store.open(Path(made.store))
    try:
        return hand_off(
            trainer_named(name),
            Dataset.open(Path(made.dataset)),
            store,
            out,
            model=Path(made.model),
            exclusions=made.exclusions,
            options=options,
        )
    finally:
        store.close()


def _run(name: str, manifest: HandoffManifest, options: dict[str, str], points: list[TrainingPoint]) -> Checkpoint:
    def on_line(_: str) -> None:
        """The log keeps the lines."""

    log = Path(manifest.folder) / "job.log"
    return run_job(trainer_named(name), manifest, options, on_line=on_line, on_point=points.append, log=log)


def main() -> int:
    """Prints the table; one clear line and the error's exit code when a job fails."""
    demo, out, python = (Path(argument) for argument in sys.argv[1:4])
    console = Console(width=width_of(sys.stdout), markup=False)
    try:
        console.print(table_of_outcomes(train_both(demo, out, python, console.print)))
    except DrafterDataError as error:
        Console(stderr=True).print(f"{error.reason}: {error}", markup=False)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
