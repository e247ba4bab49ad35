"""What the sizes of the layers look like over a store, in plain numbers: for the report, and for a picture of each layer.

Tensor legend: N samples, L stored layers, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_contracts.validation import QUANTILES, RUN_PARTS, LayerStatistics
from drafter_data.validation.signature import Doubles

MIDDLE, LOW, HIGH = QUANTILES.index(0.5), QUANTILES.index(0.01), QUANTILES.index(0.99)


def layer_statistics(layers: Sequence[int], sizes: Sequence[tuple[float, Doubles]]) -> tuple[LayerStatistics, ...]:
    """From when each sample was stored and the root mean square of its layers [L]; nothing where there are no samples."""
    if not sizes:
        return ()
    rms_nl = np.stack([rms_l for _, rms_l in sorted(sizes, key=lambda one: one[0])])
    ratio_nl = size_ratios(rms_nl)
    rms_ql, ratio_ql = (np.quantile(values_nl, QUANTILES, axis=0) for values_nl in (rms_nl, ratio_nl))
    parts = [np.median(part_nl, axis=0) for part_nl in np.array_split(ratio_nl, min(RUN_PARTS, len(ratio_nl)))]
    return tuple(
        LayerStatistics(
            layer=str(layer),
            rms_p01=float(rms_ql[LOW, place]),
            rms_p50=float(rms_ql[MIDDLE, place]),
            rms_p99=float(rms_ql[HIGH, place]),
            rms_quantiles=_plain(rms_ql[:, place]),
            ratio_quantiles=_plain(ratio_ql[:, place]),
            ratio_over_run=tuple(float(median_l[place]) for median_l in parts),
        )
        for place, layer in enumerate(layers)
    )


def size_ratios(rms_nl: Doubles) -> Doubles:
    """Each layer's size divided by the geometric mean of the sizes of its sample's layers, [N, L]."""
    log_nl = np.log(np.maximum(rms_nl, 1e-30))
    return np.exp(log_nl - log_nl.mean(axis=1, keepdims=True))


def _plain(values_q: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values_q)
