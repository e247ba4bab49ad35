"""What computes a pass: a real model, or (timed.py) nothing but the time it would take.

Each request is computed alone and whole at its first pass, whatever the scheduler put beside it and wherever it cut it, so that one
prompt always gives the same bits; later chunks only hand out their rows.

Tensor legend: S rows, L stored layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import FinalNorm, StateDtype
from drafter_data.embedded.llama import Array, Llama
from drafter_data.embedded.request import GenerateRequest, TopLogprobs
from drafter_data.embedded.rows import ArrayRows, StateRows, to_storage

_LOGIT_ROWS = 256


class Backend(Protocol):
    """The scheduler's view of a model. All calls come from one thread."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    dtype: StateDtype
    layers: tuple[int, ...]

    def prefill(self, request: GenerateRequest, start: int, end: int) -> StateRows: ...

    def decode(self, request: GenerateRequest) -> StateRows: ...

    def next_token(self, request: GenerateRequest) -> None:
        """Appends the next token, and its log-probabilities where asked for, to the request."""
        ...

    def finish_pass(self, started: float, tokens: int, stop: threading.Event) -> None:
        """Called when the rows of a pass are dumped, before its requests are answered. `started` is `time.monotonic()`."""
        ...

    def is_end(self, token: int) -> bool: ...


class LlamaBackend:
    """Computes with `llama.py`."""

    def __init__(self, model: Llama, layers: tuple[int, ...], final_norm: FinalNorm) -> None:
        config = model.config
        self.vocab_size, self.hidden_size, self.num_layers = config.vocab_size, config.hidden_size, config.num_layers
        self.context_length, self.layers = config.max_positions, layers
        self.dtype: StateDtype = config.dtype
        self._model = model
        self._final_norm = final_norm

    def prefill(self, request: GenerateRequest, start: int, end: int) -> StateRows:
        """Rows `start..end`; computes the whole prompt when `start` is 0."""
        if start == 0:
            decodes = request.max_new_tokens > 1
            request.cache = self._model.cache(request.tokens + request.max_new_tokens) if decodes else None
            request.states = self._model.forward(request.token_ids_s, self.layers, request.cache)
        states_slh = request.states
        if end == request.tokens:
            self._record_input_logprobs(request, states_slh[:, -1])
        return self._rows(request.token_ids_s[start:end], states_slh[start:end])

    def decode(self, request: GenerateRequest) -> StateRows:
        """The row of the newest output token, which takes its place in the cache."""
        token_ids_s = np.array(request.output_ids[-1:], dtype=np.int64)
        request.states = self._model.forward(token_ids_s, self.layers, request.cache)
        return self._rows(token_ids_s, request.states)

    def next_token(self, request: GenerateRequest) -> None:
        """Greedy at temperature 0, else drawn with a generator seeded by the prompt and `sampling_seed`."""
        logits_v = self._model.logits(request.states[-1:, -1])[0]
        token = sample(logits_v, request)
        request.output_ids.append(token)
        if request.return_logprob:
            logprobs_v = log_softmax(logits_v[None])[0]
            request.output_logprobs.append(float(logprobs_v[token]))
            request.output_top_logprobs.append(top_of(logprobs_v, request.top_logprobs_num))

    def finish_pass(self, started: float, tokens: int, stop: threading.Event) -> None:
        """A computed pass takes the time it takes."""

    def is_end(self, token: int) -> bool:
        """Whether the model's configuration names the token as its end of text."""
        return token in self._model.config.eos_ids

    def states(self, token_ids_s: NDArray[np.int64], layers: tuple[int, ...], *, normed: bool = False) -> NDArray[Any]:
        """States [S, L, H] of any prompt in storage form; `normed`: the last column behind the final norm."""
        states_slh = self._model.forward(token_ids_s, layers)
        if normed:
            states_slh[:, -1] = self._model.final_norm(states_slh[:, -1])
        return to_storage(states_slh, self.dtype)

    def _rows(self, token_ids_s: NDArray[np.int64], states_slh: Array) -> ArrayRows:
        if self._final_norm == "post":
            states_slh = states_slh.copy()
            states_slh[:, -1] = self._model.final_norm(states_slh[:, -1])
        return ArrayRows(token_ids_s, to_storage(states_slh, self.dtype))

    def _record_input_logprobs(self, request: GenerateRequest, final_sh: Array) -> None:
        """Log-probabilities of the prompt's own tokens after the first one asked for, in blocks so that [S, V] never exists."""
        if not request.return_logprob or request.logprob_start < 0:
            return
        for start in range(request.logprob_start, request.tokens - 1, _LOGIT_ROWS):
            end = min(start + _LOGIT_ROWS, request.tokens - 1)
            logprobs_sv = log_softmax(self._model.logits(final_sh[start:end]))
            following = request.token_ids_s[start + 1 : end + 1]
            request.input_logprobs += logprobs_sv[np.arange(end - start), following].tolist()
            if request.top_logprobs_num:
                request.input_top_logprobs += [top_of(row_v, request.top_logprobs_num) for row_v in logprobs_sv]


def log_softmax(logits_sv: Array) -> Array:
    """Log-probabilities [S, V]."""
    shifted_sv = logits_sv - logits_sv.max(axis=-1, keepdims=True)
    return shifted_sv - np.log(np.exp(shifted_sv).sum(axis=-1, keepdims=True))


def top_of(logprobs_v: Array, count: int) -> TopLogprobs:
    """The `count` likeliest tokens, ties in id order."""
    if count == 0:
        return []
    order = np.argsort(-logprobs_v, kind="stable")[:count]
    return [(float(logprobs_v[token]), int(token)) for token in order]


def sample(logits_v: Array, request: GenerateRequest) -> int:
    """The next token at the request's temperature."""
    if request.temperature == 0:
        return int(logits_v.argmax())
    if request.rng is None:
        request.rng = np.random.default_rng([request.seed, *request.token_ids_s.tolist()])
    noise_v = request.rng.gumbel(size=len(logits_v))
    return int((logits_v / request.temperature + noise_v).argmax())
