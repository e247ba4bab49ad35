"""What a sample's states look like: sizes of the layers, distances between them, and how rows follow their tokens.

No header or checksum shows a swapped layer, a final state on the wrong side of the norm, or the rows of another prompt. These
numbers do, measured against the rest of the store: a residual stream has a typical size at each layer and a typical distance
between two layers, whose ratios within a sample hardly vary, and its early states carry the token that they stand for.

Tensor legend: R rows looked at, L stored layers, H hidden size, P projected size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.foreign_file import RowsOnDisk
from drafter_data.safetensors_file import as_float32

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

VALUES_LOOKED_AT = 1 << 18
"""Of each sample: many rows of narrow models, whose numbers are noisier, and a small part of a wide model's sample."""
FEWEST_ROWS, MOST_ROWS = 24, 2048
FIRST_ROWS_SKIPPED = 4
"""The first tokens of a prompt may be attention sinks, a hundred times as large (Xiao et al. 2023)."""
PROJECTED = 32


@dataclass(frozen=True)
class Signature:
    """Measures of one sample over `rows_r` of its rows.

    `shape_ll` [L, L]: mean log root-mean-square of each layer on the diagonal, mean log distance of two layers beside it.
    `spread_l` [L]: standard deviation over the rows of a layer's log size. `rms_l` [L]: root mean square of each layer.
    `tokens_rp` [R, P]: unit vectors, the first stored layer's rows, projected.
    """

    rows_r: NDArray[np.int64]
    shape_ll: Doubles
    spread_l: Doubles
    rms_l: Doubles
    tokens_rp: Floats


def signature_of(states_slh: NDArray[Any] | RowsOnDisk, dtype: str) -> Signature:
    """Measures evenly spaced rows of a sample."""
    rows_r = rows_of(states_slh.shape)
    states_rlh = as_float32(states_slh[rows_r], dtype)
    log_rll = _log_sizes(states_rlh)
    log_rl = log_rll.diagonal(axis1=1, axis2=2)
    rms_l = np.sqrt(np.exp(2 * log_rl).mean(axis=0))
    return Signature(rows_r, _mean(log_rll), log_rl.std(axis=0), rms_l, _projected(states_rlh[:, 0]))


@lru_cache(maxsize=1024)
def rows_of(shape_slh: tuple[int, ...]) -> NDArray[np.int64]:
    """Which rows of a sample are looked at."""
    tokens, layers, hidden = shape_slh
    first = FIRST_ROWS_SKIPPED if tokens > 2 * FIRST_ROWS_SKIPPED else 0
    most = int(np.clip(VALUES_LOOKED_AT // (layers * hidden), FEWEST_ROWS, MOST_ROWS))
    return np.unique(np.linspace(first, tokens - 1, min(most, tokens - first)).astype(np.int64))


def shape_of(states_rlh: Floats) -> Doubles:
    """`Signature.shape_ll` of some rows."""
    return _mean(_log_sizes(states_rlh))


def _log_sizes(states_rlh: Floats) -> Doubles:
    """Log root-mean-square of layers and of their differences, the upper triangle of [R, L, L]: |a - b|^2 = aa + bb - 2 ab.

    Dot products, not a matrix product, which for a few long rows takes twice as long.
    """
    rows, layers, hidden = states_rlh.shape
    product_rll = np.zeros((rows, layers, layers), dtype=np.float32)
    for layer in range(layers):
        np.vecdot(states_rlh[:, layer:], states_rlh[:, layer : layer + 1], out=product_rll[:, layer, layer:])
    size_rl = product_rll.diagonal(axis1=1, axis2=2).astype(np.float64)
    square_rll = size_rl[:, :, None] + size_rl[:, None] - 2 * product_rll.astype(np.float64)
    places = np.arange(layers)
    square_rll[:, places, places] = size_rl
    return 0.5 * np.log(np.maximum(square_rll / hidden, 1e-30))


def _mean(upper_rll: Doubles) -> Doubles:
    """Over the rows, both triangles."""
    mean_ll = upper_rll.mean(axis=0)
    below = _below(len(mean_ll))
    mean_ll[below] = mean_ll.T[below]
    return mean_ll


@lru_cache(maxsize=8)
def _below(layers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.tril_indices(layers, -1)


def _projected(states_rh: Floats) -> Floats:
    """Random projection as unit vectors: angles survive, sizes do not. Each dimension is added to one of P sums under a random sign
    (Charikar, Chen and Farach-Colton 2002).

    Not a matrix product: BLAS would start threads of its own within each of ours, which cost more than all else.
    """
    rows, hidden = states_rh.shape
    signs_kp = _signs(hidden)
    padded_rh = np.pad(states_rh, ((0, 0), (0, signs_kp.size - hidden))) if signs_kp.size > hidden else states_rh
    projected_rp = np.einsum("rkp,kp->rp", padded_rh.reshape(rows, *signs_kp.shape), signs_kp)
    return projected_rp / (np.linalg.norm(projected_rp, axis=1, keepdims=True) + np.float32(1e-30))


@lru_cache(maxsize=8)
def _signs(hidden: int) -> Floats:
    """Signs [K, P] of the dimensions, in order, filled up to a multiple of P."""
    signs_kp = np.random.default_rng(hidden).integers(0, 2, (-(-hidden // PROJECTED), PROJECTED)) * 2 - 1
    return signs_kp.astype(np.float32)
