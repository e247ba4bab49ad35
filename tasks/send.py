"""Stage 6 on other hosts: chunks as runs of the deployment `extract-chunk`, in one shared queue; each host has its own engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from data_contracts.parameters import ChunkParameters
from data_contracts.plan import Chunk
from drafter_data.extraction.session import SessionSettings
from tasks.publishing import say

DEPLOYMENT = "extract-chunk/extract-chunk"
POLL_SECONDS = 2.0
PAGE = 200


def send_chunks(settings: SessionSettings, chunks: list[Chunk]) -> dict[int, str]:
    """Sends a run for each chunk, waits for all, and returns how those that failed ended.

    Whoever calls this has read the ledger: a retry sends what is missing and nothing else. When the caller is cancelled, so are
    the runs that it sent.
    """
    sent: dict[UUID, int] = {}
    artifact = cast(UUID, create_progress_artifact(progress=0.0, key="extraction", description="sending the chunks"))
    with get_client(sync_client=True) as client:
        try:
            for chunk in chunks:
                sent[_send(settings, chunk)] = chunk.index
            return _wait(client, sent, artifact)
        except BaseException:
            for run_id in sent:
                client.set_flow_run_state(run_id, Cancelling(message="the run that sent this chunk has ended"))
            raise


def _send(settings: SessionSettings, chunk: Chunk) -> UUID:
    which = ChunkParameters(
        dataset=str(settings.dataset),
        store=str(settings.store),
        index=chunk.index,
        keep_free_gb=settings.keep_free_bytes / 1e9,
    )
    parameters: dict[str, Any] = {
        "chunk": which.model_dump(mode="json"),
        "engine": settings.engine.model_dump(mode="json"),
        "extraction": settings.extraction.model_dump(mode="json"),
    }
    name = f"chunk-{chunk.index}-of-{settings.dataset.name[:12]}"
    return cast(FlowRun, run_deployment(DEPLOYMENT, parameters=parameters, flow_run_name=name, timeout=0)).id


def _wait(client: SyncPrefectClient, sent: Mapping[UUID, int], artifact: UUID) -> dict[int, str]:
    open_runs, ended = set(sent), dict[int, str]()
    while open_runs:
        for run in _read(client, sorted(open_runs)):
            if run.state is None or not run.state.is_final():
                continue
            open_runs.discard(run.id)
            if not run.state.is_completed():
                ended[sent[run.id]] = f"run {run.name} ended {run.state.name}: {run.state.message or ''}"
            done = len(sent) - len(open_runs)
            line = f"{done} of {len(sent)} chunks ended, {len(ended)} of them failed"
            say(line)
            update_progress_artifact(artifact, progress=round(100 * done / len(sent), 2), description=line)
        if open_runs:
            time.sleep(POLL_SECONDS)
    return ended


def _read(client: SyncPrefectClient, run_ids: list[UUID]) -> list[FlowRun]:
    pages = [run_ids[start : start + PAGE] for start in range(0, len(run_ids), PAGE)]
    return [
        run
        for page in pages
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=page)), limit=PAGE)
    ]
