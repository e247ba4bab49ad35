"""One chunk as a deployment of its own, for hosts that share the store's file system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from data_contracts.parameters import ChunkEngineParameters, ChunkParameters, ExtractionParameters
from data_contracts.plan import Chunk
from drafter_data.dataset import Dataset
from drafter_data.engines.starting import running_engine, wait_for_engine
from drafter_data.errors import ChunkIncomplete
from drafter_data.extraction.chunk import read_failures
from drafter_data.hosts import this_host
from drafter_data.planning import chunk_rows, load_plan
from drafter_data.store.activity import working
from drafter_data.store.store import Store
from drafter_data.workspace import Workspace
from flows.outcome import in_one_line
from tasks import extract as chunks
from tasks import preflight

ENGINE_WAIT_SECONDS = 300.0


@flow(name="extract-chunk", persist_result=False)
def extract_chunk(
    chunk: ChunkParameters,
    engine: ChunkEngineParameters = ChunkEngineParameters(),  # noqa: B008 - the model is frozen
    extraction: ExtractionParameters = ExtractionParameters(),  # noqa: B008
) -> State[Any] | None:
    """One chunk of a kept plan. Engine URL and dump folder are those of the host that runs it (drafter_data/hosts.py).

    Args:
        chunk: Which chunk of which kept plan.
        engine: What is the same on all hosts.
        extraction: How samples are sent, tried again and judged.
    """
    return in_one_line(run_chunk, chunk, engine, extraction)


def run_chunk(which: ChunkParameters, engine: ChunkEngineParameters, extraction: ExtractionParameters) -> State[Any]:
    """The store first; then engine, preflight of this host, chunk."""
    dataset, store = Path(which.dataset).expanduser().absolute(), Path(which.store).expanduser().absolute()
    workspace = Workspace(store.parent, store, int(which.keep_free_gb * 1e9))
    dataset_id = Dataset.open(dataset).record.dataset_id
    chunk_rows(store, dataset_id, which.index)  # refuses an index that the plan has not
    chunk = load_plan(store, dataset_id).chunks[which.index]
    if is_complete(store, dataset_id, chunk):
        return Completed(message=f"chunk {chunk.index}: all {chunk.samples:,} samples were in the store already")
    host = this_host()
    # The run that sent this one asks for the lease of this key: a host that has died is known by it.
    with working(store, f"chunk {chunk.index} of {dataset_id[:12]}", key=flow_run.id or None):
        settings = host.engine(engine)
        wait_for_engine(settings, ENGINE_WAIT_SECONDS)
        with running_engine(settings, workspace) as running:
            checked = preflight.check(workspace, dataset, running, extraction, None)
            session = chunks.session_of(workspace, dataset, running, extraction, checked)
            ended = chunks.extract_chunks(session, [chunk], extraction)
    if ended:
        written = read_failures(store, dataset_id, chunk.key)
        raise ChunkIncomplete(ended[chunk.index], reason=(written.stopped_by if written else "") or None)
    return Completed(message=f"chunk {chunk.index}: all {chunk.samples:,} samples are in the store, by {host.host_name}")


def is_complete(store_root: Path, dataset_id: str, chunk: Chunk) -> bool:
    """Whether the store has all states of a chunk."""
    store = Store.open(store_root)
    try:
        return all(one.state_key in store for one in chunk_rows(store_root, dataset_id, chunk.index))
    finally:
        store.close()
