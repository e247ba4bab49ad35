"""One chunk as a deployment of its own, for hosts that share the store's file system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from data_contracts.parameters import ChunkParameters, EngineParameters, ExtractionParameters
from drafter_data.dataset import Dataset
from drafter_data.engines.starting import engine_of_this_host, running_engine
from drafter_data.errors import ChunkIncomplete
from drafter_data.planning import chunk_rows, load_plan
from drafter_data.workspace import Workspace
from flows.outcome import in_one_line
from tasks import extract as chunks
from tasks import preflight


@flow(name="extract-chunk", persist_result=False)
def extract_chunk(
    chunk: ChunkParameters,
    engine: EngineParameters = EngineParameters(),  # noqa: B008 - the model is frozen
    extraction: ExtractionParameters = ExtractionParameters(),  # noqa: B008
) -> State[Any] | None:
    """One chunk of a kept plan. The host's DRAFTER_DATA_ENGINE_URL and DRAFTER_DATA_DUMP_FOLDER win over the parameters.

    Args:
        chunk: Which chunk of which kept plan.
        engine: The inference server and where it dumps.
        extraction: How samples are sent, tried again and judged.
    """
    return in_one_line(run_chunk, chunk, engine, extraction)


def run_chunk(which: ChunkParameters, engine: EngineParameters, extraction: ExtractionParameters) -> State[Any]:
    """Engine, preflight of this host, chunk."""
    dataset, store = Path(which.dataset).expanduser().absolute(), Path(which.store).expanduser().absolute()
    workspace = Workspace(store.parent, store, int(which.keep_free_gb * 1e9))
    dataset_id = Dataset.open(dataset).record.dataset_id
    chunk_rows(store, dataset_id, which.index)  # refuses an index that the plan has not
    chunk = load_plan(store, dataset_id).chunks[which.index]
    with running_engine(engine_of_this_host(engine), workspace) as running:
        checked = preflight.check(workspace, dataset, running, extraction, None)
        session = chunks.session_of(workspace, dataset, running, extraction, checked)
        ended = chunks.extract_chunks(session, [chunk], extraction.model_copy(update={"fan_out": "tasks"}))
    if ended:
        raise ChunkIncomplete(ended[chunk.index])
    return Completed(message=f"chunk {chunk.index}: all {chunk.samples:,} samples are in the store")
