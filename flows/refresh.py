"""New generation runs: extract what the store lacks, or say that there is nothing new."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from data_contracts.parameters import (
    EngineParameters,
    ExtractionParameters,
    HandoffParameters,
    InputParameters,
    StorageParameters,
)
from drafter_data.runs.sources import find_runs
from drafter_data.runs.watching import read_mark, runs_mark, write_mark
from drafter_data.workspace import Workspace
from flows.extract import extract
from flows.outcome import in_one_line


@flow(name="refresh", persist_result=False)
def refresh(
    input: InputParameters = InputParameters(),  # noqa: A002, B008 - the form's section; the model is frozen
    engine: EngineParameters = EngineParameters(),  # noqa: B008
    extraction: ExtractionParameters = ExtractionParameters(),  # noqa: B008
    handoff: HandoffParameters = HandoffParameters(),  # noqa: B008
    storage: StorageParameters = StorageParameters(),  # noqa: B008
) -> State[Any] | None:
    """What is new in the generation runs goes through the whole of `extract`; with nothing new the run completes and says so.

    Args:
        input: Generation runs; with none named, whatever lies in `runs/` of the work folder.
        engine: The inference server and where it dumps.
        extraction: How chunks are cut, sent, retried and judged.
        handoff: The trainer and its job.
        storage: Where results live.
    """
    return in_one_line(run_if_new, input, engine, extraction, handoff, storage)


def run_if_new(
    source: InputParameters,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    handoff: HandoffParameters,
    storage: StorageParameters,
) -> State[Any]:
    """Compares the runs' files with those of the last complete run, which is written down only after it completed."""
    workspace = Workspace.of(storage)
    workspace.prepare()
    if source.runs:
        find_runs(source.runs)  # a run that is named and not there is a mistake, not "nothing new"
    runs = source.runs or (str(workspace.folder / "runs"),)
    mark = runs_mark(runs)
    if not mark.files:
        return Completed(message=f"nothing new: no generation runs in {', '.join(runs)}")
    if mark == read_mark(workspace.folder):
        return Completed(message=f"nothing new in {', '.join(runs)}: the same {len(mark.files)} files as last time")
    named = source.model_copy(update={"runs": tuple(runs)})
    state = extract(named, engine, extraction, handoff, storage, return_state=True)
    if state.is_completed():
        write_mark(workspace.folder, mark)
    return state
