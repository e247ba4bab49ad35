"""The cost model: how long the remaining work of one engine takes.

wall seconds = sum over requests of (fixed + linear * tokens + quadratic * tokens^2), all non-negative.

A request's latency says little about its own cost once several are in flight: it waits for its neighbours. What is fitted is
therefore wall time: completions are gathered into windows, and the time that a window took is regressed on its (requests, tokens,
tokens^2) (cost_fit.py). That measures what batching, queueing and the client's own work really give, whatever the number in flight.

Of what is in flight the engine has done a part. How much is told by the time since the last reply and by the first window of a busy
time: as late as an engine answers its first requests, as far it is ahead of its replies from then on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from data_contracts.forecast import CostFit, Forecast
from data_contracts.record import Record
from drafter_data.cost_fit import PAUSE, Fitted, Floats, fit_windows, in_flight_weights
from drafter_data.errors import InputError
from drafter_data.files import exclusive, write_atomic

PRIOR = (0.020, 25e-6, 0.0)
"""Seconds, seconds a token, seconds a token^2, until something has been observed."""
PRIOR_RESIDUAL_SHARE = 1.0
MAX_WINDOWS = 1024
MIN_WINDOW_REQUESTS = 4
Z_90 = 1.645
MAX_IDLE_SECONDS = 2.0
COMPARED_SECONDS = 12 * 3600.0
"""So long a comparison of numbers in flight holds for the runs that follow: short ones compare nothing by themselves."""
FILLING_WEIGHT = 0.05
"""Of a busy time's first window, against the others."""
UNDER_WAY_SHARE = 0.5 / 12**0.5
"""Of the time of what is in flight: the standard error of what is done of it, which may be anything up to the half."""


class CostWindow(Record):
    """One window of completions: `requests`, their tokens and squared tokens, the wall seconds they took, most in flight.

    `filling`: it begins with a sending and not with a completion. An engine that has several requests under way answers the first
    ones late and the last ones early: such a window's time holds work on requests that it does not count.
    """

    requests: int
    tokens: int
    tokens2: float
    seconds: float
    in_flight: float
    ended_at: float
    filling: bool = False


class FoundInFlight(Record):
    """The number in flight that a run's search ended with, over prompts of `mean_tokens`; `no_better` than it were those, compared
    until `found_at` (seconds since 1970).
    """

    requests: int = Field(ge=1)
    mean_tokens: float
    found_at: float
    no_better: tuple[Literal["more", "fewer"], ...] = ()


class CostHistory(Record):
    """What is kept of an engine: STORE/costs/<fingerprint>.json."""

    version: int = 1
    fingerprint: str
    windows: tuple[CostWindow, ...]
    found_in_flight: FoundInFlight | None = None


def latest_costs(store_root: Path) -> CostModel | None:
    """The history of the engine that worked for this store last, or None."""
    files = sorted(store_root.glob("costs/*.json"), key=lambda path: path.stat().st_mtime)
    return CostModel.load(files[-1]) if files else None


def costs_path(store_root: Path, fingerprint: str) -> Path:
    """Where an engine's history is kept."""
    return store_root / "costs" / f"{fingerprint}.json"


class CostModel:
    """The cost of an engine's requests, learnt while it works. Safe to call from many threads."""

    def __init__(
        self, fingerprint: str = "", windows: Sequence[CostWindow] = (), found_in_flight: FoundInFlight | None = None
    ) -> None:
        self.fingerprint = fingerprint
        self.found_in_flight = found_in_flight
        """Kept for the next run on this engine, which begins with it."""
        self._windows: list[CostWindow] = list(windows)
        self._on_disk = set(windows)
        """Of this session, those that were loaded included."""
        self._open: list[tuple[int, float, int]] = []
        self._last_finish: float | None = None
        self._begun: float | None = None
        self._earliest = -math.inf
        self.on_window: Callable[[CostWindow], None] | None = None
        """Told of each window of requests that ended (under the lock)."""
        self._first = next((window for window in reversed(windows) if window.filling), None)
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """The kept model, or an empty one named after the file where there is none. Raises InputError for another file."""
        history = _read(path)
        return cls(history.fingerprint, history.windows, history.found_in_flight)

    def save(self, path: Path) -> None:
        """Keeps the history (at most 1,024 windows) for the next run on this engine, with what other sessions have kept meanwhile:
        engines that are alike have one history.
        """
        with exclusive(path.parent / ".lock"):
            try:
                others = _read(path)
            except InputError:  # spoilt since it was loaded
                others = CostHistory(fingerprint=self.fingerprint, windows=())
            with self._lock:
                windows = self._to_keep()
                new = next((place for place, window in enumerate(windows) if window not in self._on_disk), len(windows))
                theirs = [window for window in others.windows if window not in self._on_disk]
                self._on_disk.update(windows)
                windows[new:new] = theirs
                found = max(self.found_in_flight, others.found_in_flight, key=_found_at)
            history = CostHistory(fingerprint=self.fingerprint, windows=tuple(_bounded(windows)), found_in_flight=found)
            write_atomic(path, history.model_dump_json(exclude_none=True))

    def observe(self, tokens: int, seconds: float, in_flight: int, *, finished_at: float | None = None) -> None:
        """Takes in one finished request: `tokens`, its `seconds` from sending to reply, requests open when it was sent.

        `finished_at` is when the reply came, in seconds of any steady clock (default: now). Call it about in order of completion.
        """
        finish = time.monotonic() if finished_at is None else finished_at
        with self._lock:
            last = self._last_finish
            sent = finish - max(seconds, 0.0)
            if last is None or sent - last > MAX_IDLE_SECONDS:
                # Nothing was in flight in between: what was open is whole, and the time that counts begins at this sending.
                self._close_open(last)
                self._begun, gap = sent, finish - sent
                self._earliest = -math.inf if last is None else last
            else:
                gap = max(finish - last, 0.0)
                self._close_if_whole(last, gap, in_flight)
                if self._begun is not None and sent < self._begun:
                    # The first that is told of need not be the first that was sent; what was before is counted already.
                    sent = max(sent, self._earliest)
                    gap, self._begun = gap + self._begun - sent, sent
            self._open.append((tokens, gap, in_flight))
            self._last_finish = finish if last is None else max(finish, last)

    def observe_whole(self, tokens: Sequence[int], seconds: float, in_flight: int) -> None:
        """Takes in requests that had the engine to themselves from the first sending to the last reply: `seconds` hold all of their
        work and nothing else, unlike those of a busy time's first window. `in_flight`: of the run that they stand for.
        """
        with self._lock:
            self._close_open(self._last_finish)
            self._keep(_window(tokens, seconds, in_flight, time.monotonic()))
            self._last_finish = self._begun = None  # nothing is in flight

    def tells_of(self, in_flight: int) -> bool:
        """Whether the history holds work with about that many in flight: half to double."""
        with self._lock:
            windows = list(self._windows)
        return _tell_of(windows, in_flight)

    def _close_if_whole(self, ended_at: float, gap: float, in_flight: int) -> None:
        """Ends the open window where it holds enough requests and the next one comes after a pause.

        An engine that serves in passes answers a pass's requests together: a window that ends inside such a group would count
        requests whose time it does not hold.
        """
        if not self._open:
            return
        # The next one counts as well: what was sent alone, with others right behind it, did not have the engine to itself.
        seconds = sum(waited for _, waited, _ in self._open)
        widest = max(in_flight, *(k for _, _, k in self._open))
        whole = widest <= 1 or len(self._open) >= max(MIN_WINDOW_REQUESTS, widest)
        if whole and (gap > 0.2 * seconds / len(self._open) or len(self._open) > 8 * widest):
            self._close_open(ended_at)

    def _close_open(self, ended_at: float | None) -> None:
        if self._open and ended_at is not None:
            window = self._open_window(ended_at)
            self._first = window if window.filling else self._first
            self._keep(window)
        self._open.clear()
        self._begun = None

    def _keep(self, window: CostWindow) -> None:
        self._windows.append(window)
        if self.on_window is not None:
            self.on_window(window)
        self._windows = _bounded(self._windows)

    def _with_open(self) -> list[CostWindow]:
        """All windows, with the open one where it says something: after a few probes it is all there is."""
        widest = max((k for _, _, k in self._open), default=0)
        told = self._open and (widest <= 1 or len(self._open) >= MIN_WINDOW_REQUESTS)
        return [*self._windows, self._open_window(self._last_finish or 0.0)] if told else list(self._windows)

    def _to_keep(self) -> list[CostWindow]:
        """All windows, with the open one unless others of about its number in flight are known. It is the end of a busy time:
        engines answer their last requests the sooner the longer they were ahead of their replies, as if they had become faster.
        """
        windows, widest = self._with_open(), max((k for _, _, k in self._open), default=0)
        return list(self._windows) if widest > 1 and _tell_of(self._windows, widest) else windows

    def _open_window(self, ended_at: float) -> CostWindow:
        """The open window as it stands."""
        # Counted at each one's sending: of requests that are sent at once each counts one more.
        widest = max(k for _, _, k in self._open)
        seconds = sum(waited for _, waited, _ in self._open)
        counts = [tokens for tokens, _, _ in self._open]
        return _window(counts, seconds, widest, ended_at, filling=self._begun is not None and widest > 1)

    def fit(self, *, in_flight: int | None = None) -> CostFit:
        """The coefficients, the level included. `source` is `prior` until something has been observed."""
        return self._fitted(in_flight)[0]

    def forecast(
        self, remaining_tokens: Sequence[int] | NDArray[Any], *, in_flight: int, bytes_per_token: int, now: float | None = None
    ) -> Forecast:
        """Wall seconds and bytes of requests of these lengths, with a 90 % interval.

        `now`, on the clock of `observe`, where some of these requests are in flight: what is done of them is not to come. Until
        something is observed the prior serves, and the interval is a factor of four either way.
        """
        tokens = np.asarray(remaining_tokens, dtype=np.float64)
        fit, fitted = self._fitted(in_flight)
        if fitted is None:
            seconds = float(predicted_seconds(fit, tokens).sum())
            low, high = seconds / 4, seconds * 4
        else:
            work_3 = np.array([len(tokens), tokens.sum(), np.square(tokens).sum()])
            seconds, error = fitted.seconds_and_error(work_3)
            if now is not None:
                open_seconds = seconds * min(1.0, in_flight / max(len(tokens), 1))
                error = float(np.hypot(error, UNDER_WAY_SHARE * open_seconds))
                seconds -= min(self._under_way(now, fitted), open_seconds / 2)  # an engine may also hang
            low, high = max(0.0, seconds - Z_90 * error), seconds + Z_90 * error
        return Forecast(
            seconds=seconds,
            low_seconds=low,
            high_seconds=high,
            bytes=int(tokens.sum()) * bytes_per_token,
            samples=len(tokens),
            tokens=int(tokens.sum()),
        )

    def _under_way(self, now: float, fitted: Fitted) -> float:
        """Seconds of work done on requests that are not answered yet: the time since the last completion, and what the engine was
        ahead then, which is the time by which its first answers came late.
        """
        with self._lock:
            last, first = self._last_finish, self._first
        if last is None:
            return 0.0
        ahead = 0.0
        if first is not None:
            expected = float(_work_of(first) @ fitted.coefficients_3)
            if expected < first.seconds <= PAUSE * expected:  # beyond, it held a pause
                ahead = first.seconds - expected
        return max(now - last, 0.0) + ahead

    def expected_seconds(self, windows: Sequence[CostWindow]) -> Floats:
        """Wall seconds that windows of these requests and lengths take by all that is known, whatever the number in flight."""
        fit = self.fit()
        coefficients_3 = (fit.fixed_seconds, fit.linear_seconds_per_token, fit.quadratic_seconds_per_token2)
        return np.array([_work_of(window) for window in windows]) @ np.array(coefficients_3)

    def found_for(self, lengths_n: NDArray[Any], bound: int) -> FoundInFlight | None:
        """What an earlier run found, where it holds for prompts of these lengths: half to double its own in the mean. What was no
        better is open again where it was compared half a day ago, or where `bound` is lower.
        """
        found = self.found_in_flight
        if found is None or not len(lengths_n) or not found.mean_tokens / 2 <= float(lengths_n.mean()) <= 2 * found.mean_tokens:
            return None
        if found.requests <= bound and time.time() - found.found_at < COMPARED_SECONDS:
            return found
        return found.model_copy(update={"requests": min(found.requests, bound), "no_better": ()})

    @property
    def usual_in_flight(self) -> int:
        """Requests in flight of the latest windows (1 where nothing is known)."""
        with self._lock:
            return max(1, round(float(np.median([w.in_flight for w in self._windows[-32:]])))) if self._windows else 1

    def _fitted(self, in_flight: int | None) -> tuple[CostFit, Fitted | None]:
        with self._lock:
            windows = self._with_open()
        if not windows:
            return _cost_fit(np.array(PRIOR), PRIOR_RESIDUAL_SHARE, 0, "prior"), None
        x_w3 = np.array([_work_of(w) for w in windows])
        seconds_w = np.array([w.seconds for w in windows])
        weight_w = in_flight_weights(np.array([w.in_flight for w in windows]), in_flight)
        weight_w *= np.where([w.filling for w in windows], FILLING_WEIGHT, 1.0)
        fitted = fit_windows(x_w3, seconds_w, weight_w)
        share = float(fitted.noise / np.sqrt(np.median(seconds_w)))
        return _cost_fit(fitted.coefficients_3, share, sum(w.requests for w in windows), "observed"), fitted


def _read(path: Path) -> CostHistory:
    if not path.is_file():
        return CostHistory(fingerprint=path.stem, windows=())
    try:
        return CostHistory.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(
            f"{path} is no cost history: {error.errors()[0]['msg']}; remove it, the engine is then measured again",
            reason="cost-history-invalid",
        ) from error


def _bounded(windows: list[CostWindow]) -> list[CostWindow]:
    """Every second one of the older half is left out while there are too many."""
    while len(windows) > MAX_WINDOWS:
        older = len(windows) // 2
        windows = windows[:older:2] + windows[older:]
    return windows


def _found_at(found: FoundInFlight | None) -> float:
    return found.found_at if found is not None else -math.inf


def _tell_of(windows: Sequence[CostWindow], in_flight: int) -> bool:
    return any(not w.filling and in_flight / 2 <= w.in_flight <= 2 * in_flight for w in windows)


def _window(tokens: Sequence[int], seconds: float, in_flight: int, ended_at: float, *, filling: bool = False) -> CostWindow:
    return CostWindow(
        requests=len(tokens),
        tokens=sum(tokens),
        tokens2=float(sum(n * n for n in tokens)),
        seconds=max(seconds, 1e-9),
        in_flight=in_flight,
        ended_at=ended_at,
        filling=filling,
    )


def _work_of(window: CostWindow) -> Floats:
    return np.array([window.requests, window.tokens, window.tokens2], dtype=np.float64)


def _cost_fit(coefficients_3: Floats, residual_share: float, observations: int, source: str) -> CostFit:
    return CostFit(
        fixed_seconds=float(coefficients_3[0]),
        linear_seconds_per_token=float(coefficients_3[1]),
        quadratic_seconds_per_token2=float(coefficients_3[2]),
        residual_share=residual_share,
        observations=observations,
        source=source,
    )


def predicted_seconds(fit: CostFit, tokens: NDArray[Any]) -> Floats:
    """Seconds of each request."""
    n = tokens.astype(np.float64)
    return fit.fixed_seconds + fit.linear_seconds_per_token * n + fit.quadratic_seconds_per_token2 * n * n
