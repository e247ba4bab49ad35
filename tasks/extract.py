"""Stage 6: chunks through the engine into the store, as mapped tasks that share one window of requests in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import as_completed
from prefect.states import Cancelled
from prefect.utilities.annotations import unmapped

from data_contracts.extraction import ChunkResult
from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.plan import Chunk
from data_contracts.preflight import PreflightReport
from drafter_data.errors import ChunkIncomplete, DrafterDataError, EngineLost, LeaseHeld, StoreFull, TooManyFailures
from drafter_data.extraction.chunk import extract_chunk as extract_chunk_samples
from drafter_data.extraction.session import SessionSettings, shared_session
from drafter_data.workspace import Workspace
from tasks.pages import shown_progress
from tasks.publishing import STAGE, say

RETRY_SECONDS = 5.0
HELD = "Held"
STOPS_THE_RUN = (EngineLost, StoreFull, TooManyFailures)
"""What stops one chunk would stop the next as well."""

ChunkOutcome = ChunkResult | State[Any]


def may_succeed_later(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's signature
    """A chunk is tried again when samples failed, not when the engine refused them (4xx) or the whole run has to stop."""
    error: object = state.data
    return isinstance(error, ChunkIncomplete) and error.reason != "request-refused"


@task(
    name="extract chunk",
    task_run_name="chunk {chunk.index}: {chunk.samples:,} samples, {chunk.tokens:,} tokens of {settings.dataset.name:.12}",
    retry_delay_seconds=RETRY_SECONDS,
    retry_condition_fn=may_succeed_later,
    **STAGE,
)
def extract_chunk(settings: SessionSettings, chunk: Chunk, wait: bool) -> ChunkOutcome:
    """Brings what the store lacks of a chunk. Raises ChunkIncomplete when samples failed: what was stored stays stored.

    A chunk that another run holds ends as `Held`, unless it is to be waited for.
    """
    with shared_session(settings) as session:
        if session.extractor.stop.is_set():
            return Cancelled(message="not started: an earlier chunk stopped the run")
        try:
            result = extract_chunk_samples(session, chunk.index, wait=wait)
        except LeaseHeld as error:
            return Cancelled(name=HELD, message=f"{error}; asked again after the others")
        except STOPS_THE_RUN:
            session.interrupt()
            raise
    say(
        f"chunk {chunk.index}: {result.extracted} extracted, {result.reused} stored before, {result.rechecked} extracted again and "
        f"compared, {len(result.failures)} failed, {result.tokens / max(result.seconds, 1e-9):,.0f} tok/s"
    )
    if result.failures:
        raise _incomplete(result)
    return result


def session_of(
    workspace: Workspace,
    dataset: Path,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    checked: PreflightReport,
    seed: int = 0,
) -> SessionSettings:
    """What all chunk tasks of this process share: paths and parameters, no data."""
    return SessionSettings(
        dataset=dataset,
        store=workspace.store,
        engine=engine,
        extraction=extraction,
        in_flight=checked.in_flight,
        tolerance=checked.canary.tolerance,
        keep_free_bytes=workspace.keep_free_bytes,
        seed=seed,
    )


def extract_chunks(settings: SessionSettings, chunks: list[Chunk], parameters: ExtractionParameters) -> dict[int, str]:
    """Runs all chunks and shows progress; returns how each chunk that failed ended. The ledger decides, not the tasks."""
    if not chunks:
        return {}
    with shared_session(settings) as session, shown_progress(session):
        try:
            ended = _run_all(settings, chunks, parameters.chunk_retries, wait=False)
            held = [chunk for chunk in chunks if chunk.index in ended and ended[chunk.index].name == HELD]
            if held:
                ended |= _run_all(settings, held, parameters.chunk_retries, wait=True)
        except BaseException:  # cancelled: the chunks end within their requests
            session.interrupt()
            raise
    return {index: failure_message(state) for index, state in ended.items() if not state.is_completed()}


def _run_all(settings: SessionSettings, chunks: list[Chunk], retries: int, *, wait: bool) -> dict[int, State[Any]]:
    """One task a chunk; returns how each ended."""
    futures = extract_chunk.with_options(retries=retries).map(chunk=chunks, settings=unmapped(settings), wait=unmapped(wait))
    chunk_of = {future.task_run_id: chunk.index for future, chunk in zip(futures, chunks, strict=True)}
    ended: dict[int, State[Any]] = {}
    for future in as_completed(list(futures)):
        future.wait()
        ended[chunk_of[future.task_run_id]] = future.state
    return ended


def failure_message(state: State[Any]) -> str:
    """What ended a failed task: the failure's own words. Prefect keeps an exception inside a record of the result."""
    error = getattr(state.data, "result", state.data)
    return str(error) if isinstance(error, DrafterDataError) else state.message or ""


def _incomplete(result: ChunkResult) -> ChunkIncomplete:
    first = result.failures[0]
    refused = all(failure.reason == "request-refused" for failure in result.failures)
    return ChunkIncomplete(
        f"chunk {result.chunk_index}: {len(result.failures)} of {result.samples} samples failed, the first: {first.detail}",
        reason="request-refused" if refused else None,
    )
