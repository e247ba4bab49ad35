"""The training curve of a job of any length, in bounded memory."""

from __future__ import annotations

from data_contracts.handoff import TrainingPoint

MOST_POINTS = 1000


class Curve:
    """Keeps at most MOST_POINTS points by leaving out every second one, over and over; the last one is always kept."""

    def __init__(self) -> None:
        self._points: list[TrainingPoint] = []
        self._every, self._seen = 1, 0
        self._last: TrainingPoint | None = None

    def take(self, point: TrainingPoint) -> None:
        """Adds one point. A step that is not after the one before begins a new curve: a job that was started again."""
        if self._last is not None and point.step < self._last.step:
            self._points, self._every, self._seen = [], 1, 0
        self._last = point
        if self._seen % self._every == 0:
            self._points.append(point)
        self._seen += 1
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def points(self) -> list[TrainingPoint]:
        """What has been kept."""
        points = list(self._points)
        return [*points, self._last] if self._last is not None and points[-1] is not self._last else points
