"""A linear drafter in closed form: ridge regression from what EAGLE-3 sees to what it must predict.

At position t it sees the aux states of token t and the embedding of token t+1, and predicts the final, normed state of token t+1
(Li et al. 2025, https://arxiv.org/abs/2503.01840, without the decoder layer). W = (X'X + penalty * mean(diag X'X) * I)^-1 X'Y, with
the normal equations summed in float64 block by block, so that memory does not grow with the data.

Tensor legend: N positions, S tokens, L stored layers, H hidden size, V vocabulary, D = L*H + 1 features:
L-1 aux layers, the embedding and a one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import RmsNorm

_BLOCK_POSITIONS = 512


@dataclass(frozen=True)
class VerifierTensors:
    """What the fit needs of the verifier. `norm` is None when the stored final states have passed it already."""

    embeddings_vh: NDArray[np.float32]
    lm_head_vh: NDArray[np.float32]
    norm: RmsNorm | None


@dataclass(frozen=True)
class Positions:
    """The supervised positions of one sample: features float32 [N, D], targets float32 [N, H]."""

    features_nd: NDArray[np.float32]
    targets_nh: NDArray[np.float32]


def positions_of(
    states_slh: NDArray[np.float32], ids_s: NDArray[np.int32], mask_s: NDArray[np.int64], verifier: VerifierTensors
) -> Positions:
    """What a drafter sees and must predict at every t whose next token is supervised.

    Each aux state and embedding is scaled to root mean square 1, as their sizes differ by orders of magnitude.
    """
    at_n = np.flatnonzero(mask_s[1:])
    aux_nlh = _unit(states_slh[at_n, :-1])
    embedded_nh = _unit(verifier.embeddings_vh[ids_s[at_n + 1]])
    ones_n1 = np.ones((len(at_n), 1), dtype=np.float32)
    features_nd = np.concatenate([aux_nlh.reshape(len(at_n), -1), embedded_nh, ones_n1], axis=1)
    final_nh = np.ascontiguousarray(states_slh[at_n + 1, -1])
    return Positions(features_nd, verifier.norm(final_nh) if verifier.norm else final_nh)


def _unit(states: NDArray[np.float32]) -> NDArray[np.float32]:
    return states / np.sqrt(np.mean(np.square(states), axis=-1, keepdims=True) + np.float32(1e-12))


class NormalEquations:
    """X'X [D, D], X'Y [D, H] and what the loss needs, in float64."""

    def __init__(self, features: int, hidden: int) -> None:
        self.xx_dd = np.zeros((features, features))
        self.xy_dh = np.zeros((features, hidden))
        self.positions = 0

    def add(self, positions: Positions) -> None:
        """Takes in the positions of one sample."""
        for start in range(0, len(positions.features_nd), _BLOCK_POSITIONS):
            x_nd = positions.features_nd[start : start + _BLOCK_POSITIONS].astype(np.float64)
            y_nh = positions.targets_nh[start : start + _BLOCK_POSITIONS].astype(np.float64)
            self.xx_dd += x_nd.T @ x_nd
            self.xy_dh += x_nd.T @ y_nh
            self.positions += len(x_nd)

    def solve(self, penalty: float) -> NDArray[np.float32]:
        """The weights float32 [D, H] that minimise the squared error plus the penalty."""
        shrink = penalty * float(np.mean(np.diagonal(self.xx_dd))) + 1e-12
        regular_dd = self.xx_dd + shrink * np.eye(len(self.xx_dd))
        return np.linalg.solve(regular_dd, self.xy_dh).astype(np.float32)


class HeldOut:
    """Loss and top-1 agreement over positions that the weights have not seen."""

    def __init__(self, weights_dh: NDArray[np.float32], lm_head_vh: NDArray[np.float32]) -> None:
        self._weights_dh = weights_dh
        self._lm_head_vh = lm_head_vh
        self._squared_error = 0.0
        self._targets_sum_h = np.zeros(weights_dh.shape[1])
        self._targets_square = 0.0
        self._agree = 0
        self._verifier_choices = np.zeros(len(lm_head_vh), dtype=np.int64)
        self.positions = 0

    def add(self, positions: Positions) -> None:
        """Takes in the positions of one held-out sample."""
        for start in range(0, len(positions.features_nd), _BLOCK_POSITIONS):
            targets_nh = positions.targets_nh[start : start + _BLOCK_POSITIONS]
            predicted_nh = positions.features_nd[start : start + _BLOCK_POSITIONS] @ self._weights_dh
            self._squared_error += float(np.sum(np.square(predicted_nh - targets_nh, dtype=np.float64)))
            self._targets_sum_h += targets_nh.sum(axis=0, dtype=np.float64)
            self._targets_square += float(np.sum(np.square(targets_nh, dtype=np.float64)))
            chosen_n = (targets_nh @ self._lm_head_vh.T).argmax(axis=1)
            self._agree += int(np.count_nonzero((predicted_nh @ self._lm_head_vh.T).argmax(axis=1) == chosen_n))
            self._verifier_choices += np.bincount(chosen_n, minlength=len(self._verifier_choices))
            self.positions += len(targets_nh)

    @property
    def loss(self) -> float:
        """Squared error as a share of the targets' variance: 0 is perfect, 1 is no better than their mean."""
        variance = self._targets_square - float(np.sum(np.square(self._targets_sum_h))) / max(1, self.positions)
        return self._squared_error / variance if variance > 0 else float("inf")

    @property
    def agreement(self) -> float:
        """Share of positions at which the drafter's most probable token is the verifier's."""
        return self._agree / max(1, self.positions)

    @property
    def baseline(self) -> float:
        """The agreement of always saying the verifier's most frequent choice."""
        return float(self._verifier_choices.max(initial=0)) / max(1, self.positions)
