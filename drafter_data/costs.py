"""The cost model: how long the remaining work of one engine takes.

wall seconds = level * sum over requests of (fixed + linear * tokens + quadratic * tokens^2), all non-negative.

A request's latency says little about its own cost once several are in flight: it waits for its neighbours. What is fitted is
therefore wall time: completions are gathered into windows, and the time between a window's first and last completion is regressed
on the window's (requests, tokens, tokens^2). That measures what batching, queueing and the client's own work really give, whatever
the number in flight. The SHAPE (the three coefficients) comes from all windows, the older ones thinned out; the LEVEL from as many
of the latest windows as agree with each other (so a drift or a restart is forgotten within a few windows). Both are robust:
iteratively reweighted with Tukey's biweight (Beaton and Tukey 1974), so that a pause does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from data_contracts.forecast import CostFit, Forecast
from data_contracts.record import Record
from drafter_data.errors import InputError
from drafter_data.files import write_atomic

Floats = NDArray[np.float64]

PRIOR = (0.020, 25e-6, 0.0)
"""Seconds, seconds a token, seconds a token^2, until something has been observed."""
PRIOR_RESIDUAL_SHARE = 1.0
MAX_WINDOWS = 2048
MIN_WINDOW_REQUESTS = 4
TUKEY = 4.685
Z_90 = 1.645
MAX_IDLE_SECONDS = 2.0


class CostWindow(Record):
    """One window of completions: `requests`, their tokens and squared tokens, the wall seconds they took, mean in flight."""

    requests: int
    tokens: int
    tokens2: float
    seconds: float
    in_flight: float
    ended_at: float


class CostHistory(Record):
    """What is kept of an engine: STORE/costs/<fingerprint>.json."""

    version: int = 1
    fingerprint: str
    windows: tuple[CostWindow, ...]


def latest_costs(store_root: Path) -> CostModel | None:
    """The history of the engine that worked for this store last, or None."""
    files = sorted(store_root.glob("costs/*.json"), key=lambda path: path.stat().st_mtime)
    return CostModel.load(files[-1]) if files else None


def costs_path(store_root: Path, fingerprint: str) -> Path:
    """Where an engine's history is kept."""
    return store_root / "costs" / f"{fingerprint}.json"


class CostModel:
    """The cost of an engine's requests, learnt while it works. Safe to call from many threads."""

    def __init__(self, fingerprint: str = "", windows: Sequence[CostWindow] = ()) -> None:
        self.fingerprint = fingerprint
        self._windows: list[CostWindow] = list(windows)
        self._open: list[tuple[int, float, int]] = []
        self._last_finish: float | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """The kept model, or an empty one named after the file where there is none. Raises InputError for another file."""
        if not path.is_file():
            return cls(path.stem)
        try:
            history = CostHistory.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise InputError(
                f"{path} is no cost history: {error.errors()[0]['msg']}; remove it, the engine is then measured again",
                reason="cost-history-invalid",
            ) from error
        return cls(history.fingerprint, history.windows)

    def save(self, path: Path) -> None:
        """Keeps the history (at most 2,048 windows) for the next run on this engine."""
        with self._lock:
            history = CostHistory(fingerprint=self.fingerprint, windows=tuple(self._windows))
        write_atomic(path, history.model_dump_json())

    def observe(self, tokens: int, seconds: float, in_flight: int, *, finished_at: float | None = None) -> None:
        """Takes in one finished request: `tokens`, its `seconds` from sending to reply, requests open at the time.

        `finished_at` is in seconds of any steady clock (default: now). Call it in order of completion.
        """
        finish = time.monotonic() if finished_at is None else finished_at
        with self._lock:
            last = self._last_finish
            # Nothing was in flight between the last completion and this sending: only a short gap is the client's own work.
            if last is None or (finish - seconds) - last > MAX_IDLE_SECONDS:
                self._open.clear()
                self._last_finish = finish
                if in_flight <= 1:
                    self._close_window(finish, seconds, [(tokens, finish, 1)])
                return
            finish = max(finish, last)
            self._open.append((tokens, finish - last, in_flight))
            self._last_finish = finish
            widest = max(k for _, _, k in self._open)
            if widest <= 1 or len(self._open) >= max(MIN_WINDOW_REQUESTS, 2 * widest):
                self._close_window(finish, sum(gap for _, gap, _ in self._open), self._open)
                self._open.clear()

    def _close_window(self, ended_at: float, seconds: float, members: Sequence[tuple[int, float, int]]) -> None:
        counts = [tokens for tokens, _, _ in members]
        self._windows.append(
            CostWindow(
                requests=len(counts),
                tokens=sum(counts),
                tokens2=float(sum(n * n for n in counts)),
                seconds=max(seconds, 1e-9),
                in_flight=sum(k for _, _, k in members) / len(members),
                ended_at=ended_at,
            )
        )
        if len(self._windows) > MAX_WINDOWS:
            older = len(self._windows) // 2
            self._windows[:older] = self._windows[:older:2]

    def fit(self, *, in_flight: int | None = None) -> CostFit:
        """The coefficients, the level included. `source` is `prior` until something has been observed."""
        return self._fitted(in_flight)[0]

    def forecast(self, remaining_tokens: Sequence[int] | NDArray[Any], *, in_flight: int, bytes_per_token: int) -> Forecast:
        """Wall seconds and bytes of requests of these lengths, with a 90 % interval.

        Until something is observed the prior is divided by nothing and the interval is a factor of four either way.
        """
        tokens = np.asarray(remaining_tokens, dtype=np.float64)
        fit, level_error, noise_seconds = self._fitted(in_flight)
        seconds = float(predicted_seconds(fit, tokens).sum())
        if fit.source == "prior":
            low, high = seconds / 4, seconds * 4
        else:
            # Noise of a window grows with the root of its length; so does that of the rest.
            half = Z_90 * float(np.hypot(level_error * seconds, noise_seconds * np.sqrt(seconds)))
            low, high = max(0.0, seconds - half), seconds + half
        return Forecast(
            seconds=seconds,
            low_seconds=low,
            high_seconds=high,
            bytes=int(tokens.sum()) * bytes_per_token,
            samples=len(tokens),
            tokens=int(tokens.sum()),
        )

    @property
    def usual_in_flight(self) -> int:
        """Requests in flight of the latest windows (1 where nothing is known)."""
        with self._lock:
            return max(1, round(float(np.median([w.in_flight for w in self._windows[-32:]])))) if self._windows else 1

    def _fitted(self, in_flight: int | None) -> tuple[CostFit, float, float]:
        """The fit, the relative standard error of its level, and the noise in seconds a root second."""
        with self._lock:
            windows = list(self._windows)
        if not windows:
            fixed, linear, quadratic = PRIOR
            fit = CostFit(
                fixed_seconds=fixed,
                linear_seconds_per_token=linear,
                quadratic_seconds_per_token2=quadratic,
                residual_share=PRIOR_RESIDUAL_SHARE,
                observations=0,
                source="prior",
            )
            return fit, PRIOR_RESIDUAL_SHARE, 0.0
        x_w3 = np.array([[w.requests, w.tokens, w.tokens2] for w in windows], dtype=np.float64)
        seconds_w = np.array([w.seconds for w in windows])
        weight_w = _in_flight_weights(np.array([w.in_flight for w in windows]), in_flight)
        shape_3 = _fit_shape(x_w3, seconds_w, weight_w)
        level, level_error, noise = _fit_level(x_w3 @ shape_3, seconds_w, weight_w)
        fixed, linear, quadratic = (float(c) for c in shape_3 * level)
        fit = CostFit(
            fixed_seconds=fixed,
            linear_seconds_per_token=linear,
            quadratic_seconds_per_token2=quadratic,
            residual_share=float(noise / np.sqrt(np.median(seconds_w))),
            observations=sum(w.requests for w in windows),
        )
        return fit, level_error, noise


def predicted_seconds(fit: CostFit, tokens: NDArray[Any]) -> Floats:
    """Seconds of each request."""
    n = tokens.astype(np.float64)
    return fit.fixed_seconds + fit.linear_seconds_per_token * n + fit.quadratic_seconds_per_token2 * n * n


def non_negative_least_squares(x_wk: Floats, y_w: Floats) -> Floats:
    """argmin |x c - y| with c >= 0, exactly: the best of the unconstrained solutions over the subsets of the few columns."""
    columns = x_wk.shape[1]
    scale_k = np.linalg.norm(x_wk, axis=0)
    scale_k[scale_k == 0] = 1.0
    scaled_wk = x_wk / scale_k
    best_k, best_error = np.zeros(columns), float(y_w @ y_w)
    for subset in range(1, 1 << columns):
        chosen = [k for k in range(columns) if subset >> k & 1]
        solution = np.linalg.lstsq(scaled_wk[:, chosen], y_w, rcond=1e-10)[0]
        if (solution < 0).any():
            continue
        error = float(np.square(scaled_wk[:, chosen] @ solution - y_w).sum())
        if error < best_error * (1 - 1e-9):
            best_error = error
            best_k = np.zeros(columns)
            best_k[chosen] = solution
    return best_k / scale_k


def _fit_shape(x_w3: Floats, seconds_w: Floats, weight_w: Floats) -> Floats:
    """Coefficients of all windows: relative residuals, biweight, older windows counting less."""
    age_w = np.arange(len(seconds_w))[::-1]
    base_w = weight_w * np.maximum(0.5 ** (age_w / 512), 0.02)
    expected_w = seconds_w
    robust_w = np.ones_like(seconds_w)
    shape_3 = np.zeros(3)
    for _ in range(6):
        # A window's noise grows with the root of its length.
        root_w = np.sqrt(base_w * robust_w / np.maximum(expected_w, 1e-12))
        shape_3 = non_negative_least_squares(x_w3 * root_w[:, None], seconds_w * root_w)
        expected_w = np.maximum(x_w3 @ shape_3, 1e-12)
        residual_w = (seconds_w - expected_w) / np.sqrt(expected_w)
        robust_w = np.maximum(_biweight(residual_w), 1e-3)
    return shape_3


def _fit_level(expected_w: Floats, seconds_w: Floats, weight_w: Floats) -> tuple[float, float, float]:
    """(level, its relative standard error, noise in seconds a root second) from the latest windows that agree."""
    keep_w = weight_w > 0.3 * weight_w.max()
    expected_w, seconds_w = np.maximum(expected_w[keep_w], 1e-12), seconds_w[keep_w]
    ratio_w = seconds_w / expected_w
    noise = _spread((ratio_w - _local_median(ratio_w)) * np.sqrt(expected_w))
    count = len(ratio_w)
    size = min(8, count)
    level, error = _weighted_level(ratio_w[-size:], expected_w[-size:], noise)
    while size < count:
        wider = min(count, size * 2)
        older, older_error = _weighted_level(ratio_w[-wider:-size], expected_w[-wider:-size], noise)
        if abs(older - level) > 3 * float(np.hypot(error, older_error)) + 0.005 * level:
            break
        size = wider
        level, error = _weighted_level(ratio_w[-size:], expected_w[-size:], noise)
    return level, error / max(level, 1e-12), noise * float(np.sqrt(max(level, 1e-12)))


def _weighted_level(ratio_w: Floats, expected_w: Floats, noise: float) -> tuple[float, float]:
    """Robust ratio of seconds to expectation over some windows, and its standard error."""
    centre = float(np.median(ratio_w))
    weight_w = expected_w * np.maximum(_biweight((ratio_w - centre) * np.sqrt(expected_w), noise), 1e-3)
    level = float((ratio_w * weight_w).sum() / weight_w.sum())
    return level, noise / float(np.sqrt(weight_w.sum()))


def _local_median(values_w: Floats, span: int = 9) -> Floats:
    """Running median, so that a drift of the level does not count as noise."""
    if len(values_w) < span:
        return np.full_like(values_w, np.median(values_w))
    padded = np.pad(values_w, span // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, span), axis=1)


def _spread(residual_w: Floats) -> float:
    """Standard deviation from the median absolute deviation; never zero."""
    if len(residual_w) < 3:
        return float(np.abs(residual_w).max(initial=0.0)) + 0.05
    return max(1.4826 * float(np.median(np.abs(residual_w))), 1e-4)


def _biweight(residual_w: Floats, spread: float | None = None) -> Floats:
    u_w = residual_w / (TUKEY * (spread if spread is not None else _spread(residual_w)))
    return np.where(np.abs(u_w) < 1, (1 - u_w**2) ** 2, 0.0)


def _in_flight_weights(observed_w: Floats, asked: int | None) -> Floats:
    """Windows with about the number in flight that is asked for count most; others only where there are few of those."""
    if asked is None:
        return np.ones_like(observed_w)
    distance_w = np.abs(np.log2(np.maximum(observed_w, 1.0) / max(asked, 1)))
    return np.exp2(-4 * distance_w) + 1e-6
