"""Simulated extraction campaigns: an engine that serves in passes, a client that keeps requests in flight, a forecast beside them.

The engine follows the law of the embedded engine's timed mode (a fixed time a pass, a time a token, at most 8,192 tokens a pass),
plus attention's quadratic part, with noise from pass to pass, slow wandering of its speed and occasional stalls. Virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from drafter_data.canary import tokens_of_canary
from drafter_data.costs import CostModel
from drafter_data.preflight import PROBE_QUANTILES
from drafter_data.probing import burst_lengths

SHAPES = ("short", "long", "bimodal", "sorted up", "sorted down")
EVENTS = ("steady", "drift", "restart")
PASS_TOKENS = 8192
CHECKPOINTS = np.arange(0.05, 0.96, 0.05)


@dataclass(frozen=True)
class Campaign:
    """One campaign. `history`: the engine was measured by another one before; else a preflight's probes come first."""

    shape: str
    event: str
    in_flight: int
    history: bool
    seed: int
    samples: int = 4000


@dataclass
class Engine:
    """Serves waiting requests in passes, first come first served, on a clock of its own."""

    rng: np.random.Generator
    fixed: float
    linear: float
    quadratic: float
    clock: float = 0.0
    speed: float = 1.0
    wander: float = 0.0
    waiting: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])

    def send(self, tokens: int) -> None:
        self.waiting.append((tokens, self.clock))

    def next_pass(self) -> list[tuple[int, float]]:
        """Serves one pass; returns its requests as (tokens, sent at). A longer request than a pass takes has it to itself."""
        served, tokens = [self.waiting.popleft()], 0
        tokens = served[0][0]
        while self.waiting and tokens + self.waiting[0][0] <= PASS_TOKENS:
            served.append(self.waiting.popleft())
            tokens += served[-1][0]
        self.wander = 0.98 * self.wander + self.rng.normal(0, 0.004)
        seconds = self.fixed + self.linear * tokens + self.quadratic * sum(n * n for n, _ in served)
        noise = np.exp(self.rng.normal(0, 0.06) + self.wander) * (4.0 if self.rng.random() < 0.005 else 1.0)
        self.clock += seconds * noise / self.speed
        return served


@dataclass(frozen=True)
class Point:
    """What was forecast at one moment and what came. `settled`: no drift or restart is to come, the last is 10 % of tokens past."""

    progress: float
    settled: bool
    true_seconds: float
    forecast_seconds: float
    low_seconds: float
    high_seconds: float
    extrapolated_seconds: float

    @property
    def error(self) -> float:
        return abs(self.forecast_seconds / self.true_seconds - 1)

    @property
    def extrapolation_error(self) -> float:
        return abs(self.extrapolated_seconds / self.true_seconds - 1)

    @property
    def covered(self) -> bool:
        return self.low_seconds <= self.true_seconds <= self.high_seconds


def all_campaigns(repeats: int, samples: int = 4000) -> list[Campaign]:
    """Every shape and event, `repeats` times each, with 1 to 32 in flight, half of them with a history."""
    chosen: list[Campaign] = []
    for seed, (shape, event, k) in enumerate(product(SHAPES, EVENTS, range(repeats))):
        chosen.append(Campaign(shape, event, (1, 4, 16, 32)[k % 4], k // 4 % 2 == 0, seed, samples))
    return chosen


def lengths_of(shape: str, samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Token counts in the order of sending."""
    if shape == "short":
        lengths = np.exp(rng.normal(5.5, 0.6, samples))
    elif shape == "long":
        lengths = np.exp(rng.normal(7.9, 0.5, samples))
    elif shape == "bimodal":
        lengths = np.where(rng.random(samples) < 0.6, np.exp(rng.normal(5.3, 0.4, samples)), np.exp(rng.normal(8.3, 0.3, samples)))
    else:
        lengths = np.sort(np.exp(rng.normal(7.0, 0.9, samples)))
    lengths = lengths.clip(8, PASS_TOKENS).astype(np.int64)
    return lengths[::-1].copy() if shape == "sorted down" else lengths


def run(campaign: Campaign) -> list[Point]:
    """Simulates a campaign and forecasts before it and at every twentieth of its tokens."""
    rng = np.random.default_rng([campaign.seed, 77])
    engine = Engine(rng, 0.02 * rng.uniform(0.5, 2), 25e-6 * rng.uniform(0.5, 2), rng.choice([0.0, 2e-9]))
    model = CostModel("simulated")
    lengths = lengths_of(campaign.shape, campaign.samples, rng)
    if campaign.history:
        _serve(engine, model, lengths_of("bimodal", 600, rng).tolist(), campaign.in_flight)
        engine.clock += 3600.0
    else:
        _probe(engine, model, lengths, campaign.in_flight)
        engine.clock += 5.0
    return _Run(campaign, engine, model, lengths, rng).points()


def _probe(engine: Engine, model: CostModel, lengths: NDArray[np.int64], in_flight: int) -> None:
    """What a preflight sends to an engine without a history: the longest prompt alone, then a burst or, where there is none to be
    sent, lengths across the data set one at a time.
    """
    longest = int(lengths.max())
    burst = burst_lengths(lengths, in_flight, spent_tokens=tokens_of_canary(longest))
    alone = [] if burst else np.quantile(lengths, PROBE_QUANTILES).astype(int).tolist()
    _serve(engine, model, [*alone, longest], 1)
    if burst:
        started = engine.clock
        _serve(engine, None, burst, in_flight)
        model.observe_whole(burst, engine.clock - started, in_flight)


def _serve(engine: Engine, model: CostModel | None, lengths: Sequence[int], in_flight: int) -> None:
    """Serves some requests, `in_flight` of them open, and lets a model see them."""
    coming = deque(lengths)
    for _ in range(min(in_flight, len(coming))):
        engine.send(coming.popleft())
    while engine.waiting:
        open_now = len(engine.waiting)
        for tokens, sent in engine.next_pass():
            if model is not None:
                model.observe(tokens, engine.clock - sent, open_now, finished_at=engine.clock)
            if coming:
                engine.send(coming.popleft())


class _Run:
    def __init__(self, campaign: Campaign, engine: Engine, model: CostModel, lengths: NDArray[np.int64], rng: np.random.Generator):
        self.campaign, self.engine, self.model, self.lengths, self.rng = campaign, engine, model, lengths, rng
        self.event_at = float(rng.uniform(0.3, 0.6)) if campaign.event != "steady" else 2.0
        self.start, self.done, self.done_tokens = engine.clock, 0, 0
        self.forecasts: list[tuple[float, float, float, float, float, float]] = []

    def points(self) -> list[Point]:
        total = int(self.lengths.sum())
        self._forecast(0.0)
        checkpoints, upcoming, happened = deque(CHECKPOINTS), 0, False
        for _ in range(self.campaign.in_flight):
            self.engine.send(int(self.lengths[upcoming]))
            upcoming += 1
        while self.engine.waiting:
            open_now = len(self.engine.waiting)
            for tokens, sent in self.engine.next_pass():
                self.model.observe(tokens, self.engine.clock - sent, open_now, finished_at=self.engine.clock)
                self.done, self.done_tokens = self.done + 1, self.done_tokens + tokens
                if upcoming < len(self.lengths):
                    self.engine.send(int(self.lengths[upcoming]))
                    upcoming += 1
            progress = self.done_tokens / total
            if progress >= self.event_at and not happened:
                self._happen()
                happened = True
            while checkpoints and progress >= checkpoints[0]:
                checkpoints.popleft()
                self._forecast(progress)
        return [self._point(*forecast) for forecast in self.forecasts]

    def _happen(self) -> None:
        """The engine becomes slower or faster by up to 30 %, or is away for a while and asked again for what was open."""
        if self.campaign.event == "drift":
            self.engine.speed *= float(self.rng.choice([0.7, 1.3]))
        else:
            self.engine.clock += float(self.rng.uniform(30, 300))
            self.engine.waiting = deque((tokens, self.engine.clock) for tokens, _ in self.engine.waiting)

    def _forecast(self, progress: float) -> None:
        remaining = self.lengths[self.done :]
        now = self.engine.clock if self.done else None  # before the first there is nothing in flight
        forecast = self.model.forecast(remaining, in_flight=self.campaign.in_flight, bytes_per_token=1, now=now)
        elapsed = self.engine.clock - self.start
        extrapolated = elapsed / self.done * len(remaining) if self.done else float("nan")
        self.forecasts.append(
            (progress, self.engine.clock, forecast.seconds, forecast.low_seconds, forecast.high_seconds, extrapolated)
        )

    def _point(self, progress: float, at: float, seconds: float, low: float, high: float, extrapolated: float) -> Point:
        settled = self.event_at > 1 or progress >= self.event_at + 0.1
        return Point(progress, settled, self.engine.clock - at, seconds, low, high, extrapolated)
