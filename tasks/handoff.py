"""Stage 9: the trainer's view of dataset and store, and its job."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from prefect import task

from data_contracts.extraction import GateReport
from data_contracts.handoff import MANIFEST_FILE, Checkpoint, HandoffManifest, TrainingPoint
from data_contracts.parameters import HandoffParameters
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.files import replace_link
from drafter_data.gate import exclusions
from drafter_data.planning import load_plan
from drafter_data.report.training import read_curve
from drafter_data.stage_costs import observe_stage
from drafter_data.store.store import Store
from drafter_data.trainers.base import Trainer
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.job import JOB_LOG, job_command, run_job
from drafter_data.trainers.limited_lines import LimitedLines
from drafter_data.trainers.registry import trainer_named
from drafter_data.units import gigabytes
from drafter_data.workspace import Workspace
from tasks.pages import TrainingPage
from tasks.publishing import STAGE, publish_facts, run_logger, say
from tasks.training_run import check_deployment, train_by_deployment

POINT_SECONDS = 2.0


@task(name="hand-off", task_run_name="hand-off of {dataset.name:.12} to {parameters.trainer}", **STAGE)
def give_to_trainer(
    workspace: Workspace,
    dataset: Path,
    model: Path,
    gate: GateReport,
    parameters: HandoffParameters,
) -> HandoffManifest:
    """Writes the trainer's view into a folder of its own and points `handoff` at it. The gate's dataset is this one or holds it."""
    opened, store = Dataset.open(dataset), Store.open(workspace.store)
    options = {"max_error_rate": str(gate.max_error_rate), **options_of(parameters)}
    started = time.monotonic()
    try:
        left_out = exclusions(load_plan(store.root, gate.dataset_id), gate, opened)
        base = workspace.handoff_folder(parameters.trainer, opened.record.dataset_id, left_out, options)
        out, manifest = in_a_free_folder(
            base,
            lambda folder: hand_off(
                trainer_named(parameters.trainer),
                opened,
                store,
                folder,
                model=model,
                exclusions=left_out,
                options=options,
                keep_free_bytes=workspace.keep_free_bytes,
            ),
        )
        observe_stage(store.root, "hand-off", manifest.bytes, time.monotonic() - started)
    finally:
        store.close()
    replace_link(workspace.handoff_link, out)
    publish_facts("hand-off", f"{manifest.samples:,} samples for {manifest.trainer}", handoff_facts(manifest, None, options))
    say(f"hand-off: {manifest.samples:,} samples for {manifest.trainer} at {manifest.folder}")
    return manifest


def check_training(parameters: HandoffParameters) -> None:
    """Refuses at the start of a run what its last stage would refuse. Raises UsageError."""
    trainer_named(parameters.trainer)
    if parameters.launch and parameters.deployment:
        check_deployment(parameters.deployment)


def in_a_free_folder(base: Path, make: Callable[[Path], HandoffManifest]) -> tuple[Path, HandoffManifest]:
    """Makes the hand-off in `base`, or beside it under the next number where `base` holds an older one of other states."""
    for number in count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            return folder, make(folder)
        except InputError as error:
            if error.reason != "handoff-folder" or not (folder / MANIFEST_FILE).is_file():
                raise
    raise AssertionError("unreachable")


@task(name="train", task_run_name="train {manifest.trainer} on {manifest.samples:,} samples, {manifest.tokens:,} tokens", **STAGE)
def train(manifest: HandoffManifest, parameters: HandoffParameters, command: Sequence[str] = ()) -> Checkpoint:
    """Trains on this host, or by the deployment that the parameters name, to the job's end. Publishes its curve and its result."""
    trainer, options = trainer_named(parameters.trainer), options_of(parameters)
    argv = list(command) or job_command(trainer, manifest, options)
    page = TrainingPage(handoff_facts(manifest, None, options))
    if parameters.deployment:
        checkpoint = train_elsewhere(trainer, manifest, parameters, argv, page)
    else:
        checkpoint = train_here(trainer, manifest, options, argv, page)
    facts = handoff_facts(manifest, checkpoint, options)
    publish_facts("hand-off", f"{manifest.samples:,} samples, trained", facts)
    page.close(f"{manifest.trainer}: trained on {manifest.samples:,} samples{metrics_of(checkpoint)}", facts)
    say(f"trained: {told(checkpoint)}")
    return checkpoint


def train_here(
    trainer: Trainer, manifest: HandoffManifest, options: dict[str, str], argv: Sequence[str], page: TrainingPage
) -> Checkpoint:
    """Starts the job in a process group of its own and watches it; its lines go into the log, its points onto the page."""
    logger, shown = run_logger(), [0.0]
    lines = LimitedLines(logger.info)

    def on_line(line: str) -> None:
        if trainer.progress(line) is None:
            lines.take(line)

    def on_point(point: TrainingPoint) -> None:
        page.take(point)
        if time.monotonic() - shown[0] >= POINT_SECONDS:
            shown[0] = time.monotonic()
            accuracy = "" if point.accuracy is None else f", accuracy {point.accuracy:.3f}"
            logger.info("step %d: loss %.4g%s", point.step, point.loss, accuracy)

    log = Path(manifest.folder) / JOB_LOG
    try:
        return run_job(trainer, manifest, options, on_line=on_line, on_point=on_point, log=log, command=argv)
    finally:
        lines.end()


def train_elsewhere(
    trainer: Trainer, manifest: HandoffManifest, parameters: HandoffParameters, argv: Sequence[str], page: TrainingPage
) -> Checkpoint:
    """Sends the job to another deployment and, when its run completed, looks at the checkpoint itself.

    The curve is read from the hand-off's job.log, where the deployment's flow writes one (ours, `train`, does).
    """
    log = Path(manifest.folder) / JOB_LOG
    sent_at = train_by_deployment(parameters.deployment, manifest, argv)
    checkpoint = trainer.finished(manifest, sent_at)
    curve = read_curve(manifest) if log.is_file() and log.stat().st_mtime >= sent_at else []
    for point in curve:
        page.take(point)
    return checkpoint.model_copy(update={"curve": tuple(curve)})


def told(checkpoint: Checkpoint) -> str:
    """A checkpoint in one line: path, digest, metrics."""
    return f"{checkpoint.weights_file} (xxh3-128 {checkpoint.digest}{metrics_of(checkpoint)})"


def metrics_of(checkpoint: Checkpoint) -> str:
    """`, name value` for each metric."""
    return "".join(f", {name} {value:.4g}" for name, value in checkpoint.metrics.items())


def options_of(parameters: HandoffParameters) -> dict[str, str]:
    """All options for the trainer; one named in `options` wins."""
    return {"validation_share": str(parameters.validation_share), **parameters.options}


def handoff_facts(manifest: HandoffManifest, checkpoint: Checkpoint | None, options: dict[str, str]) -> dict[str, object]:
    """What was handed off, and what came of it."""
    facts: dict[str, object] = {
        "dataset": manifest.dataset,
        "store": manifest.store,
        "hand-off": manifest.folder,
        "samples": f"{manifest.samples:,} ({manifest.train_samples:,} to train on, {manifest.validation_samples:,} held out)",
        "rows left out": len(manifest.exclusions),
        "tokens": f"{manifest.tokens:,}, {manifest.supervised_tokens:,} supervised",
        "states": gigabytes(manifest.bytes),
        "command": shlex.join(job_command(trainer_named(manifest.trainer), manifest, options)),
    }
    if checkpoint is None:
        return facts
    metrics = {f"trained: {name}": f"{value:.4g}" for name, value in checkpoint.metrics.items()}
    return facts | {"drafter": checkpoint.weights_file, "drafter's xxh3-128": checkpoint.digest} | metrics
