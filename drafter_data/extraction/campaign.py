"""A whole extraction without Prefect: preflight, plan, chunks one after another, gate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from data_contracts.extraction import ChunkResult, GateReport
from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.plan import Plan
from data_contracts.preflight import PreflightReport
from drafter_data.costs import CostModel, costs_path
from drafter_data.dataset import Dataset
from drafter_data.engines.connect import connect
from drafter_data.errors import LeaseHeld
from drafter_data.extraction.chunk import extract_chunk
from drafter_data.extraction.progress import Reporter, Snapshot
from drafter_data.extraction.session import ExtractionSession, SessionSettings, shared_session
from drafter_data.gate import judge
from drafter_data.planning import make_plan, missing_samples
from drafter_data.preflight import run_preflight
from drafter_data.store.activity import working
from drafter_data.store.store import Store

REPORT_SECONDS = 5.0
CHUNKS_AT_ONCE = 2
"""The next chunk's first requests fill the window while the last ones of a chunk are still out."""


def run_campaign(
    dataset_folder: Path,
    store_root: Path,
    engine: EngineParameters,
    extraction: ExtractionParameters,
    *,
    keep_free_bytes: int = 0,
    report: Callable[[Snapshot], None] | None = None,
) -> GateReport:
    """Extracts what the store lacks of a dataset; returns the gate's report (which may be closed)."""
    dataset = Dataset.open(dataset_folder)
    found = check_engine(dataset, store_root, engine, extraction, keep_free_bytes=keep_free_bytes)
    plan = plan_over(dataset, store_root, extraction, found)
    settings = SessionSettings(
        dataset=dataset_folder,
        store=store_root,
        engine=engine,
        extraction=extraction,
        in_flight=found.in_flight,
        tolerance=found.canary.tolerance,
        keep_free_bytes=keep_free_bytes,
    )
    with working(store_root, "drafter-data extract"), shared_session(settings) as session:
        reporter = Reporter(session.snapshot, report, REPORT_SECONDS) if report else None
        try:
            extract_all(session, pending_chunks(plan, session.store))
        finally:
            if reporter:
                reporter.close()
        return judge(plan, session.store, max_error_rate=extraction.max_error_rate)


def check_engine(
    dataset: Dataset, store_root: Path, engine: EngineParameters, extraction: ExtractionParameters, *, keep_free_bytes: int
) -> PreflightReport:
    """Connects, runs the preflight, disconnects."""
    connected = connect(engine, request_timeout_seconds=extraction.request_timeout_seconds)
    try:
        return run_preflight(connected, dataset, store_root, extraction, keep_free_bytes=keep_free_bytes)
    finally:
        connected.close()


def plan_over(dataset: Dataset, store_root: Path, extraction: ExtractionParameters, found: PreflightReport) -> Plan:
    """The kept plan, or a new one from the cost history of this engine."""
    store = Store.open(store_root, found.identity)
    try:
        costs = CostModel.load(costs_path(store_root, found.fingerprint))
        return make_plan(dataset, store, costs, chunk_samples=extraction.chunk_samples, max_prompt_tokens=found.max_prompt_tokens)
    finally:
        store.close()


def pending_chunks(plan: Plan, store: Store) -> list[int]:
    """Indices of the chunks of which the store lacks a state."""
    store.refresh()
    return [int(index) for index in np.unique(missing_samples(store, plan).chunk_n)]


def extract_all(session: ExtractionSession, chunks: list[int]) -> None:
    """Runs the chunks, two at a time; those that another run holds come last, and are waited for. Raises what stopped one."""
    with ThreadPoolExecutor(CHUNKS_AT_ONCE, thread_name_prefix="chunk") as pool:
        try:
            futures = {pool.submit(extract_chunk, session, index, wait=False): index for index in chunks}
            held = [futures[future] for future in as_completed(futures) if _is_held(future)]
            for future in as_completed([pool.submit(extract_chunk, session, index) for index in held]):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            session.interrupt()
            raise


def _is_held(future: Future[ChunkResult]) -> bool:
    try:
        future.result()
    except LeaseHeld:
        return True
    return False
