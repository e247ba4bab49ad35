"""What the extraction wrote down beside the states: why samples failed, and what was extracted a second time and compared."""

from __future__ import annotations

from data_contracts.extraction import SampleFailure
from data_contracts.plan import Plan
from data_contracts.validation import RecheckStatistics
from drafter_data.extraction.chunk import read_failures
from drafter_data.extraction.rechecks import read_rechecks
from drafter_data.store.store import Store


def failures_of(store: Store, plan: Plan) -> dict[str, SampleFailure]:
    """By state key, why a sample of the plan did not make it."""
    records = (read_failures(store.root, plan.dataset_id, chunk.key) for chunk in plan.chunks)
    return {failure.state_key: failure for record in records if record is not None for failure in record.failures}


def recheck_statistics(store: Store, plan: Plan) -> RecheckStatistics:
    """All comparisons of the plan's chunks."""
    of_chunk = [read_rechecks(store.root, plan.dataset_id, chunk.key) for chunk in plan.chunks]
    compared = [one for rechecks in of_chunk for one in rechecks]
    return RecheckStatistics(
        compared=len(compared),
        earlier=sum(one.earlier for one in compared),
        largest=max((one.distance for one in compared if one.distance <= one.tolerance), default=0.0),
        tolerance=max((one.tolerance for one in compared), default=0.0),
        chunks=len(plan.chunks),
        chunks_without=sum(all(one.earlier for one in rechecks) for rechecks in of_chunk),
        differing=tuple(one for one in compared if one.distance > one.tolerance),
    )
