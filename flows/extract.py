"""The main job: generation runs in, a drafter's training set out, and the training job started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from data_contracts.extraction import GateReport
from data_contracts.handoff import HandoffManifest
from data_contracts.parameters import (
    EngineParameters,
    ExtractionParameters,
    HandoffParameters,
    InputParameters,
    StorageParameters,
)
from data_contracts.preflight import PreflightReport
from drafter_data.engines.starting import model_of, running_engine, state_bytes_per_token
from drafter_data.extraction.campaign import CHUNKS_AT_ONCE
from drafter_data.hosts import this_host
from drafter_data.store.activity import working
from drafter_data.workspace import Workspace
from flows.outcome import in_one_line
from tasks import extract as chunks
from tasks import handoff as trainer
from tasks import lengths, merge, plan, preflight, validate
from tasks.pages import shown_store
from tasks.publishing import publish_report
from tasks.send import send_chunks

# The cast: Prefect's decorator names its runner's type invariantly.
CHUNK_RUNNER = cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner(max_workers=CHUNKS_AT_ONCE))


@flow(name="extract", persist_result=False, task_runner=CHUNK_RUNNER)
def extract(
    input: InputParameters = InputParameters(),  # noqa: A002, B008 - the form's section; the model is frozen
    engine: EngineParameters = EngineParameters(),  # noqa: B008
    extraction: ExtractionParameters = ExtractionParameters(),  # noqa: B008
    handoff: HandoffParameters = HandoffParameters(),  # noqa: B008
    storage: StorageParameters = StorageParameters(),  # noqa: B008
) -> State[Any] | None:
    """Generation runs in, a drafter's training set out: merge, lengths, preflight, plan, extract, validate, hand off, train.

    Every stage finds out from its own records what is done already, so a retry, or a new run, does only what is missing.

    Args:
        input: Generation runs and how they become rows.
        engine: The inference server and where it dumps.
        extraction: How chunks are cut, sent, retried and judged.
        handoff: The trainer and its job.
        storage: Where results live.
    """
    return publish_report(in_one_line(run_stages, input, engine, extraction, handoff, storage))


def run_stages(
    source: InputParameters,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    handoff: HandoffParameters,
    storage: StorageParameters,
) -> State[Any]:
    """The table of contents."""
    workspace = Workspace.of(storage)
    workspace.prepare()
    trainer.check_training(handoff)
    with working(workspace.store, f"extract run {flow_run.name}"):
        runs = list(source.runs) or merge.make_sample_runs(workspace, source.sample_count, source.seed)
        record = merge.merge_runs(workspace, runs, source)
        dataset = workspace.dataset_folder(record.dataset_id)
        checked, gate = bring_states(workspace, dataset, engine, extraction, handoff.trainer, source.seed)
        manifest = trainer.give_to_trainer(workspace, dataset, Path(checked.provenance.model), gate, handoff)
        return trained(manifest, handoff)


def bring_states(
    workspace: Workspace,
    dataset: Path,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    trainer_name: str,
    seed: int,
) -> tuple[PreflightReport, GateReport]:
    """Stages 2 to 8: every state of a dataset in the store, validated, or a reason for each that is not."""
    dataset_id = dataset.name
    on_hosts = extraction.fan_out == "deployment"
    asked, engine = engine, this_host().fill(engine) if on_hosts else engine
    lengths.profile(dataset, state_bytes_per_token(engine, model_of(engine, workspace)))

    with running_engine(engine, workspace) as running:
        checked = preflight.check(workspace, dataset, running, extraction, trainer_name)
        pending = plan.make_plan(workspace, dataset, extraction, checked)
        plan.forecast(workspace, dataset_id, checked)
        session = chunks.session_of(workspace, dataset, running, extraction, checked, seed)
        ended = {} if on_hosts else chunks.extract_chunks(session, pending, extraction)
    if on_hosts and pending:  # an engine that was started here is not kept from the chunks' own
        with shown_store(workspace.store, dataset_id):
            ended = send_chunks(replace(session, engine=asked), pending)  # the paths of this host are not those of the others

    validate.pass_gate(workspace, dataset_id, extraction.max_error_rate, "extraction", ended)
    validate.validate(workspace, dataset)
    return checked, validate.pass_gate(workspace, dataset_id, extraction.max_error_rate, "validation", ended)


def trained(manifest: HandoffManifest, handoff: HandoffParameters) -> State[Any]:
    """Starts the training job, where it is to be started, and watches it to its end."""
    if not handoff.launch:
        return Completed(message=f"{manifest.samples:,} samples handed off to {manifest.trainer}; its job is yours to start")
    checkpoint = trainer.train(manifest, handoff)
    return Completed(message=f"{manifest.samples:,} samples handed off; trained {trainer.told(checkpoint)}")
