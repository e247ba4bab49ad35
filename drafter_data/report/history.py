"""How an extraction went over time, in bounded memory: from snapshots while it runs, or from the receipts of a store afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_contracts.forecast import Forecast
from data_contracts.receipt import Receipt
from drafter_data.extraction.progress import Snapshot

Floats = NDArray[np.float64]

MOST_POINTS = 512
RECEIPT_BINS = 120
PAUSE_SECONDS = 3600.0


@dataclass(frozen=True)
class History:
    """Points in time: seconds since the start, share of the tokens done, tokens a second since the point before (the first: 0).

    `first` is the forecast at the start, `latest` the one at the last point.
    """

    elapsed_n: Floats
    share_n: Floats
    rate_n: Floats
    first: Forecast | None = None
    latest: Forecast | None = None
    errors: int = 0


class Track:
    """Takes snapshots; keeps at most MOST_POINTS of them by leaving out every second one, over and over."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float, int]] = []
        self._every, self._seen = 1, 0
        self._first: Forecast | None = None
        self._latest: Snapshot | None = None

    def take(self, now: Snapshot) -> None:
        """Adds one snapshot."""
        self._first = self._first or now.forecast
        self._latest = now
        if self._seen % self._every == 0:
            self._points.append((now.elapsed_seconds, now.share, now.done_tokens))
        self._seen += 1
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def history(self) -> History:
        """What has been taken so far; rates are between one kept point and the next."""
        points, latest = list(self._points), self._latest
        if latest is not None and points[-1][0] < latest.elapsed_seconds:
            points.append((latest.elapsed_seconds, latest.share, latest.done_tokens))
        elapsed_n = np.array([elapsed for elapsed, _, _ in points], dtype=np.float64)
        tokens_n = np.array([tokens for _, _, tokens in points], dtype=np.float64)
        rate_n = np.diff(tokens_n, prepend=tokens_n[:1]) / np.maximum(np.diff(elapsed_n, prepend=elapsed_n[:1] - 1.0), 1e-3)
        return History(
            elapsed_n=elapsed_n,
            share_n=np.array([share for _, share, _ in points], dtype=np.float64),
            rate_n=rate_n,
            first=self._first,
            latest=latest.forecast if latest is not None else None,
            errors=latest.errors if latest is not None else 0,
        )


def latest_stretch(committed_at: Sequence[float]) -> float:
    """When the latest stretch of work began: after the last pause of more than PAUSE_SECONDS. 0 where nothing was committed."""
    told_n = np.sort(np.array([moment for moment in committed_at if moment > 0], dtype=np.float64))
    if not len(told_n):
        return 0.0
    pauses = np.flatnonzero(np.diff(told_n) > PAUSE_SECONDS)
    return float(told_n[pauses[-1] + 1] if len(pauses) else told_n[0])


def history_of_receipts(receipts: Iterable[Receipt], total_tokens: int, *, since: float = 0.0) -> History | None:
    """The same from receipts that were committed after `since` (`time.time()` seconds), in equal steps; None where there are none.

    Whoever extracted is in it: other hosts, and earlier tries of a run.
    """
    told = np.array([(one.committed_at, one.tokens) for one in receipts], dtype=np.float64).reshape(-1, 2)
    before = float(told[told[:, 0] < since, 1].sum())
    told = told[told[:, 0] >= max(since, 1.0)]
    if not len(told):
        return None
    start, seconds = float(told[:, 0].min()), max(float(np.ptp(told[:, 0])), 1e-3)
    bins = int(min(RECEIPT_BINS, max(1, len(told) // 4), max(1, seconds)))
    tokens_b, edges = np.histogram(told[:, 0] - start, bins=bins, range=(0.0, seconds), weights=told[:, 1])
    return History(
        elapsed_n=edges,
        share_n=(before + np.cumsum([0.0, *tokens_b])) / max(total_tokens, 1),
        rate_n=np.array([0.0, *tokens_b]) / (seconds / bins),
    )


NOTHING_YET = History(np.zeros(1), np.zeros(1), np.zeros(1))
