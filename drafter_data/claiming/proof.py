"""Proof by content: the reply's top log-probabilities against the same rows of lm_head times the dump's final state.

log p_i - log p_0 = (lm_head[i] - lm_head[0]) . norm(h): the normaliser of the softmax drops out of differences, so eight rows of
lm_head suffice. Tensor legend: K returned tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import FinalNorm
from drafter_data.checkpoints import Checkpoint

TOP_LOGPROBS = 8
MIN_PAIRS = 3
TOLERANCE = {"F32": 2e-3, "F16": 3e-2, "BF16": 2.5e-1}
"""Largest difference of log-probability differences (nats). Seen on a real SGLang in fp32: own 2.4e-7, best wrong pair 0.29; a bf16
engine rounds logits of magnitude 8..16 to steps of 1/16."""


class LogprobProof:
    """Tells whether a final state produced a reply. Reads single rows of lm_head from the mapped checkpoint."""

    def __init__(self, checkpoint: Checkpoint, final_norm: FinalNorm, dtype: str) -> None:
        self._rows = checkpoint.lm_head_rows()
        self._vocab_size = checkpoint.vocab_size
        self._norm = checkpoint.final_norm() if final_norm == "pre" else None
        self.tolerance = TOLERANCE[dtype]

    def error(self, final_h: NDArray[np.float32], top_logprobs: Sequence[tuple[int, float]]) -> float | None:
        """Largest deviation in nats over the returned tokens; None when the reply has too few usable ones to tell."""
        finite = [(token, value) for token, value in top_logprobs if math.isfinite(value) and 0 <= token < self._vocab_size]
        if len(finite) < MIN_PAIRS:
            return None
        ids = [token for token, _ in finite]
        logprobs_k = np.array([value for _, value in finite])
        normed_h = final_h if self._norm is None else self._norm(final_h[None])[0]
        logits_k = self._rows(ids).astype(np.float64) @ normed_h.astype(np.float64)
        return float(np.abs((logprobs_k - logprobs_k[0]) - (logits_k - logits_k[0])).max())
