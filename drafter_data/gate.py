"""The gate before the hand-off: excluded samples never count, failed ones do, and both are listed."""

from __future__ import annotations

import numpy as np

from data_contracts.extraction import ChunkFailures, GateReport, SampleFailure
from data_contracts.plan import Exclusion, Plan
from drafter_data.dataset import Dataset
from drafter_data.errors import GateClosed
from drafter_data.extraction.chunk import read_failures
from drafter_data.planning import PlannedSample, chunk_rows, missing_samples
from drafter_data.store.store import Store


def judge(plan: Plan, store: Store, *, max_error_rate: float) -> GateReport:
    """Counts what the store lacks of the plan, each with the reason that its chunk wrote down, or `not-attempted`."""
    store.refresh()
    failed_chunks = [_failed_of(plan, store, int(index)) for index in np.unique(missing_samples(store, plan).chunk_n)]
    failed = sum(len(chunk.failures) for chunk in failed_chunks)
    planned = sum(chunk.samples for chunk in plan.chunks)
    rate = failed / planned if planned else 0.0
    return GateReport(
        dataset_id=plan.dataset_id,
        planned=planned,
        stored=planned - failed,
        excluded=len(plan.excluded),
        failed=failed,
        error_rate=rate,
        max_error_rate=max_error_rate,
        open=rate <= max_error_rate,
        failed_chunks=tuple(failed_chunks),
    )


def require_open(report: GateReport) -> None:
    """Raises GateClosed with the chunks to retry when too many samples failed."""
    if not report.open:
        chunks = ", ".join(str(chunk.chunk_index) for chunk in report.failed_chunks[:20])
        raise GateClosed(
            f"{report.failed} of {report.planned} samples failed ({report.error_rate:.2%}, limit {report.max_error_rate:.2%}) in "
            f"{len(report.failed_chunks)} chunks ({chunks}): retry the run, which extracts those alone; no hand-off until then"
        )


def exclusions(plan: Plan, report: GateReport, dataset: Dataset) -> tuple[Exclusion, ...]:
    """Every dataset row that the hand-off leaves out: the plan's exclusions and the failed samples, all rows of each state."""
    failures = {failure.state_key: failure for chunk in report.failed_chunks for failure in chunk.failures}
    if not failures:
        return plan.excluded
    columns = dataset.columns("sample_key", "state_key")
    rows = zip(columns.column("sample_key").to_pylist(), columns.column("state_key").to_pylist(), strict=True)
    failed = tuple(
        Exclusion(sample_key=sample, state_key=state, kind="failed", reason=failures[state].reason, detail=failures[state].detail)
        for sample, state in rows
        if state in failures
    )
    return plan.excluded + failed


def _failed_of(plan: Plan, store: Store, chunk_index: int) -> ChunkFailures:
    chunk = plan.chunks[chunk_index]
    missing = [one for one in chunk_rows(store.root, plan.dataset_id, chunk_index) if one.state_key not in store]
    written = read_failures(store.root, plan.dataset_id, chunk.key)
    known = {failure.state_key: failure for failure in written.failures} if written else {}
    why = written.stopped_by if written and written.stopped_by else "not-attempted"
    failures = tuple(known.get(one.state_key) or _not_reached(one, why) for one in missing)
    return ChunkFailures(
        chunk_index=chunk.index, chunk_key=chunk.key, stopped_by=written.stopped_by if written else "", failures=failures
    )


def _not_reached(planned: PlannedSample, why: str) -> SampleFailure:
    return SampleFailure(
        state_key=planned.state_key, tokens=planned.num_tokens, reason=why, detail="the chunk did not get to it", attempts=0
    )
