"""A session: one engine, one store, one dataset, one plan, one in-flight window, shared by all chunks of the process."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from data_contracts.forecast import Forecast
from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.plan import Plan
from data_contracts.receipt import Receipt
from drafter_data.costs import CostModel, costs_path
from drafter_data.dataset import Dataset
from drafter_data.engines.base import Engine
from drafter_data.engines.connect import connect
from drafter_data.errors import Interrupted, StateCorrupt, StoreFull
from drafter_data.extraction.outliers import Outliers, signature_of
from drafter_data.extraction.progress import Progress, Snapshot
from drafter_data.extraction.rechecks import Anchors
from drafter_data.extraction.sample import SampleExtractor, SampleLimits
from drafter_data.extraction.tuning import CONTROL_FILE, InFlightTuner, first_in_flight
from drafter_data.extraction.window import Window
from drafter_data.planning import MissingSamples, load_plan, missing_samples
from drafter_data.store.store import Store

Given = ParamSpec("Given")
Found = TypeVar("Found")
DUMP_SHARE = 0.5
"""Share of the dump folder's free bytes that dumps in flight may take."""
SIGNATURES_READ = 64
COMMIT_THREADS = 32
"""Beside the requests: dumps that are read, checked and written meanwhile."""


@dataclass(frozen=True)
class SessionSettings:
    """Paths and parameters; two equal settings in one process share one session."""

    dataset: Path
    store: Path
    engine: EngineParameters
    extraction: ExtractionParameters
    in_flight: int
    tolerance: float
    keep_free_bytes: int = 0
    engine_wait_seconds: float = 300.0
    seed: int = 0


class ExtractionSession:
    """Open while chunks are extracted. Thread-safe."""

    def __init__(self, settings: SessionSettings, engine: Engine | None = None) -> None:
        self.settings = settings
        self.engine_changed = threading.Event()
        self.engine = engine or connect(settings.engine, request_timeout_seconds=settings.extraction.request_timeout_seconds)
        with ExitStack() as undo:
            undo.callback(self.engine.close)  # a dump folder that is still held would refuse the next try
            self._open(settings, undo)
            undo.pop_all()

    def _open(self, settings: SessionSettings, undo: ExitStack) -> None:
        info = self.engine.describe()
        self.dataset = Dataset.open(settings.dataset)
        self.store = Store.open(settings.store, info.identity)
        undo.callback(self.store.close)
        self.anchors = Anchors(self.store)
        self.store.sweep()
        self.plan: Plan = load_plan(settings.store, self.dataset.record.dataset_id)
        self.bytes_per_token = info.identity.bytes_per_token
        self.costs_path = costs_path(settings.store, info.fingerprint)
        self.costs = CostModel.load(self.costs_path)
        missing = missing_samples(self.store, self.plan)
        bound = min(settings.in_flight, info.in_flight_limit)
        known = self.costs.found_for(missing.tokens_n, bound)
        first = first_in_flight(missing.tokens_n, bound, known)
        self.window = Window(
            requests=first,
            lengths_must_differ=info.lengths_must_differ,
            most_bytes=max(int(self.engine.free_bytes() * DUMP_SHARE), 1),
        )
        self.executor = ThreadPoolExecutor(bound + COMMIT_THREADS, thread_name_prefix="extract")
        self.extractor = SampleExtractor(
            self.engine,
            self.store,
            self.window,
            SampleLimits(
                attempts=settings.extraction.attempts,
                dump_timeout_seconds=settings.extraction.dump_timeout_seconds,
                engine_wait_seconds=settings.engine_wait_seconds,
                state_bytes_per_token=self.bytes_per_token,
                tolerance=settings.tolerance,
            ),
            self.costs,
            known_signatures(self.store),
        )
        self._in_a_row = 0
        self._lock = threading.Lock()
        self._mean_tokens = float(missing.tokens_n.mean()) if len(missing.tokens_n) else 0.0
        self._missing_by_length = np.bincount(missing.tokens_n, minlength=1)
        self.progress = self._progress(missing)
        self._tuner = InFlightTuner(
            self.window,
            settings.store / CONTROL_FILE,
            first=first,
            no_better=known.no_better if known else (),
            bound=bound,
            engine_limit=min(info.in_flight_limit, bound + COMMIT_THREADS),
            expected_seconds=self.costs.expected_seconds,
        )
        self.costs.on_window = self._tuner.took

    def _progress(self, missing: MissingSamples) -> Progress:
        total, tokens = sum(chunk.samples for chunk in self.plan.chunks), sum(chunk.tokens for chunk in self.plan.chunks)
        return Progress(
            total=total,
            total_tokens=tokens,
            bytes_per_token=self.bytes_per_token,
            done=total - len(missing.tokens_n),
            done_tokens=tokens - int(missing.tokens_n.sum()),
        )

    def succeeded(self, receipt: Receipt) -> None:
        """Counts a committed sample."""
        with self._lock:
            self._in_a_row = 0
            self._missing_by_length[receipt.tokens] -= 1
        self.progress.sample_done(receipt.tokens, receipt.engine_seconds)

    def failed(self) -> bool:
        """Counts a failed sample; True when too many have failed in a row."""
        self.progress.sample_failed()
        with self._lock:
            self._in_a_row += 1
            return self._in_a_row >= self.settings.extraction.stop_after_failures

    def check_space(self, coming_bytes: int) -> None:
        """Raises StoreFull when storing `coming_bytes` would leave less than what is to be kept free."""
        free = shutil.disk_usage(self.store.root).free
        if free - coming_bytes < self.settings.keep_free_bytes:
            raise StoreFull(
                f"store {self.store.root}: {free / 1e9:.2f} GB free, {self.settings.keep_free_bytes / 1e9:.2f} GB to be "
                "kept: stopped "
                "before the disk is full; free space and retry the run, which goes on where it stopped"
            )

    def forecast(self) -> Forecast:
        """Time and bytes of what is left of the plan."""
        with self._lock:
            counts = np.maximum(self._missing_by_length, 0)  # another host may have brought some of ours
        remaining = np.repeat(np.arange(len(counts)), counts)
        now = time.monotonic() if self.window.in_flight else None
        return self.costs.forecast(remaining, in_flight=self._tuner.settled, bytes_per_token=self.bytes_per_token, now=now)

    def snapshot(self) -> Snapshot:
        """The run now."""
        return self.progress.snapshot(
            dump_bytes=self.window.bytes_in_flight, in_flight=self.window.in_flight, forecast=self.forecast()
        )

    def submit(self, work: Callable[Given, Found], *given: Given.args, **named: Given.kwargs) -> Future[Found]:
        """Has a worker do something. Raises Interrupted once the session is being closed."""
        try:
            return self.executor.submit(work, *given, **named)
        except RuntimeError as error:  # what an executor that is shut down says
            raise Interrupted("the run was stopped: start it again, it goes on where it stopped") from error

    def interrupt(self) -> None:
        """Stops what is under way: requests are broken off, their samples stay missing, chunks raise Interrupted."""
        self.extractor.stop.set()
        self.engine.interrupt()

    def close(self) -> None:
        """Stops what is under way, keeps the cost history, gives back engine and store."""
        self.interrupt()
        with ExitStack() as stack:  # each of them also when another fails
            stack.callback(self.engine.close)
            stack.callback(self.store.close)  # first: what it settles goes back to the engine
            self._tuner.close()
            self.executor.shutdown(wait=True, cancel_futures=True)
            self.costs.found_in_flight = self._tuner.found(self._mean_tokens) or self.costs.found_in_flight
            with suppress(OSError):  # of a full or read-only store the chunks have told; the cost history can wait
                self.costs.save(self.costs_path)
            self.engine.sweep()  # what a killed run had in flight the engine dumped after our preflight


def known_signatures(store: Store) -> Outliers:
    """What the states of a store look like, from some of them."""
    outliers = Outliers()
    for receipt in islice(store.receipts(), SIGNATURES_READ):
        try:
            view = store.read(receipt.state_key)
        except StateCorrupt:
            continue  # fsck's affair
        outliers.add(signature_of(view.states_slh, view.dtype))
        view.close()
    return outliers


_open_sessions: dict[SessionSettings, tuple[ExtractionSession, int]] = {}
_registry_lock = threading.Lock()


@contextmanager
def shared_session(
    settings: SessionSettings, make: Callable[[SessionSettings], ExtractionSession] = ExtractionSession
) -> Generator[ExtractionSession]:
    """The session of these settings: the first user of the process opens it, the last closes it."""
    with _registry_lock:
        session, users = _open_sessions.get(settings, (None, 0))
        session = session or make(settings)
        _open_sessions[settings] = (session, users + 1)
    try:
        yield session
    finally:
        with _registry_lock:
            users = _open_sessions[settings][1] - 1
            if users:
                _open_sessions[settings] = (session, users)
            else:
                del _open_sessions[settings]
                session.close()
