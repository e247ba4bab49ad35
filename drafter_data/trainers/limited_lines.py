"""A job's lines at a rate that a log which people read can take."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_LINES = 100
LINES_PER_SECOND = 5.0


class LimitedLines:
    """Passes lines on to `say`: a burst at once, then so many a second, and says how many it left out. Blank ones are dropped."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._allowed, self._counted_at = float(BURST_LINES), clock()
        self._left_out = 0

    def take(self, line: str) -> None:
        """Says a line, or counts it as left out."""
        if not line.strip():
            return
        now = self._clock()
        self._allowed = min(BURST_LINES, self._allowed + (now - self._counted_at) * LINES_PER_SECOND)
        self._counted_at = now
        if self._allowed < 1:
            self._left_out += 1
            return
        self._allowed -= 1
        self.end()
        self._say(line)

    def end(self) -> None:
        """Says how many lines were left out, if any."""
        if self._left_out:
            self._say(f"… {self._left_out:,} more lines in the job's own log …")
            self._left_out = 0
