"""The timed backend: passes that take a set time and dumps of a set size, without a model. For benchmarks.

A row is a window into one block of random numbers; where it starts follows from the token id and its position. So rows are finite,
non-zero, distinct a layer, a function of the prompt, and cost no arithmetic: they are written straight from the block.

Tensor legend: S rows, L stored layers, H hidden size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StateDtype
from drafter_data.embedded.request import GenerateRequest
from drafter_data.embedded.rows import StateRows, to_storage
from drafter_data.embedded.settings import ServerSettings

_OFFSETS = 1 << 16
_VOCABULARY = 200_000


@dataclass(frozen=True)
class WindowRows:
    """Rows as windows into the block, in bytes."""

    token_ids_s: NDArray[np.int64]
    starts_s: NDArray[np.int64]
    block: memoryview
    row_bytes: int
    layers: int

    def interleaved(self) -> Sequence[memoryview]:
        return [self.block[start : start + self.row_bytes] for start in self.starts_s.tolist()]

    def of_layer(self, column: int) -> Sequence[memoryview]:
        size = self.row_bytes // self.layers
        return [self.block[start : start + size] for start in (self.starts_s + column * size).tolist()]


class TimedBackend:
    """Takes base + tokens x rate a pass (`ServerSettings.timed_*`); writing the dumps is part of that time."""

    def __init__(self, settings: ServerSettings) -> None:
        self.vocab_size, self.hidden_size, self.num_layers = _VOCABULARY, settings.hidden_size, settings.num_layers
        self.context_length = settings.context_length
        self.dtype: StateDtype = "BF16" if settings.dtype == "bf16" else "F32"
        self.layers = settings.layers_for(settings.num_layers)
        self._base_seconds = settings.timed_base_ms / 1e3
        self._seconds_per_token = settings.timed_us_per_token / 1e6
        values = np.random.default_rng(0).standard_normal(len(self.layers) * self.hidden_size + _OFFSETS, dtype=np.float32)
        # A row of nothing but tiny values would round to zero in bf16; at least one in 64 of these does not.
        values[::64] = 1.0
        stored = to_storage(values, self.dtype)
        self._itemsize = stored.itemsize
        self._block = memoryview(stored.tobytes())

    def prefill(self, request: GenerateRequest, start: int, end: int) -> StateRows:
        """Rows `start..end`."""
        return self._rows(request.token_ids_s[start:end], start)

    def decode(self, request: GenerateRequest) -> StateRows:
        """The row of the newest output token."""
        return self._rows(np.array(request.output_ids[-1:], dtype=np.int64), request.tokens + len(request.output_ids) - 1)

    def next_token(self, request: GenerateRequest) -> None:
        """Some token; log-probabilities that look like some."""
        request.output_ids.append(int(request.token_ids_s.sum() + len(request.output_ids)) % self.vocab_size)
        if request.return_logprob:
            request.output_logprobs.append(-1.0)
            request.output_top_logprobs.append([(-1.0 - rank, rank) for rank in range(request.top_logprobs_num)])

    def finish_pass(self, started: float, tokens: int, stop: threading.Event) -> None:
        """Waits for what is left of the pass's time."""
        stop.wait(max(0.0, started + self._base_seconds + tokens * self._seconds_per_token - time.monotonic()))

    def is_end(self, token: int) -> bool:
        """Text never ends by itself."""
        del token
        return False

    def _rows(self, token_ids_s: NDArray[np.int64], first_position: int) -> WindowRows:
        positions_s = np.arange(first_position, first_position + len(token_ids_s))
        starts_s = (token_ids_s * 40_503 + positions_s * 7_919) % _OFFSETS * self._itemsize
        row_bytes = len(self.layers) * self.hidden_size * self._itemsize
        return WindowRows(token_ids_s, starts_s, self._block, row_bytes, len(self.layers))
