"""How many requests are in flight: more while that brings more tokens a second, or what a person says while the run goes on.

`STORE/in-flight` holds a number: then that many, up to what the engine and the threads at hand allow. Without the file, or with
anything else in it: automatic, up to the run's own bound. The dump folder bounds the bytes in flight in any case (window.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from drafter_data.extraction.window import Window

CONTROL_FILE = "in-flight"
FIRST = 32
"""Enough for most engines, so that a short run has nothing to find out."""
GAIN = 1.03
"""A step that brings less is taken back: more in flight only means more bytes in the dump folder and longer requests."""
LOOK_SECONDS = 0.25
MEASURE_SECONDS = 1.0
HOLD_SECONDS = 60.0


class InFlightTuner:
    """Looks every quarter of a second, in a thread of its own, until it is closed."""

    def __init__(
        self, window: Window, control: Path, *, bound: int, engine_limit: int, done: Callable[[], tuple[int, int]]
    ) -> None:
        """`bound` is the most that is tried by itself, `done` gives (samples, tokens) brought so far."""
        self._window = window
        self._control = control
        self._bound, self._engine_limit = min(bound, engine_limit), engine_limit
        self._done = done
        self._climb = _Climb(min(FIRST, self._bound), self._bound)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="in-flight", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._window.set_limit(self.decide(time.monotonic()))

    def decide(self, now: float) -> int:
        """The limit from now on."""
        asked = self._asked()
        if asked is not None:
            return max(1, min(asked, self._engine_limit))
        samples, tokens = self._done()
        return self._climb.limit_after(now, samples, tokens)

    def _asked(self) -> int | None:
        try:
            text = self._control.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return int(text) if text.isdigit() else None

    def close(self) -> None:
        """Stops looking."""
        self._stop.set()
        self._thread.join()


class _Climb:
    """Doubles while each step brings at least `GAIN`; takes the last step back where it did not, and tries again later."""

    def __init__(self, first: int, bound: int) -> None:
        self._limit, self._bound = first, bound
        self._before: tuple[int, float] | None = None
        self._held_until = 0.0
        self._fills: int | None = None
        self._start: tuple[float, int, int] | None = None

    def limit_after(self, now: float, samples: int, tokens: int) -> int:
        """Takes the counts at a moment; returns the limit to use next."""
        if now < self._held_until or (self._before is None and self._limit == self._bound):
            return self._limit
        if self._fills is None:
            self._fills = samples + self._limit  # a limit shows once requests of the one before have gone through
        if samples < self._fills:
            return self._limit
        if self._start is None:
            self._start = (now, samples, tokens)
        seconds = now - self._start[0]
        if seconds < MEASURE_SECONDS or samples - self._start[1] < 2 * self._limit:
            return self._limit
        self._settle((tokens - self._start[2]) / seconds, now)
        self._fills = self._start = None
        return self._limit

    def _settle(self, rate: float, now: float) -> None:
        if self._before is not None and rate < GAIN * self._before[1]:
            self._limit, self._before, self._held_until = self._before[0], None, now + HOLD_SECONDS
        elif self._limit < self._bound:
            self._before = (self._limit, rate)
            self._limit = min(2 * self._limit, self._bound)
        else:
            self._before = None
