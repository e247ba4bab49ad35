"""What no header shows: a final state on the wrong side of the norm, and layers that were stored in another order.

Tensor legend: R tokens looked at, L stored layers, H hidden size, N samples.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import RmsNorm

_NORMED_WITHIN = 0.005
_NORMED_BEYOND = 0.05
_ENOUGH_SAMPLES = 8
_MAD_TO_SIGMA = 1.4826


def norm_deviation(states_rh: NDArray[np.float32], norm: RmsNorm) -> NDArray[np.float64]:
    """How far each row is from one that has passed the norm: such a row divided by the norm's scale has root mean square 1.

    Follows from y = x / rms(x) * scale; rounding to bfloat16 leaves about 0.001.
    """
    used_h = np.abs(norm.scale_h) > 1e-6
    unscaled_rh = states_rh[:, used_h].astype(np.float64) / norm.scale_h[used_h]
    return np.abs(np.sqrt(np.mean(np.square(unscaled_rh), axis=1)) - 1)


def norm_fault(states_rh: NDArray[np.float32], norm: RmsNorm, final_norm: str) -> str | None:
    """What is wrong with final states said to be `pre` or `post` the norm; None when nothing is."""
    deviation_r = norm_deviation(states_rh, norm)
    if final_norm == "pre" and (deviation_r < _NORMED_WITHIN).all():
        return "expected a final state before the norm, found one that has passed it"
    if final_norm == "post" and (deviation_r > _NORMED_BEYOND).any():
        return "expected a final state that has passed the norm, found one that has not"
    return None


class LayerSignatures:
    """Mean log root-mean-square per stored layer and sample: what a layer's states look like in this store."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._keys: list[str] = []
        self._signatures: list[NDArray[np.float32]] = []

    def add(self, key: str, states_rlh: NDArray[np.float32]) -> None:
        """Takes in a few rows of one sample."""
        mean_square_rl = np.mean(np.square(states_rlh, dtype=np.float64), axis=2)
        self._keys.append(key)
        self._signatures.append((np.log(mean_square_rl + 1e-30).mean(axis=0) / 2).astype(np.float32))

    def out_of_order(self) -> dict[str, str]:
        """Samples whose layers fit the store's other samples only in another order: key to what was found.

        Nothing is said of fewer than 8 samples: the rest of the store is the measure.
        """
        if len(self._keys) < _ENOUGH_SAMPLES:
            return {}
        signatures_nl = np.stack(self._signatures).astype(np.float64)
        middle_l = np.median(signatures_nl, axis=0)
        spread_l = _MAD_TO_SIGMA * np.median(np.abs(signatures_nl - middle_l), axis=0)
        distance_n = np.sum(np.square(signatures_nl - middle_l), axis=1)
        limit = float(np.sum(np.square(6 * spread_l + 0.01)))
        found: dict[str, str] = {}
        for n in np.flatnonzero(distance_n > limit):
            order = min(
                permutations(range(self._layers)),
                key=lambda order: float(np.sum(np.square(signatures_nl[n, list(order)] - middle_l))),
            )
            if np.sum(np.square(signatures_nl[n, list(order)] - middle_l)) < 0.25 * distance_n[n]:
                found[self._keys[n]] = (
                    f"sample {self._keys[n][:12]}: its stored layers fit this store's others only in the order {list(order)}; "
                    "extract it again"
                )
        return found
