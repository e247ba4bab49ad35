"""`make demo-train`: goes on from a finished demo hand-off to an EAGLE-3 drafter that speculators trains on the CPU.

Usage: python -m drafter_data.trainers.demo_train HANDOFF OUT TRAINER_PYTHON
"""

from __future__ import annotations

import sys
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
    "epochs": "12",
    "checkpoint_freq": "12",
    "save_best": "false",
    "lr": "3e-3",
    "mask_token_id": "0",
    "total_seq_len": "2048",
    "hidden_states_dtype": "float32",
}
"""Enough for the demo's small model: a few minutes on two cores."""


def train_both(demo: Path, out: Path, python: Path, console: Console) -> Table:
    """Trains ridge and speculators on the demo's rows and returns the table of what they reached. Raises DrafterDataError."""
    made = read_manifest(demo)
    table = Table("trainer", "loss, first steps", "loss, last steps", "held-out top-1 agreement", "checkpoint")
    for name, options in (("ridge", {}), ("speculators", {**SPECULATORS_OPTIONS, "python": str(python)})):
        manifest = _hand_off(name, made, out / name, options)
        points: list[TrainingPoint] = []
        console.print(f"{name}: {manifest.train_samples} samples to train on, {manifest.validation_samples} held out")
        checkpoint = _run(name, manifest, options, points)
        losses = [point.loss for point in points]
        few = max(1, min(10, len(losses) // 4))
        first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
        agreement = checkpoint.metrics.get("held_out_agreement")
        told = "not its best epoch" if agreement is None else f"{agreement:.1%}"
        table.add_row(name, f"{first:.4g}", f"{last:.4g}", told, checkpoint.folder)
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
        console.print(train_both(demo, out, python, console))
    except DrafterDataError as error:
        Console(stderr=True).print(f"{error.reason}: {error}", markup=False)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
