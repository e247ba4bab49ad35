"""Counting what happens and saying it every few seconds: in the log, in the terminal, in the UI."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from data_contracts.forecast import Forecast

RATE_SECONDS = 60.0
RATE_SAMPLES = 400


@dataclass(frozen=True)
class Snapshot:
    """The run at one moment. Rates are over the last minute; `forecast` is None before anything is known."""

    done: int
    total: int
    done_tokens: int
    total_tokens: int
    samples_per_second: float
    tokens_per_second: float
    request_seconds: float
    errors: int
    stored_bytes: int
    total_bytes: int
    dump_bytes: int
    in_flight: int
    elapsed_seconds: float
    forecast: Forecast | None

    @property
    def share(self) -> float:
        """Share of the tokens that is done."""
        return self.done_tokens / self.total_tokens if self.total_tokens else 1.0

    def line(self) -> str:
        """One line for people, every figure with its unit."""
        eta = "ETA unknown"
        if self.forecast is not None:
            low, high = _minutes(self.forecast.low_seconds), _minutes(self.forecast.high_seconds)
            eta = f"ETA {_minutes(self.forecast.seconds)} ({low}-{high}) min"
        return (
            f"{self.done} of {self.total} extracted, {self.samples_per_second:.2f} samples/s, {self.tokens_per_second:.0f} tok/s, "
            f"request {self.request_seconds:.2f} s, {eta}, errors {self.errors}, "
            f"store {_gb(self.stored_bytes)} of {_gb(self.total_bytes)} GB, dumps {_gb(self.dump_bytes)} GB, in flight "
            f"{self.in_flight}"
        )


class Progress:
    """Counters of one run, fed by the extraction threads."""

    def __init__(self, *, total: int, total_tokens: int, bytes_per_token: int, done: int = 0, done_tokens: int = 0) -> None:
        self._lock = threading.Lock()
        self._bytes_per_token = bytes_per_token
        self.total, self.total_tokens = total, total_tokens
        self.done, self.done_tokens = done, done_tokens
        self.errors = 0
        self._start = time.monotonic()
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=RATE_SAMPLES)

    def sample_done(self, tokens: int, request_seconds: float) -> None:
        """Counts a committed sample."""
        with self._lock:
            self.done += 1
            self.done_tokens += tokens
            self._recent.append((time.monotonic(), tokens, request_seconds))

    def sample_failed(self) -> None:
        """Counts a failed sample."""
        with self._lock:
            self.errors += 1

    def snapshot(self, *, dump_bytes: int, in_flight: int, forecast: Forecast | None) -> Snapshot:
        """The run now."""
        with self._lock:
            now = time.monotonic()
            recent = [one for one in self._recent if now - one[0] <= RATE_SECONDS]
            span = max(now - recent[0][0], 1e-3) if len(recent) > 1 else max(now - self._start, 1e-3)
            return Snapshot(
                done=self.done,
                total=self.total,
                done_tokens=self.done_tokens,
                total_tokens=self.total_tokens,
                samples_per_second=len(recent) / span,
                tokens_per_second=sum(tokens for _, tokens, _ in recent) / span,
                request_seconds=sum(seconds for _, _, seconds in recent) / max(len(recent), 1),
                errors=self.errors,
                stored_bytes=self.done_tokens * self._bytes_per_token,
                total_bytes=self.total_tokens * self._bytes_per_token,
                dump_bytes=dump_bytes,
                in_flight=in_flight,
                elapsed_seconds=now - self._start,
                forecast=forecast,
            )


Taken = TypeVar("Taken")


class Reporter(Generic[Taken]):
    """Calls `report(take())` every `every_seconds` from its own thread, and once more at the end."""

    def __init__(self, take: Callable[[], Taken], report: Callable[[Taken], None], every_seconds: float) -> None:
        self._take, self._report, self._every = take, report, every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._report(self._take())

    def close(self) -> None:
        """Stops, after a last report."""
        self._stop.set()
        self._thread.join()
        self._report(self._take())


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.1f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.3f}"
