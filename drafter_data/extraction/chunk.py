"""One chunk: all its missing samples through the engine, each committed or with a reason; some extracted again and compared."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_contracts.extraction import FAILURES_FOLDER, ChunkFailures, ChunkResult, Recheck, SampleFailure
from data_contracts.plan import Chunk
from data_contracts.receipt import Receipt
from drafter_data.errors import (
    DrafterDataError,
    EngineChanged,
    Interrupted,
    LeaseHeld,
    SampleError,
    StoreError,
    StoreFull,
    TooManyFailures,
)
from drafter_data.extraction.rechecks import check_unchanged, record_rechecks
from drafter_data.extraction.sample import SampleWork
from drafter_data.extraction.session import ExtractionSession
from drafter_data.files import write_atomic
from drafter_data.planning import PlannedSample, chunk_rows, plan_folder
from drafter_data.store.activity import host_label
from drafter_data.verification import states_distance

LEASE_POLL_SECONDS = 1.0
Outcome = Future[Receipt] | SampleFailure
"""Of a sample: its receipt, which comes once the state is on disk, or why there is none."""


def extract_chunk(session: ExtractionSession, chunk_index: int, *, wait: bool = True) -> ChunkResult:
    """Extracts what the store lacks of a chunk and writes down what failed.

    While another run holds the chunk it is waited for; with `wait` off LeaseHeld is raised at once. Raises EngineLost, StoreFull,
    StoreError, TooManyFailures or Interrupted when the chunk cannot go on; what was committed stays and a next run goes on from
    there. Failed samples alone raise nothing: they are in the result and in the failures file.
    """
    chunk = session.plan.chunks[chunk_index]
    try:
        with _held(session, chunk.key, wait=wait):
            session.store.refresh()
            run = _ChunkRun(session, chunk)
            try:
                return run.extract()
            except OSError as error:
                told = _store_error(session.store.root, error)
                run.write_down(told.reason)
                raise told from error
            except DrafterDataError as error:
                run.take_back()
                run.write_down(error.reason)
                raise
    except OSError as error:
        raise _store_error(session.store.root, error) from error


@contextmanager
def _held(session: ExtractionSession, chunk_key: str, *, wait: bool) -> Generator[None]:
    """Holds the chunk's lease. The lease of a holder that is gone ends by itself (store/leases.py)."""
    holder = host_label()
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(session.store.lease(chunk_key, holder))
                break
            except LeaseHeld:
                if not wait:
                    raise
            if session.extractor.stop.wait(LEASE_POLL_SECONDS):
                raise Interrupted("the run was stopped while it waited for a chunk that another run holds")
        yield


class _ChunkRun:
    """State of one run of a chunk."""

    def __init__(self, session: ExtractionSession, chunk: Chunk) -> None:
        self._session = session
        self._chunk = chunk
        self._failures: list[SampleFailure] = []
        self._retried = 0
        self._works: dict[str, SampleWork] = {}
        self._rechecks: dict[str, Future[float]] = {}
        self._compared: list[Recheck] = []
        record = read_failures(session.store.root, session.plan.dataset_id, chunk.key)
        self._before = {failure.state_key: failure for failure in record.failures} if record else {}

    def extract(self) -> ChunkResult:
        session, chunk, start = self._session, self._chunk, time.monotonic()
        planned = chunk_rows(session.store.root, session.plan.dataset_id, chunk.index)
        lacking = [one for one in planned if one.state_key not in session.store]
        missing = self._without_quarantined(lacking)
        session.check_space(sum(one.num_tokens for one in missing) * session.bytes_per_token)
        size = self._extract_missing(missing)
        rechecked = self._recheck()
        self._check_engine()
        self.write_down("")
        return ChunkResult(
            chunk_index=chunk.index,
            chunk_key=chunk.key,
            samples=len(planned),
            reused=len(planned) - len(lacking),
            extracted=len(lacking) - len(self._failures),
            tokens=sum(one.num_tokens for one in missing),
            bytes=size,
            seconds=time.monotonic() - start,
            retried=self._retried,
            rechecked=rechecked,
            failures=tuple(self._failures),
        )

    def _without_quarantined(self, lacking: list[PlannedSample]) -> list[PlannedSample]:
        """Leaves out what failed so often, in earlier runs of the chunk too, that it is not tried again; it stays a failure."""
        most = self._session.settings.extraction.quarantine_attempts
        quarantined = {key for key, failure in self._before.items() if most and failure.attempts >= most}
        self._failures += [self._before[one.state_key] for one in lacking if one.state_key in quarantined]
        return [one for one in lacking if one.state_key not in quarantined]

    def write_down(self, stopped_by: str) -> None:
        """Keeps what failed so far, for the gate; a disk that takes nothing any more must not hide why."""
        record = ChunkFailures(
            chunk_index=self._chunk.index, chunk_key=self._chunk.key, stopped_by=stopped_by, failures=tuple(self._failures)
        )
        with suppress(OSError) if stopped_by else nullcontext():
            write_failures(self._session.store.root, self._session.plan.dataset_id, record)

    def _extract_missing(self, missing: list[PlannedSample]) -> int:
        """Sends all missing samples; returns the bytes committed."""
        session, size = self._session, 0
        self._works = self._read_works(missing)
        chosen = self._choose(list(self._works), session.settings.extraction.recheck_samples)
        waiting = _Waiting(list(self._works.values()), session)
        futures = [session.submit(self._extract_next, waiting, chosen) for _ in missing]
        try:
            for future in as_completed(futures):
                size += self._settle(future.result())
        except BaseException:
            waiting.given_up.set()
            raise
        finally:
            # Nothing of this chunk may still write once its lease is given back.
            _end(futures)
        return size

    def _extract_next(self, waiting: _Waiting, chosen: set[str]) -> Outcome:
        """A sample; a chosen one is extracted again by the same worker: behind the next chunk's samples in the queue it would hold
        this chunk until they are through, and both would end at once, with nothing in flight.
        """
        work, outcome = waiting.extract_next(self._chunk.key)
        if not isinstance(outcome, SampleFailure) and work.state_key in chosen:
            outcome.result()
            again = self._rechecks[work.state_key] = Future[float]()
            try:
                again.set_result(self._distance(work))
            except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                again.set_exception(error)
        return outcome

    def _settle(self, outcome: Outcome) -> int:
        session = self._session
        if isinstance(outcome, SampleFailure):
            before = self._before.get(outcome.state_key)
            self._failures.append(outcome.model_copy(update={"attempts": outcome.attempts + (before.attempts if before else 0)}))
            if session.failed():
                raise TooManyFailures(
                    f"{session.settings.extraction.stop_after_failures} samples failed in a row, the last with {outcome.reason}: "
                    f"{outcome.detail}"
                )
            return 0
        receipt = outcome.result()
        session.check_space(0)
        self._retried += receipt.attempts > 1
        session.anchors.add(receipt.state_key)
        session.succeeded(receipt)
        return receipt.bytes

    def _read_works(self, planned: Iterable[PlannedSample]) -> dict[str, SampleWork]:
        """The planned samples with their token ids, by state key, in the plan's order."""
        order = {one.row: place for place, one in enumerate(planned)}
        samples = sorted(self._session.dataset.take(list(order)), key=lambda sample: order[sample.row])
        return {sample.state_key: SampleWork(sample.state_key, sample.input_ids_s.astype(np.int64)) for sample in samples}

    def _choose(self, state_keys: list[str], count: int) -> set[str]:
        """Some of the samples, the same ones each time."""
        draw = random.Random(f"{self._session.settings.seed}{self._chunk.key}")  # noqa: S311 - a seeded choice
        return set(draw.sample(state_keys, min(count, len(state_keys))))

    def _recheck(self) -> int:
        """Compares the samples that were extracted again; a difference above the canary's tolerance is a failure."""
        session = self._session
        failed = {failure.state_key for failure in self._failures}
        fresh = [key for key in self._works if key not in failed and key not in self._rechecks]
        for key in self._choose(fresh, session.settings.extraction.recheck_samples - len(self._rechecks)):
            self._rechecks[key] = session.submit(self._distance, self._works[key])  # in place of a chosen one that failed
        try:
            for key, future in self._rechecks.items():
                try:
                    distance = future.result()
                except SampleError as error:  # what cannot be compared is not proven: it is extracted again
                    session.store.discard({key: error.reason})
                    self._fail(self._works[key], error)
                    continue
                self._compared.append(Recheck(state_key=key, distance=distance, tolerance=session.settings.tolerance))
                if not distance <= session.settings.tolerance:
                    self._extract_anew(self._works[key], distance)
        finally:
            _end(self._rechecks.values())
        return len(self._rechecks)

    def _check_engine(self) -> None:
        """Compares a state of the run's beginning, and keeps what was compared. Raises EngineChanged."""
        session, tolerance = self._session, self._session.settings.tolerance
        if self._works and session.settings.extraction.recheck_samples:
            try:
                earlier = check_unchanged(session.store, session.anchors, self._distance, tolerance)
            except EngineChanged:
                session.engine_changed.set()
                raise
            self._compared += [earlier] if earlier is not None else []
        record_rechecks(session.store.root, session.plan.dataset_id, self._chunk.key, self._compared)

    def take_back(self) -> None:
        """Where the engine has changed, what a chunk stored that did not come to its end may be of either kind."""
        if self._session.engine_changed.is_set():
            store = self._session.store
            store.discard({key: EngineChanged.reason for key in self._works if key in store})

    def _extract_anew(self, work: SampleWork, distance: float) -> None:
        """One of two extractions is wrong and none can say which: the state leaves the store and must come twice alike."""
        session = self._session
        session.store.discard({work.state_key: "recheck-differs"})
        outcome = session.extractor.extract(work, self._chunk.key)
        if isinstance(outcome, SampleFailure):
            self._failures.append(outcome)
            return
        outcome.result()
        self._retried += 1
        try:
            again = self._distance(work)
            if again <= session.settings.tolerance:
                return
        except SampleError as error:
            session.store.discard({work.state_key: error.reason})
            self._fail(work, error)
            return
        session.store.discard({work.state_key: "recheck-differs"})
        self._fail(
            work,
            SampleError(
                f"sample {work.state_key[:12]}: extracted again it differs by {again:.2e} (relative, worst layer), before by "
                f"{distance:.2e}, tolerance {session.settings.tolerance:.2e}: the engine's dumps are not its own; see its flags",
                reason="recheck-differs",
            ),
        )

    def _fail(self, work: SampleWork, error: SampleError) -> None:
        self._failures.append(
            SampleFailure(state_key=work.state_key, tokens=work.tokens, reason=error.reason, detail=str(error), attempts=1)
        )
        self._session.failed()

    def _distance(self, work: SampleWork) -> float:
        session = self._session
        with session.window.space(work.tokens * session.bytes_per_token):
            again = session.extractor.fetch(work, urgent=True).dump
            try:
                with closing(session.store.read(work.state_key)) as stored:
                    return states_distance(again, stored)
            finally:
                session.extractor.give_back(again)


class _Waiting:
    """The samples of a chunk that no worker has taken yet."""

    def __init__(self, works: list[SampleWork], session: ExtractionSession) -> None:
        self._works = works
        self._session = session
        self._lock = threading.Lock()
        self.given_up = threading.Event()

    def extract_next(self, chunk_key: str) -> tuple[SampleWork, Outcome]:
        """Extracts the next sample that may go at once, or else the next one."""
        window = self._session.window
        with self._lock:
            work = self._works.pop(window.pick(work.tokens for work in self._works))
        try:
            return work, self._session.extractor.extract(work, chunk_key, self.given_up)
        finally:
            window.forget(work.tokens)


def failures_path(store_root: Path, dataset_id: str, chunk_key: str) -> Path:
    """Where the failed samples of a chunk are written down."""
    return plan_folder(store_root, dataset_id) / FAILURES_FOLDER / f"{chunk_key}.json"


def write_failures(store_root: Path, dataset_id: str, record: ChunkFailures) -> None:
    """Writes down what failed in a chunk, or removes the file when nothing did."""
    path = failures_path(store_root, dataset_id, record.chunk_key)
    if record.failures or record.stopped_by:
        write_atomic(path, record.model_dump_json(indent=2))
    else:
        path.unlink(missing_ok=True)


def read_failures(store_root: Path, dataset_id: str, chunk_key: str) -> ChunkFailures | None:
    """What an earlier run of the chunk wrote down."""
    try:
        return ChunkFailures.model_validate_json(failures_path(store_root, dataset_id, chunk_key).read_bytes())
    except FileNotFoundError:
        return None


def _store_error(root: Path, error: OSError) -> StoreError:
    kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
    return kind(
        f"store {root} or the dump folder cannot be used{f' ({error.filename})' if error.filename else ''}: {error.strerror}; free "
        "space or mend the disk and retry the run, which goes on where it stopped",
        reason="store-read-only" if error.errno == errno.EROFS else None,
    )


def _end(futures: Iterable[Future[Any]]) -> None:
    """Takes back what has not begun, and waits for the rest: for samples until they are on disk, too."""
    begun = [future for future in futures if not future.cancel()]
    for future in begun:
        if future.exception() is None and isinstance(outcome := future.result(), Future):
            outcome.exception()
