"""New generation runs: extract what the store lacks and hand off, or say that there is nothing new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from data_contracts.parameters import (
    EngineParameters,
    ExtractionParameters,
    HandoffParameters,
    StorageParameters,
    WatchParameters,
)
from data_contracts.refresh import RefreshMark
from drafter_data.dataset import Dataset
from drafter_data.errors import LeaseHeld
from drafter_data.refresh.nights import earlier_version, read_mark, write_mark
from drafter_data.store.activity import Beside, working
from drafter_data.workspace import Workspace
from flows.extract import CHUNK_RUNNER, bring_states, trained
from flows.outcome import in_one_line
from tasks import handoff as trainer
from tasks import merge
from tasks.publishing import publish_report
from tasks.refresh import NightLog, cancel_backlog, find_arrived, logged_night, make_delta, sources_of

SKIPPED = "Skipped"


@flow(name="refresh", persist_result=False, task_runner=CHUNK_RUNNER)
def refresh(
    input: WatchParameters = WatchParameters(),  # noqa: A002, B008 - the form's section; the model is frozen
    engine: EngineParameters = EngineParameters(),  # noqa: B008
    extraction: ExtractionParameters = ExtractionParameters(),  # noqa: B008
    handoff: HandoffParameters = HandoffParameters(),  # noqa: B008
    storage: StorageParameters = StorageParameters(),  # noqa: B008
) -> State[Any] | None:
    """Finished generation runs that are new become a new dataset version; what the store lacks of it is extracted and handed off.

    With nothing new it completes in seconds and says so. While another run works on the store it does not start.

    Args:
        input: Where generation runs arrive, and when one counts as finished.
        engine: The inference server and where it dumps.
        extraction: How chunks are cut, sent, retried and judged.
        handoff: The trainer and its job.
        storage: Where results live.
    """
    return publish_report(in_one_line(run_night, input, engine, extraction, handoff, storage))


def run_night(
    watch: WatchParameters,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    handoff: HandoffParameters,
    storage: StorageParameters,
) -> State[Any]:
    """One night at a time, and none beside a run by hand."""
    workspace = Workspace.of(storage)
    workspace.prepare()
    trainer.check_training(handoff)
    cancel_backlog()
    try:
        with working(workspace.store, f"nightly run {flow_run.name}", beside=Beside.ALONE_AT_FIRST), logged_night(workspace) as log:
            return run_if_new(workspace, log, watch, engine, extraction, handoff)
    except LeaseHeld as error:
        if error.reason != "store-busy":
            raise
        return Completed(name=SKIPPED, message=f"not started, the next night takes what is new: {error}")


def run_if_new(
    workspace: Workspace,
    log: NightLog,
    watch: WatchParameters,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    handoff: HandoffParameters,
) -> State[Any]:
    """The table of contents. The mark, by which the next night knows what is new, is written last."""
    settings = {"tokenizer": watch.tokenizer, "max_tokens": str(watch.max_tokens), "merge": watch.merge.model_dump_json()}
    mark = read_mark(workspace.folder)
    earlier = earlier_version(workspace.folder, mark.dataset_id)
    found = find_arrived(workspace, watch, mark.runs)
    as_before = earlier is not None and mark.settings == settings
    if not found.finished or (as_before and not found.new):
        return nothing_new(log, f"{len(found.finished)} finished runs, all worked through; {len(found.waiting)} unfinished")

    sources = sources_of(workspace, found, mark, settings)
    record = merge.merge_runs(workspace, sources, watch.merging(tuple(sources)))
    dataset = workspace.dataset_folder(record.dataset_id)
    inherited = {gone: mark.runs[gone] for gone in found.gone if earlier is not None and str(earlier.folder) in sources}
    done = RefreshMark(
        runs={**inherited, **found.digests}, settings=settings, dataset_id=record.dataset_id, handed_off=mark.handed_off
    )
    if earlier is not None and record.dataset_id == earlier.record.dataset_id:
        write_mark(workspace.folder, done)
        return nothing_new(log, f"{len(found.new)} runs were new or changed, but every row of theirs was there before")

    log.found(Dataset.open(dataset), earlier)
    checked, gate = bring_states(workspace, dataset, engine, extraction, handoff.trainer, 0)
    given = make_delta(workspace, dataset, mark.handed_off) if watch.hand_off == "delta" else dataset
    if given is None:
        write_mark(workspace.folder, done)
        log.update(outcome="extracted", note="too few new prompts for a hand-off of their own: they are part of the next")
        return Completed(message=f"{log.night.new_rows} new rows: too few for a delta, they are handed off with the next night's")
    manifest = trainer.give_to_trainer(workspace, given, Path(checked.provenance.model), gate, handoff)
    state = trained(manifest, handoff)
    write_mark(workspace.folder, done.model_copy(update={"handed_off": record.dataset_id}))
    log.update(outcome="extracted")
    return state


def nothing_new(log: NightLog, why: str) -> State[Any]:
    """A night with nothing to do."""
    log.update(outcome="nothing new", note=why)
    return Completed(message=f"nothing new: {why}")
