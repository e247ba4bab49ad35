"""How often something costly is done beside the work: so seldom that it takes at most a hundredth of the time."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

LEAST_SECONDS = 10.0
LARGEST_SHARE = 0.01


class Seldom:
    """`if seldom.due(): with seldom.measured(): draw()`; due at once at first."""

    def __init__(self, least_seconds: float = LEAST_SECONDS) -> None:
        self._least, self._next = least_seconds, 0.0

    def due(self) -> bool:
        """Whether enough time has passed."""
        return time.monotonic() >= self._next

    @contextmanager
    def measured(self) -> Generator[None]:
        """Around the costly thing."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._next = ended + max(self._least, (ended - started) / LARGEST_SHARE)
