"""Stage 6: chunks through the engine into the store, as mapped tasks that share one window of requests in flight."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Cancelled
from prefect.utilities.annotations import unmapped

from data_contracts.extraction import ChunkResult
from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.plan import Chunk
from data_contracts.preflight import PreflightReport
from drafter_data.errors import ChunkIncomplete, DrafterDataError, EngineLost, StoreFull, TooManyFailures
from drafter_data.extraction.chunk import extract_chunk as extract_chunk_samples
from drafter_data.extraction.progress import Reporter, Snapshot
from drafter_data.extraction.session import ExtractionSession, SessionSettings, shared_session
from drafter_data.workspace import Workspace
from tasks.publishing import STAGE, run_logger, say

REPORT_SECONDS = 5.0
RETRY_SECONDS = 5.0
STOPS_THE_RUN = (EngineLost, StoreFull, TooManyFailures)
"""What stops one chunk would stop the next as well."""

ChunkOutcome = ChunkResult | State[Any]


def may_succeed_later(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's signature
    """A chunk is tried again when the engine was away or samples failed, never when the engine refused them (4xx)."""
    error: object = state.data
    return isinstance(error, (ChunkIncomplete, EngineLost)) and error.reason != "request-refused"


@task(
    name="extract chunk",
    task_run_name="chunk {chunk.index}: {chunk.samples} samples, {chunk.tokens} tokens",
    retry_delay_seconds=RETRY_SECONDS,
    retry_condition_fn=may_succeed_later,
    **STAGE,
)
def extract_chunk(settings: SessionSettings, chunk: Chunk) -> ChunkOutcome:
    """Brings what the store lacks of a chunk. Raises ChunkIncomplete when samples failed: what was stored stays stored."""
    with shared_session(settings) as session:
        if session.extractor.stop.is_set():
            return Cancelled(message="not started: an earlier chunk stopped the run")
        result = extract_chunk_samples(session, chunk.index)
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
    """Runs all chunk tasks and shows progress; returns how each chunk that failed ended. The ledger decides, not the tasks."""
    if not chunks:
        return {}
    with shared_session(settings) as session, shown_progress(session):
        one_chunk = extract_chunk.with_options(retries=parameters.chunk_retries)
        futures = one_chunk.map(chunk=chunks, settings=unmapped(settings))
        chunk_of = {future.task_run_id: chunk.index for future, chunk in zip(futures, chunks, strict=True)}
        try:
            return dict(_failures(session, list(futures), chunk_of))
        except BaseException:  # cancelled: the chunks end within their requests
            session.interrupt()
            raise


def _failures(
    session: ExtractionSession, futures: list[PrefectFuture[ChunkOutcome]], chunk_of: dict[Any, int]
) -> Generator[tuple[int, str]]:
    for future in as_completed(futures):
        future.wait()
        state = future.state
        if state.is_completed():
            continue
        if isinstance(state.data, STOPS_THE_RUN):
            session.interrupt()
        yield chunk_of[future.task_run_id], str(state.data) if isinstance(state.data, DrafterDataError) else state.message or ""


@contextmanager
def shown_progress(session: ExtractionSession) -> Generator[None]:
    """A progress bar in the UI and a line in the log every few seconds."""
    logger = run_logger()
    artifact = cast(UUID, create_progress_artifact(progress=0.0, key="extraction", description="waiting for the first sample"))

    def show(now: Snapshot) -> None:
        logger.info(now.line())
        update_progress_artifact(artifact, progress=round(100 * now.share, 2), description=now.line())

    reporter = Reporter(session.snapshot, show, REPORT_SECONDS)
    try:
        yield
    finally:
        reporter.close()


def _incomplete(result: ChunkResult) -> ChunkIncomplete:
    first = result.failures[0]
    refused = all(failure.reason == "request-refused" for failure in result.failures)
    return ChunkIncomplete(
        f"chunk {result.chunk_index}: {len(result.failures)} of {result.samples} samples failed, the first: {first.detail}",
        reason="request-refused" if refused else None,
    )
