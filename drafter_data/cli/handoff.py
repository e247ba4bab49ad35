"""`drafter-data handoff`: the trainer's view of a dataset and a store, and its job."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from data_contracts.handoff import Checkpoint, HandoffManifest, TrainingPoint
from data_contracts.plan import PLAN_FILE, Exclusion
from data_contracts.validation import Finding
from drafter_data.cli.output import SHOWN_FINDINGS, console, findings_table, print_lines, print_table
from drafter_data.dataset import Dataset
from drafter_data.errors import UsageError
from drafter_data.planning import load_plan, plan_folder
from drafter_data.store.store import Store
from drafter_data.trainers.base import Trainer
from drafter_data.trainers.folder import check_folder
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.job import JOB_LOG, job_command, run_job
from drafter_data.trainers.options import parse_options
from drafter_data.trainers.registry import trainer_named


def handoff(
    dataset: Path | None = None,
    store: Path | None = None,
    *,
    trainer: str = "ridge",
    model: Path | None = None,
    out: Path | None = None,
    option: Annotated[tuple[str, ...], Parameter(name="--option", negative="")] = (),
    launch: bool = False,
    print_command: Annotated[bool, Parameter(name="--print", negative="")] = False,
    check: Path | None = None,
    json: bool = False,
) -> int:
    """Write a trainer's view of a dataset and a store, and start its job or print the command. What can be linked is not copied.

    Example: `drafter-data handoff .demo/dataset .demo/store --trainer ridge --out handoff --launch`

    Exit code 1 when the job failed or a check found something.

    Parameters
    ----------
    dataset
        Folder of the dataset.
    store
        Folder of the store.
    trainer
        ridge, speculators or specforge.
    model
        Checkpoint folder of the verifier that the states were extracted with. Default: the one that the store recorded.
    out
        Folder to make. One that holds this very hand-off is left as it is.
    option
        `--option NAME=VALUE`, as often as needed: `draft_vocab_size=32000`, `nproc=8`, `validation_share=0.05`,
        `submit="sbatch --wait --wrap"`; what the hand-off does not know becomes a flag of the trainer.
    launch
        Start the training job and watch it to its end.
    print_command
        Print the training command and nothing else.
    check
        Compare a finished hand-off folder with its manifest, every byte, and do nothing else.
    json
        Print the result as JSON.
    """
    if check is not None:
        return _check(check, json)
    if dataset is None or store is None or out is None:
        raise UsageError("expected DATASET STORE --out DIR, or --check DIR; see --help")
    chosen, options = trainer_named(trainer), parse_options(option)
    opened = Store.open(store)
    try:
        rows = Dataset.open(dataset)
        manifest = hand_off(
            chosen,
            rows,
            opened,
            out,
            model=model or _recorded_model(opened),
            exclusions=_known_exclusions(opened, rows),
            options=options,
        )
    finally:
        opened.close()
    if print_command:
        sys.stdout.write(shlex.join(job_command(chosen, manifest, options)) + "\n")
        return 0
    if not json:
        _print_manifest(manifest)
    checkpoint = _launch(chosen, manifest, options, quiet=json) if launch else None
    if json:
        record = manifest.model_dump(mode="json") | {"checkpoint": checkpoint.model_dump(mode="json") if checkpoint else None}
        sys.stdout.write(json_module.dumps(record, indent=2) + "\n")
    return 0


def _known_exclusions(store: Store, dataset: Dataset) -> tuple[Exclusion, ...]:
    """Rows that the plan left out before sending, where there is a plan."""
    dataset_id = dataset.record.dataset_id
    return load_plan(store.root, dataset_id).excluded if (plan_folder(store.root, dataset_id) / PLAN_FILE).is_file() else ()


def _recorded_model(store: Store) -> Path:
    provenances = store.provenances()
    if not provenances:
        raise UsageError(f"store {store.root} has recorded no model: name the verifier's checkpoint folder with --model")
    return Path(provenances[-1].model)


def _launch(trainer: Trainer, manifest: HandoffManifest, options: dict[str, str], *, quiet: bool) -> Checkpoint:
    def on_line(line: str) -> None:
        if not quiet:
            print_lines(line)

    def on_point(_: TrainingPoint) -> None:
        """Lines are shown as they are; the curve is the flow's business."""

    log = Path(manifest.folder) / JOB_LOG
    checkpoint = run_job(trainer, manifest, options, on_line=on_line, on_point=on_point, log=log)
    if not quiet:
        metrics = " ".join(f"{name}={value:.4g}" for name, value in checkpoint.metrics.items())
        print_lines(f"trained: {checkpoint.weights_file} ({checkpoint.bytes:,} bytes, xxh3 {checkpoint.digest[:12]}) {metrics}")
    return checkpoint


def _check(folder: Path, json: bool) -> int:
    findings = check_folder(folder)
    if json:
        sys.stdout.write(json_module.dumps({"findings": [finding.model_dump() for finding in findings]}, indent=2) + "\n")
    else:
        _print_findings(folder, findings)
    return 1 if findings else 0


def _print_findings(folder: Path, findings: list[Finding]) -> None:
    if findings:
        console().print(findings_table(tuple(findings), f"{folder}: {len(findings)} findings"))
    else:
        print_lines(f"{folder}: every file is what the manifest says")


def _print_manifest(manifest: HandoffManifest) -> None:
    print_lines(
        f"{manifest.folder}: {manifest.samples:,} samples for {manifest.trainer} ({manifest.train_samples:,} to train on, "
        f"{manifest.validation_samples:,} held out), {manifest.tokens:,} tokens, {manifest.bytes / 1e9:.2f} GB of states, "
        f"{len(manifest.exclusions):,} rows excluded"
    )
    if manifest.exclusions:
        rows = [(one.sample_key[:12], one.kind, one.reason, one.detail) for one in manifest.exclusions[:SHOWN_FINDINGS]]
        print_table("Excluded (manifest.json lists all)", ("sample", "kind", "reason", "detail"), rows)
    print_lines("command: " + shlex.join(manifest.command))
