"""What no header shows: a final state on the wrong side of the norm, and layers that were stored in another order.

Tensor legend: R tokens looked at, L stored layers, H hidden size, N samples, F features (sizes and distances of layers), O orders.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import RmsNorm
from drafter_data.validation.reference import trimmed_covariance

_NORMED_WITHIN = 0.005
_NORMED_BEYOND = 0.05
_ENOUGH_SAMPLES = 8
_SAMPLES_A_FEATURE = 4
_FAR, _MUCH_BETTER = 6.0, 0.25
"""Times the median sample's misfit. Of 20,000 good samples of a tiny Llama, three tokens of each, none came beyond 5.2."""


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
    """Sizes of the stored layers and distances between them, per sample: what the order of a residual stream looks like.

    A signature has the logarithm of each layer's root mean square and of each two layers' distance. How far it is from the store's
    middle is measured against how the store's samples vary (Mahalanobis), as far as there are enough of them to tell.
    """

    def __init__(self, layers: int) -> None:
        self._orders = [list(order) for order in permutations(range(layers))]
        self._triangle = np.triu_indices(layers)
        self._keys: list[str] = []
        self._signatures: list[NDArray[np.float64]] = []

    def add(self, key: str, states_rlh: NDArray[np.float32]) -> None:
        """Takes in a few rows of one sample."""
        flat_lx = states_rlh.astype(np.float64).transpose(1, 0, 2).reshape(states_rlh.shape[1], -1)
        gram_ll = flat_lx @ flat_lx.T / flat_lx.shape[1]
        square_l = np.diagonal(gram_ll)
        square_ll = np.maximum(square_l[:, None] + square_l[None] - 2 * gram_ll, 0)
        np.fill_diagonal(square_ll, square_l)
        self._keys.append(key)
        self._signatures.append(np.log(square_ll + 1e-30) / 2)

    def out_of_order(self) -> dict[str, str]:
        """Samples whose layers fit the store's other samples only in another order: key to what was found.

        Nothing is said of fewer than 8 samples: the rest of the store is the measure.
        """
        if len(self._keys) < _ENOUGH_SAMPLES:
            return {}
        misfit_on = self._misfits(np.stack(self._signatures))
        best_n = misfit_on.min(axis=0)
        suspicious_n = (misfit_on[0] > _FAR) & (best_n < _MUCH_BETTER * misfit_on[0]) & (best_n < _FAR)
        return {
            self._keys[n]: f"sample {self._keys[n][:12]}: its stored layers fit this store's other samples only in the order "
            f"{self._orders[int(misfit_on[:, n].argmin())]}; extract it again"
            for n in np.flatnonzero(suspicious_n).tolist()
        }

    def _misfits(self, signatures_nll: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far each sample's signature, its layers taken in each order, is from the store's: [O, N], the first order theirs."""
        found_nf = signatures_nll[:, *self._triangle]
        middle_f, features = np.median(found_nf, axis=0), found_nf.shape[1]
        enough = len(found_nf) >= _SAMPLES_A_FEATURE * features
        precision_ff = np.linalg.inv(trimmed_covariance(found_nf - middle_f)[0]) if enough else np.eye(features)

        def misfit(order: list[int]) -> NDArray[np.float64]:
            error_nf = signatures_nll[:, order][:, :, order][:, *self._triangle] - middle_f
            return np.einsum("nf,fg,ng->n", error_nf, precision_ff, error_nf)

        misfit_on = np.stack([misfit(order) for order in self._orders])
        return misfit_on / max(float(np.median(misfit_on[0])), 1e-12)
