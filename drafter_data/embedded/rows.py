"""Rows of states on their way into a dump, as buffers that are written without another copy.

Tensor legend: S rows, L stored layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StateDtype


class StateRows(Protocol):
    """Rows of one request in one pass. `token_ids_s` are theirs; `interleaved` is [S, L, H], `of_layer` one column [S, H]."""

    @property
    def token_ids_s(self) -> NDArray[np.int64]: ...

    def interleaved(self) -> Sequence[memoryview]: ...

    def of_layer(self, column: int) -> Sequence[memoryview]: ...


@dataclass(frozen=True)
class ArrayRows:
    """Rows that were computed, in storage form."""

    token_ids_s: NDArray[np.int64]
    states_slh: NDArray[Any]

    def interleaved(self) -> Sequence[memoryview]:
        return [np.ascontiguousarray(self.states_slh).data]

    def of_layer(self, column: int) -> Sequence[memoryview]:
        return [np.ascontiguousarray(self.states_slh[:, column]).data]


def to_storage(states: NDArray[np.float32], dtype: StateDtype) -> NDArray[Any]:
    """float32 states in storage form; bfloat16 is rounded to nearest even, as torch rounds, and held as uint16 bits."""
    if dtype == "F32":
        return states
    if dtype == "F16":
        return states.astype(np.float16)
    bits = states.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
