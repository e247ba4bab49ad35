"""Pages with pictures that change while a stage runs: the extraction and the training. Drawing takes at most 1 % of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from data_contracts.handoff import TrainingPoint
from data_contracts.status import PlanStatus
from drafter_data.extraction.progress import Reporter, Snapshot
from drafter_data.extraction.session import ExtractionSession
from drafter_data.report.chunks import counted, states_of
from drafter_data.report.drawing import embedded
from drafter_data.report.history import NOTHING_YET, History, Track, history_of_receipts
from drafter_data.report.pictures import extraction_picture, training_picture
from drafter_data.report.seldom import Seldom
from drafter_data.report.text import markdown_table
from drafter_data.status import lease_statuses, plan_status
from drafter_data.store.store import Store
from drafter_data.trainers.curve import Curve
from tasks.publishing import publish_page, run_logger, update_page

REPORT_SECONDS = 5.0
SHOWN_CHUNKS = 100


class Page:
    """A page that is published at its first contents and changed by later ones. What goes wrong with it ends no stage."""

    def __init__(self, key: str) -> None:
        self._key, self._id = key, cast("UUID | None", None)
        self._seldom = Seldom()
        self._logger = run_logger()

    def show(self, contents: Callable[[], tuple[str, list[str]]], *, last: bool = False) -> None:
        """Asks for a description and the parts, when it is time for them, or for the last time."""
        if not last and not self._seldom.due():
            return
        with self._seldom.measured():
            try:
                told, parts = contents()
                if self._id is None:
                    self._id = publish_page(self._key, told, *parts)
                else:
                    update_page(self._id, told, *parts)
            except Exception as error:  # noqa: BLE001 - a server that restarts must not end the stage's report
                self._logger.warning("the page %s was not updated: %s", self._key, error)


@contextmanager
def shown_progress(session: ExtractionSession) -> Generator[None]:
    """A progress bar and a page in the UI, and a line in the log every few seconds."""
    logger, context = run_logger(), copy_context()
    artifact = cast(UUID, create_progress_artifact(progress=0.0, key="extraction", description="waiting for the first sample"))
    page, track = Page("extraction-report"), Track()

    def contents(now: Snapshot) -> tuple[str, list[str]]:
        return now.line(), extraction_parts(track.history(), _plan_of(session.store, dataset_id))

    def show(now: Snapshot) -> None:
        logger.info(now.line())
        track.take(now)
        try:
            update_progress_artifact(artifact, progress=round(100 * now.share, 2), description=now.line())
        except Exception as error:  # noqa: BLE001 - a server that restarts must not end the extraction's report
            logger.warning("the progress artifact was not updated: %s", error)
        page.show(lambda: contents(now))

    dataset_id = session.dataset.record.dataset_id
    track.take(session.snapshot())
    # Prefect's settings and run live in the context, which a thread does not inherit.
    reporter = Reporter(session.snapshot, lambda now: context.run(show, now), REPORT_SECONDS)
    try:
        yield
    finally:
        reporter.close()
        last = session.snapshot()
        track.take(last)
        page.show(lambda: contents(last), last=True)


@contextmanager
def shown_store(store_root: Path, dataset_id: str) -> Generator[None]:
    """The same page from the store's records alone, while other processes and hosts extract the chunks."""
    store, context, page, since = Store.open(store_root), copy_context(), Page("extraction-report"), time.time()

    def contents() -> tuple[str, list[str]]:
        store.refresh()
        plan = _plan_of(store, dataset_id)
        ours = {chunk.key for chunk in plan.chunks}
        receipts = [one for one in store.receipts() if one.chunk in ours]
        total = sum(one.tokens for one in receipts) + sum(chunk.missing_tokens for chunk in plan.chunks)
        history = history_of_receipts(receipts, total, since=since) or NOTHING_YET
        return f"{plan.done:,} of {plan.samples:,} samples stored", extraction_parts(history, plan)

    reporter = Reporter(lambda: None, lambda _: context.run(page.show, contents), REPORT_SECONDS)
    try:
        yield
    finally:
        reporter.close()
        page.show(contents, last=True)
        store.close()


def extraction_parts(history: History, plan: PlanStatus) -> list[str]:
    """The picture, and a table of the chunks that are not whole."""
    states = states_of(plan.chunks)
    rows = [
        {"chunk": one.index, "state": state, "stored": one.done, "missing": one.samples - one.done, "failed": one.failed,
         "missing tokens": one.missing_tokens, "held by": one.holder or "-"}
        for one, state in zip(plan.chunks, states, strict=True)
        if state not in ("stored", "waiting")
    ]  # fmt: skip
    picture = embedded(extraction_picture(history, states), f"Progress, throughput and chunks: {counted(states)}")
    return [picture, markdown_table(rows[:SHOWN_CHUNKS])]


class TrainingPage:
    """The page `training`: what was handed off, the curve so far, and at the end the result."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self._facts, self._curve, self._page = facts, Curve(), Page("training")

    def take(self, point: TrainingPoint) -> None:
        """Adds a point, and shows it when it is time."""
        self._curve.take(point)
        self._page.show(lambda: (f"step {point.step:,}: loss {point.loss:.4g}", self._parts(self._facts)))

    def close(self, told: str, facts: Mapping[str, object]) -> None:
        """Shows the end: `facts` with what came of it."""
        self._page.show(lambda: (told, self._parts(facts)), last=True)

    def _parts(self, facts: Mapping[str, object]) -> list[str]:
        points = self._curve.points()
        picture = embedded(training_picture(points), f"Loss over {points[-1].step} steps") if points else ""
        return [picture, markdown_table([{"what": name, "value": value} for name, value in facts.items()])]


def _plan_of(store: Store, dataset_id: str) -> PlanStatus:
    return plan_status(store, dataset_id, lease_statuses(store), None)
