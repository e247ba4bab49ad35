"""How many requests are in flight: what brings most work a second, or what a person says while the run goes on.

`STORE/in-flight` holds a number: then that many, up to what the engine and the threads at hand allow. Without the file, or with
anything else in it: automatic, up to the run's own bound. The dump folder bounds the bytes in flight in any case (window.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drafter_data.costs import CostWindow, FoundInFlight
from drafter_data.extraction.window import Window

_log = logging.getLogger(__name__)

CONTROL_FILE = "in-flight"
FIRST_TOKENS, MOST_AT_FIRST = 16_384, 32
"""In flight at first: what fills two passes of the usual 8,192 tokens, one that is served and one that waits."""
GAIN = 1.02
"""Another number must bring that much more: work a second alone decides, and hosts have better and worse moments."""
UP, DOWN = 2, 4
"""Fewer are rarely faster, and then by little a step: a large step shows it."""
LOOK_SECONDS = 0.25
BLOCK_SECONDS, BLOCK_WINDOWS = 1.5, 2
"""A number is looked at for at least that much work, and until as many requests as it names were answered."""
FEWEST_BLOCKS, MOST_BLOCKS = 4, 8
"""Of both numbers together. A gain that shows in one block each may be the host's better moment, unless it is as large as this."""
PLAIN_GAIN = 0.2
NOISE = 0.05
"""Seconds a root second, by which the same work is taken to vary at least."""
SURE_OF_GAIN, SURE_OF_LOSS = 2.0, 1.0
"""Standard errors. A number that is given up too early is tried again later."""
HOLD_SECONDS, LONGEST_HOLD_SECONDS = 60.0, 960.0
FEWER_WINDOWS = 8
"""After so many with fewer in flight than there might be, that is the number at home."""
MOST_CONTROL_BYTES = 16
SAME_NUMBER = 0.75
"""Windows with more than that share of a number in flight count as of it."""


def first_in_flight(lengths_n: NDArray[Any], bound: int, known: FoundInFlight | None = None) -> int:
    """Requests in flight when a run over prompts of these lengths begins: what an earlier one found (`CostModel.found_for`), or
    what fills two passes. `bound` is the most that it may have.
    """
    if known is not None:
        return known.requests
    mean = float(lengths_n.mean()) if len(lengths_n) else FIRST_TOKENS
    return max(1, min(2 ** round(math.log2(max(2.0, FIRST_TOKENS / mean))), MOST_AT_FIRST, bound))


class InFlightTuner:
    """Looks every quarter of a second, in a thread of its own, until it is closed."""

    def __init__(
        self,
        window: Window,
        control: Path,
        *,
        first: int,
        no_better: Collection[str] = (),
        bound: int,
        engine_limit: int,
        expected_seconds: Callable[[Sequence[CostWindow]], NDArray[np.float64]],
    ) -> None:
        """`bound` is the most that is tried by itself; what an earlier run found `no_better` ("more", "fewer") is tried later;
        `expected_seconds` says of windows what their lengths make them take.
        """
        self._window = window
        self._control = control
        self._engine_limit = engine_limit
        self._search = _Search(first, min(bound, engine_limit), no_better, expected_seconds)
        self._asked: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="in-flight", daemon=True)
        self._thread.start()

    def took(self, window: CostWindow) -> None:
        """Takes in requests that were answered (cost model)."""
        self._search.came.append(window)

    @property
    def settled(self) -> int:
        """The number that the run goes on with as far as is known, whatever is tried just now."""
        asked = self._asked
        return self._search.home if asked is None else asked

    def found(self, mean_tokens: float) -> FoundInFlight | None:
        """What the next run over prompts of `mean_tokens` may begin with; None where this one compared nothing, or where something
        else than the search decided.
        """
        return self._search.found(mean_tokens)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            now = time.monotonic()
            try:
                limit = self.decide(now)
            except (ValueError, ArithmeticError, MemoryError) as error:  # of a fit: the run goes on with what is settled
                _log.warning("requests in flight are not looked at just now: %s", error)
                self._search.pause(now)
                limit = self.settled
            self._window.set_limit(limit)

    def decide(self, now: float) -> int:
        """The limit from now on."""
        asked = self._read()
        if asked is None:
            self._asked = None
            return self._search.limit_at(now)
        self._search.pause(now)
        self._asked = max(1, min(asked, self._engine_limit))
        return self._asked

    def _read(self) -> int | None:
        try:
            with self._control.open("rb") as handle:
                text = handle.read(MOST_CONTROL_BYTES).strip()
        except OSError:
            return None
        return int(text) if text.isdigit() else None

    def close(self) -> None:
        """Stops looking."""
        self._stop.set()
        self._thread.join()


@dataclass
class _Direction:
    """More, or fewer: not tried again before `rest_until`. `left`: a number that it came from, to be tried once more first."""

    name: Literal["more", "fewer"]
    step: Callable[[int], int]
    no_better: bool = False
    """Than the number at home."""
    rest_until: float = -math.inf
    hold: float = HOLD_SECONDS
    left: int | None = None

    def next(self, home: int) -> int:
        return self.step(home) if self.left is None else self.left

    def rest(self, now: float) -> None:
        self.rest_until = now + self.hold
        self.hold = min(2 * self.hold, LONGEST_HOLD_SECONDS)


@dataclass
class _Comparison:
    """Blocks of windows of the number at home and of another, by turns, so that a host's better minute favours neither."""

    direction: _Direction
    trial: int
    patience: float
    blocks: int = 1
    home_windows: list[CostWindow] = field(default_factory=list[CostWindow])
    trial_windows: list[CostWindow] = field(default_factory=list[CostWindow])


class _Search:
    """Compares the number at home with more, and with fewer; moves to what brings more work a second, and rests where neither
    does.
    """

    def __init__(
        self,
        first: int,
        bound: int,
        no_better: Collection[str],
        expected_seconds: Callable[[Sequence[CostWindow]], NDArray[np.float64]],
    ) -> None:
        self.home = first
        self._compared = self._bounded = False
        self._known_no_better = no_better
        self.came = deque[CostWindow]()
        self._expected_seconds = expected_seconds
        self._unheard = 2 * first
        """Requests whose windows are not looked at: a store's first samples send further requests beside them."""
        self._directions = [
            _Direction("more", lambda home: min(UP * home, bound)),
            _Direction("fewer", lambda home: max(home // DOWN, 1)),
        ]
        self._comparison: _Comparison | None = None
        self._turn_to(first, 0.0)

    def found(self, mean_tokens: float) -> FoundInFlight | None:
        """See InFlightTuner.found."""
        if self._bounded or not self._compared:
            return None
        no_better = tuple[Literal["more", "fewer"], ...](one.name for one in self._directions if one.no_better)
        return FoundInFlight(requests=self.home, mean_tokens=mean_tokens, found_at=time.time(), no_better=no_better)

    def _turn_to(self, number: int, now: float) -> None:
        self._on, self._began = number, now
        self._block, self._fewer = list[CostWindow](), list[int]()

    def pause(self, now: float) -> None:
        """Forgets what is being compared: it was not by turns any more."""
        self.came.clear()
        self._comparison = None
        self._turn_to(self.home, now)

    def limit_at(self, now: float) -> int:
        """Takes in what came; returns the number to use next."""
        for one in self._directions:
            if one.name in self._known_no_better:
                one.no_better = True
                one.rest(now)
        self._known_no_better = ()
        while self.came:
            self._hear(self.came.popleft())
        whole = (
            len(self._block) >= BLOCK_WINDOWS
            and sum(window.seconds for window in self._block) >= BLOCK_SECONDS
            and sum(window.requests for window in self._block) >= self._on
        )
        if self._comparison is None:
            self._may_begin(now, whole=whole)
        elif whole:
            self._weigh(self._comparison, now)
        elif now - self._began > self._comparison.patience:
            self._give_up(self._comparison, now)  # so many never are in flight: something else bounds them
        return self._on

    def _hear(self, window: CostWindow) -> None:
        """Keeps a window that holds work of this turn alone, with its number in flight."""
        if self._unheard > 0:
            self._unheard -= window.requests
        elif not window.filling and window.ended_at - window.seconds >= self._began:
            if SAME_NUMBER * self._on < window.in_flight <= self._on:
                self._block.append(window)
                self._fewer.clear()
            elif window.in_flight < self._on:
                self._fewer.append(round(window.in_flight))

    def _may_begin(self, now: float, *, whole: bool) -> None:
        if len(self._fewer) >= FEWER_WINDOWS:  # the dump folder's bytes bound them, or lengths that must differ
            self.home = max(1, *self._fewer)
            self._bounded = True
            self._turn_to(self.home, now)
            return
        ready = [one for one in self._directions if one.next(self.home) != self.home and now >= one.rest_until]
        if not ready:
            self._turn_to(self.home, now)  # what comes later is compared with this number as it is then
        elif whole:
            seconds = sum(window.seconds for window in self._block)
            self._comparison = _Comparison(ready[0], ready[0].next(self.home), 5.0 + 4 * seconds, home_windows=self._block)
            self._turn_to(self._comparison.trial, now)

    def _weigh(self, comparison: _Comparison, now: float) -> None:
        at_home = self._on == self.home
        (comparison.home_windows if at_home else comparison.trial_windows).extend(self._block)
        comparison.blocks += 1
        gain, error = self._gain(comparison.home_windows, comparison.trial_windows)
        seen_enough = comparison.blocks >= FEWEST_BLOCKS or gain > PLAIN_GAIN
        if (seen_enough and gain > SURE_OF_GAIN * error) or gain < -SURE_OF_LOSS * error:
            self._settle(comparison, now, accepted=gain > 0)
        elif comparison.blocks >= MOST_BLOCKS:
            self._settle(comparison, now, accepted=gain > error)
        else:
            self._turn_to(comparison.trial if at_home else self.home, now)

    def _gain(self, home: Sequence[CostWindow], trial: Sequence[CostWindow]) -> tuple[float, float]:
        """Logarithm of how much more work a second `trial` brings than `GAIN` times `home`, and its standard error."""
        seconds_w = np.array([window.seconds for window in (*home, *trial)])
        expected_w = self._expected_seconds([*home, *trial])  # of one fit for both
        rates, square, variance = list[float](), 0.0, 0.0
        for of in (slice(None, len(home)), slice(len(home), None)):
            rates.append(max(float(expected_w[of].sum() / seconds_w[of].sum()), 1e-9))
            at_this_rate_w = np.maximum(expected_w[of] / rates[-1], 1e-9)
            square += float(np.sum(np.square(seconds_w[of] - at_this_rate_w) / at_this_rate_w))
            variance += 1 / float(seconds_w[of].sum())
        return math.log(rates[1] / rates[0] / GAIN), max(NOISE, math.sqrt(square / len(seconds_w))) * math.sqrt(variance)

    def _give_up(self, comparison: _Comparison, now: float) -> None:
        comparison.direction.left = None
        comparison.direction.rest(now)
        self._comparison = None
        self._turn_to(self.home, now)

    def _settle(self, comparison: _Comparison, now: float, *, accepted: bool) -> None:
        self._compared = True
        if not accepted:
            comparison.direction.no_better = True
            self._give_up(comparison, now)
            return
        comparison.direction.left, comparison.direction.no_better = None, False
        for one in self._directions:
            one.hold = HOLD_SECONDS
            if one is not comparison.direction:
                one.left, one.no_better = self.home, True
                one.rest(now)
        self._bounded &= comparison.trial < self.home
        self.home = comparison.trial
        self._directions.sort(key=lambda one: one is not comparison.direction)
        self._comparison = None
        self._turn_to(self.home, now)
