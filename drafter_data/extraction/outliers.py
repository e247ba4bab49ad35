"""States that look unlike the store's others: layers one off, layouts transposed, what no single file can show.

A signature is the logarithm of each stored layer's root mean square and of each two layers' distance, over some rows of a sample.
What deviates is not condemned but extracted again and compared. Tensor legend: R rows looked at, L stored layers, H hidden size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from drafter_data.foreign_file import RowsOnDisk
from drafter_data.safetensors_file import as_float32

FEWEST_ROWS, MOST_ROWS = 16, 64
VALUES_LOOKED_AT = 1 << 18
"""Of a sample: wide models vary less from row to row, and many samples are looked at side by side."""
ENOUGH = 8
MOST_KEPT = 256
RENEWED_AFTER = 16
"""What is usual is found anew once a part of the known samples as large as one over this is new."""
FAR = 10.0
"""Deviations from the median, in robust standard deviations, that make a sample suspicious."""
_FLOOR = 0.02
_TO_SIGMA = 1.4826


def signature_of(states_slh: NDArray[np.generic] | RowsOnDisk, dtype: str) -> NDArray[np.float64]:
    """[L * (L + 1) / 2] logarithms; rows are spread over the prompt, the first one (an attention sink in most models) left out."""
    tokens, layers, hidden = states_slh.shape
    first, most = min(1, tokens - 1), max(FEWEST_ROWS, min(MOST_ROWS, VALUES_LOOKED_AT // max(1, layers * hidden)))
    count = min(most, tokens - first)
    states_rlh = as_float32(states_slh[first + np.arange(count) * (tokens - 1 - first) // max(1, count - 1)], dtype)
    apart = [_log_sizes(states_rlh[:, a + 1 :] - states_rlh[:, a : a + 1]) for a in range(layers - 1)]
    return _median(np.concatenate([_log_sizes(states_rlh), *apart], axis=1))


def _log_sizes(values_rlh: NDArray[np.float32]) -> NDArray[np.float64]:
    """[R, L], logarithms of root mean squares. In single precision: a tenth of the time, and more exact than rows differ."""
    square_rl = np.einsum("rlh,rlh->rl", values_rlh, values_rlh).astype(np.float64) / values_rlh.shape[2]
    return np.log(np.sqrt(square_rl) + 1e-30)


def _median(values_nk: NDArray[np.float64]) -> NDArray[np.float64]:
    """[K], over n. NumPy's own takes several times as long on so few values."""
    ordered_nk = np.sort(values_nk, axis=0)
    return (ordered_nk[(len(ordered_nk) - 1) // 2] + ordered_nk[len(ordered_nk) // 2]) / 2


class Outliers:
    """Signatures of committed samples, the newest of them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[NDArray[np.float64]] = deque(maxlen=MOST_KEPT)
        self._on_trial = 0
        self._usual: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self._unused = 0

    def add(self, signature: NDArray[np.float64]) -> None:
        """Takes in a sample that is right."""
        with self._changed:
            self._kept.append(signature)
            self._unused += 1
            self._changed.notify_all()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Until `ENOUGH` samples are known only that many are looked at side by side, the others wait: each of the first ones costs
        a further request.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._kept) + self._on_trial < ENOUGH or len(self._kept) >= ENOUGH)
            self._on_trial += 1
        try:
            yield
        finally:
            with self._changed:
                self._on_trial -= 1
                self._changed.notify_all()

    def deviation(self, signature: NDArray[np.float64]) -> float | None:
        """Largest distance from the median in robust standard deviations; None while too few samples are known."""
        with self._changed:
            if len(self._kept) < ENOUGH:
                return None
            if self._usual is None or self._unused > len(self._kept) // RENEWED_AFTER:
                self._usual, self._unused = _middle_and_scale(np.array(self._kept)), 0
            middle, scale = self._usual
        return float(np.max(np.abs(signature - middle) / scale))


def _middle_and_scale(kept_nk: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    middle = _median(kept_nk)
    return middle, _TO_SIGMA * _median(np.abs(kept_nk - middle)) + _FLOOR
