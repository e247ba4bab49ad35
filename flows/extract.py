"""The main job: generation runs in, a drafter's training set out, and the training job started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from data_contracts.parameters import (
    EngineParameters,
    ExtractionParameters,
    HandoffParameters,
    InputParameters,
    StorageParameters,
)
from drafter_data.engines.starting import model_of, running_engine, state_bytes_per_token
from drafter_data.extraction.campaign import CHUNKS_AT_ONCE
from drafter_data.workspace import Workspace
from flows.outcome import in_one_line
from tasks import extract as chunks
from tasks import handoff as trainer
from tasks import lengths, merge, plan, preflight, validate
from tasks.publishing import publish_report

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
    runs = list(source.runs) or merge.make_sample_runs(workspace, source.sample_count, source.seed)
    record = merge.merge_runs(workspace, runs, source)
    dataset = workspace.dataset_folder(record.dataset_id)
    lengths.profile(dataset, state_bytes_per_token(engine, model_of(engine, workspace)))

    with running_engine(engine, workspace) as running:
        checked = preflight.check(workspace, dataset, running, extraction, handoff.trainer)
        pending = plan.make_plan(workspace, dataset, extraction, checked)
        plan.forecast(workspace, record.dataset_id, checked)
        session = chunks.session_of(workspace, dataset, running, extraction, checked, source.seed)
        ended = chunks.extract_chunks(session, pending, extraction)

    validate.pass_gate(workspace, record.dataset_id, extraction.max_error_rate, "extraction", ended)
    validate.validate(workspace, dataset)
    gate = validate.pass_gate(workspace, record.dataset_id, extraction.max_error_rate, "validation", ended)
    manifest = trainer.give_to_trainer(workspace, dataset, Path(checked.provenance.model), gate, handoff)
    if not handoff.launch:
        return Completed(message=f"{manifest.samples:,} samples handed off to {manifest.trainer}; its job is yours to start")
    checkpoint = trainer.train(manifest, handoff)
    return Completed(message=f"{manifest.samples:,} samples handed off; trained {trainer.told(checkpoint)}")
