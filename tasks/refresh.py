"""The nightly run: what has arrived, what a backlog of runs comes to, and the table of nights."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from prefect import task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled

from data_contracts.parameters import WatchParameters
from data_contracts.refresh import Night, RefreshMark
from drafter_data.dataset import Dataset
from drafter_data.errors import DrafterDataError
from drafter_data.refresh.delta import new_rows, write_delta
from drafter_data.refresh.finding import Arrivals, look_for_runs
from drafter_data.refresh.nights import Stored, append_night, counted, earlier_version, read_nights, stored_of
from drafter_data.units import gigabytes
from drafter_data.workspace import Workspace
from tasks.publishing import STAGE, publish_table, run_logger, say

SHOWN_NIGHTS = 60
LEAST_PROMPTS = 2
"""One to learn from and one to hold out."""


@task(name="find runs", **STAGE)
def find_arrived(workspace: Workspace, watch: WatchParameters, known: dict[str, str]) -> Arrivals:
    """Which generation runs are finished, new, or left for the next night."""
    places = watch.runs or (str(workspace.folder / "runs"),)
    if not watch.runs:
        (workspace.folder / "runs").mkdir(exist_ok=True)
    settled = None if watch.settled_minutes is None else 60 * watch.settled_minutes
    found = look_for_runs(places, known, marker=watch.marker, settled_seconds=settled)
    say(
        f"{len(found.finished)} finished runs, {len(found.new)} of them new or changed, {len(found.waiting)} unfinished"
        + (f" (left for the next time: {', '.join(found.waiting[:5])})" if found.waiting else "")
        + (f", {len(found.gone)} gone" if found.gone else "")
    )
    return found


def sources_of(workspace: Workspace, found: Arrivals, mark: RefreshMark, settings: dict[str, str]) -> list[str]:
    """What to merge: every finished run; and, where runs that were merged are gone, the version that still has their rows."""
    sources = [run.source for run in found.finished]
    earlier = earlier_version(workspace.folder, mark.dataset_id)
    if not found.gone:
        return sources
    if earlier is None:
        say(f"{len(found.gone)} runs are gone and so is the version that had their rows: they are no part of the new one")
        return sources
    if mark.settings != settings:
        say(f"{len(found.gone)} runs are gone, and their rows were made with {mark.settings}: they are no part of the new version")
        return sources
    return [*sources, str(earlier.folder)]


@task(name="delta", task_run_name="delta of {dataset.name:.12}", **STAGE)
def make_delta(workspace: Workspace, dataset: Path, handed_off: str) -> Path | None:
    """The rows that no earlier night handed off, as a dataset of its own; None where they are too few to train on."""
    opened = Dataset.open(dataset)
    new_r = new_rows(opened, earlier_version(workspace.folder, handed_off))
    if len(stored_of(opened, workspace.store, new_r).tokens) < LEAST_PROMPTS:
        return None
    delta = write_delta(opened, new_r, workspace.folder / "deltas")
    say(f"delta: {delta.record.rows:,} of {opened.record.rows:,} rows")
    return delta.folder


@dataclass
class NightLog:
    """What a night did, so far."""

    workspace: Workspace
    night: Night
    started: float = field(default_factory=time.monotonic)
    dataset: Dataset | None = None
    before: Stored | None = None

    def found(self, dataset: Dataset, earlier: Dataset | None) -> None:
        """Counts what is new in the version, and what of that the store has already."""
        new_r: NDArray[np.bool_] = new_rows(dataset, earlier)
        fresh = stored_of(dataset, self.workspace.store, new_r)
        self.dataset, self.before = dataset, stored_of(dataset, self.workspace.store)
        self.update(dataset_id=dataset.record.dataset_id, new_rows=int(new_r.sum()), reused=len(fresh.there))

    def update(self, **values: object) -> None:
        """Further facts."""
        self.night = self.night.model_copy(update=values)

    def close(self) -> None:
        """Counts, writes down, publishes."""
        if self.dataset is not None and self.before is not None:
            self.night = counted(self.night, self.dataset, self.workspace.store, self.before)
        self.update(seconds=time.monotonic() - self.started)
        append_night(self.workspace.folder, self.night)
        nights = read_nights(self.workspace.folder)[-SHOWN_NIGHTS:]
        publish_table("nights", f"The last {len(nights)} nights, the latest first", [night_row(one) for one in reversed(nights)])


@contextmanager
def logged_night(workspace: Workspace) -> Generator[NightLog]:
    """A line in the record of nights, however the night ends."""
    log = NightLog(workspace, Night(started_at=time.time(), run=flow_run.name or ""))
    try:
        yield log
    except BaseException as error:
        reason = error.reason if isinstance(error, DrafterDataError) else type(error).__name__
        log.update(outcome="failed", note=f"{reason}: {error}".splitlines()[0][:300])
        _write_down(log)
        raise
    _write_down(log)


def _write_down(log: NightLog) -> None:
    try:
        log.close()
    except Exception as error:  # noqa: BLE001 - the night has ended as it has, whether its line arrives or not
        run_logger().warning("the record of this night is not complete: %s", error)


def night_row(night: Night) -> dict[str, object]:
    """One night in the table."""
    return {
        "night": datetime.fromtimestamp(night.started_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "outcome": night.outcome,
        "new rows": night.new_rows,
        "reused": night.reused,
        "extracted": night.extracted,
        "failed": night.failed,
        "tokens": night.tokens,
        "size": gigabytes(night.bytes),
        "hours": round(night.seconds / 3600, 3),
        "dataset": night.dataset_id[:12],
        "note": night.note,
    }


def cancel_backlog() -> int:
    """Takes back scheduled runs of this deployment that were due before now and have not begun: this one does their work."""
    if deployment.id is None:
        return 0
    overdue = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[UUID(deployment.id)]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
        expected_start_time=FlowRunFilterExpectedStartTime(before_=cast("Any", datetime.now(UTC))),
    )
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=overdue, limit=200)
        runs = [run for run in found if run.auto_scheduled and not run.run_count]
        for run in runs:
            client.set_flow_run_state(run.id, Cancelled(message=f"was overdue: {flow_run.name} does its work"))
    if runs:
        say(f"{len(runs)} overdue runs taken back: this one does their work")
    return len(runs)
