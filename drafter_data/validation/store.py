"""Validating a whole store: every sample, or a reason.

With a dataset, its rows are checked first (keys, masks), then each of their states, and rows without a state are named; rows that
the plan excluded before sending are not errors. Without one, every state that has a receipt is checked. State files without a
receipt (a commit that was killed before its receipt) are counted as orphans: nobody uses them, and `fsck --repair` sweeps them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from data_contracts.extraction import SampleFailure
from data_contracts.plan import PLAN_FILE, Plan
from data_contracts.validation import Finding, ValidationReport
from drafter_data.dataset import Dataset, Sample
from drafter_data.files import TEMPORARY_PREFIX
from drafter_data.planning import load_plan, plan_folder
from drafter_data.remedies import remedy
from drafter_data.store.store import Store, is_state_name
from drafter_data.validation.history import failures_of, recheck_statistics
from drafter_data.validation.layer_sizes import layer_statistics
from drafter_data.validation.rows import check_row
from drafter_data.validation.state_file import CheckedState, check_size
from drafter_data.validation.states import check_states


@dataclass
class _Tally:
    """What has been found so far. `rows_of` counts dataset rows a state (without a dataset: none)."""

    rows_of: Counter[str]
    findings: list[Finding] = field(default_factory=list[Finding])
    missing: int = 0
    errors: int = 0
    states: int = 0
    bytes: int = 0
    rms: list[tuple[float, NDArray[np.float64]]] = field(default_factory=list[tuple[float, NDArray[np.float64]]])

    def take(self, checked: CheckedState) -> None:
        self.states += 1
        self.bytes += checked.receipt.bytes
        if checked.finding is not None:
            self.findings.append(checked.finding)
            self.errors += self.rows_of[checked.receipt.state_key] or 1
        if checked.rms_l is not None:
            self.rms.append((checked.receipt.committed_at, checked.rms_l))


def validate_store(store: Store, dataset: Dataset | None, *, workers: int = 2) -> ValidationReport:
    """Checks every sample of `dataset`, or every state: small ones in turn, those of 8 MB and more in `workers` threads.

    What good content looks like is learnt from the states that are checked first (states.py). Memory: one state key a dataset row
    and one number a layer and state; a small state file and a block of `workers` large ones at a time.
    """
    started = time.monotonic()
    store.refresh()
    tally = _Tally(Counter())
    plan = _plan_of(store, dataset) if dataset is not None else None
    samples = _check_rows(store, dataset, plan, tally) if dataset is not None else len(store)
    for checked in check_states(store, workers, lambda key: dataset is None or tally.rows_of[key] > 0):
        tally.take(checked)
    return ValidationReport(
        store=str(store.root),
        dataset_id=dataset.record.dataset_id if dataset is not None else None,
        samples=samples,
        states=tally.states,
        errors=tally.errors,
        missing=tally.missing,
        orphans=_count_orphans(store),
        bytes=tally.bytes,
        seconds=time.monotonic() - started,
        findings=tuple(tally.findings),
        layers=layer_statistics(store.identity.layers, tally.rms),
        rechecks=recheck_statistics(store, plan) if plan is not None else None,
    )


def check_receipts(store: Store, *, deep: bool, workers: int = 2) -> Iterator[Finding]:
    """Receipts whose file is missing or of another size; with `deep`, whose content is not what it should be (fsck)."""
    if deep:
        yield from (checked.finding for checked in check_states(store, workers) if checked.finding is not None)
        return
    for receipt in store.receipts():
        finding = check_size(store.path_of(receipt.state_key), receipt)
        if finding is not None:
            yield finding


def _plan_of(store: Store, dataset: Dataset) -> Plan | None:
    """The kept plan of a dataset over the store, if there is one."""
    planned = (plan_folder(store.root, dataset.record.dataset_id) / PLAN_FILE).is_file()
    return load_plan(store.root, dataset.record.dataset_id) if planned else None


def _check_rows(store: Store, dataset: Dataset, plan: Plan | None, tally: _Tally) -> int:
    """Checks the dataset's rows and names those without a state, and why; returns how many rows there are."""
    excluded = {exclusion.sample_key for exclusion in plan.excluded} if plan is not None else set[str]()
    failures = failures_of(store, plan) if plan is not None else {}
    rows = 0
    for sample in dataset.samples():
        rows += 1
        finding = check_row(sample, str(dataset.rows_path))
        if finding is not None:
            tally.findings.append(finding)
            tally.errors += 1
        elif sample.state_key in store:
            tally.rows_of[sample.state_key] += 1
        elif sample.sample_key not in excluded:
            tally.missing += 1
            tally.errors += 1
            tally.findings.append(_missing(sample, f"{dataset.rows_path} row {sample.row}", failures.get(sample.state_key)))
    return rows


def _missing(sample: Sample, where: str, failure: SampleFailure | None) -> Finding:
    why = "no receipt" if failure is None else f"no receipt; {failure.reason} after {failure.attempts} attempts: {failure.detail}"
    return Finding(
        reason="state-missing",
        state_key=sample.state_key,
        file=where,
        expected="a committed state",
        found=why,
        remedy="run the extraction again: it brings what is missing" if failure is None else remedy(failure.reason),
    )


def _count_orphans(store: Store) -> int:
    """State files under a final name that no receipt names."""
    files = (path for path in store.root.glob("states/*/*") if not path.name.startswith(TEMPORARY_PREFIX))
    return sum(1 for path in files if not is_state_name(path.name) or path.stem not in store)
