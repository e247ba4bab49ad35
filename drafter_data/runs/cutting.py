"""Cutting rows that are too long."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

SPREAD_TOKENS: Final = 256


def cut_length(ids_s: NDArray[np.int32], limit: int) -> int:
    """Tokens that stay of a row longer than `limit`: the limit minus (hash of its ids modulo 256), at least one.

    Cut rows that all shared one length could not be told apart by their token count. Below a limit of 512 the spread is
    half the limit.
    """
    spread = min(SPREAD_TOKENS, max(1, limit // 2))
    return limit - xxhash.xxh3_64_intdigest(ids_s.astype("<u4", copy=False).tobytes()) % spread
