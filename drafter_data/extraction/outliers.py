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
FAR = 10.0
"""Deviations from the median, in robust standard deviations, that make a sample suspicious."""
_FLOOR = 0.02
_TO_SIGMA = 1.4826


def signature_of(states_slh: NDArray[np.generic] | RowsOnDisk, dtype: str) -> NDArray[np.float64]:
    """[L * (L + 1) / 2] logarithms; rows are spread over the prompt, the first one (an attention sink in most models) left out."""
    tokens, layers, hidden = states_slh.shape
    most = int(np.clip(VALUES_LOOKED_AT // (layers * hidden), FEWEST_ROWS, MOST_ROWS))
    rows = np.unique(np.linspace(min(1, tokens - 1), tokens - 1, most).astype(int))
    states_lrh = as_float32(states_slh[rows], dtype).swapaxes(0, 1)
    sizes = [_log_size(states_lrh[a]) for a in range(layers)]
    apart = [_log_size(states_lrh[a] - states_lrh[b]) for a in range(layers) for b in range(a + 1, layers)]
    return np.median([*sizes, *apart], axis=1)


def _log_size(values_rh: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithm of each row's root mean square. In single precision: a tenth of the time, and more exact than rows differ."""
    square_r = np.einsum("rh,rh->r", values_rh, values_rh).astype(np.float64) / values_rh.shape[1]
    return np.log(np.sqrt(square_r) + 1e-30)


class Outliers:
    """Signatures of committed samples, the newest of them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[NDArray[np.float64]] = deque(maxlen=MOST_KEPT)
        self._on_trial = 0

    def add(self, signature: NDArray[np.float64]) -> None:
        """Takes in a sample that is right."""
        with self._changed:
            self._kept.append(signature)
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
            kept = np.array(self._kept)
        if len(kept) < ENOUGH:
            return None
        middle = np.median(kept, axis=0)
        scale = _TO_SIGMA * np.median(np.abs(kept - middle), axis=0) + _FLOOR
        return float(np.max(np.abs(signature - middle) / scale))
