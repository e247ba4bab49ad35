"""A /generate request: read from JSON, checked, and carried through the scheduler.

Field names are SGLang's. Tensor legend: S prompt tokens, H hidden size.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from drafter_data.embedded.llama import KeyValueCache
from drafter_data.errors import RequestRefused

MAX_TOP_LOGPROBS = 1024
TopLogprobs = list[tuple[float, int]]
"""(log-probability, token id), the likeliest first."""


class BadRequest(RequestRefused):
    """An answer of 4xx: `status` and one clear line."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class GenerateRequest:
    """One request on its way. Only the scheduler's thread changes it, until `done` is set."""

    rid: str
    token_ids_s: NDArray[np.int64]
    max_new_tokens: int = 128
    temperature: float = 1.0
    ignore_eos: bool = False
    seed: int = 0
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start: int = -1
    arrived_at: float = field(default_factory=time.time)
    prefilled: int = 0
    output_ids: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    input_logprobs: list[float] = field(default_factory=list[float])
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    acknowledgement: dict[str, Any] | None = None
    finish_reason: dict[str, Any] | None = None
    error: str = ""
    aborted: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    states: Any = None
    cache: KeyValueCache | None = None
    rng: np.random.Generator | None = None

    @property
    def tokens(self) -> int:
        """Prompt length."""
        return len(self.token_ids_s)

    def reply(self) -> dict[str, Any]:
        """SGLang's reply form; `drafter_data` carries the acknowledgement of the last pass's dump."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.tokens,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": 0,
            "num_retractions": 0,
            "dp_rank": None,
            "weight_version": "default",
            "e2e_latency": time.time() - self.arrived_at,
        }
        if self.return_logprob:
            meta |= self._logprobs()
        if self.acknowledgement is not None:
            meta["drafter_data"] = self.acknowledgement
        return {"text": "", "output_ids": self.output_ids, "meta_info": meta}

    def _logprobs(self) -> dict[str, Any]:
        start = self.logprob_start if self.logprob_start >= 0 else self.tokens
        ids = self.token_ids_s[start:].tolist()
        input_logprobs = ([None, *self.input_logprobs] if ids else [])[: len(ids)]
        meta: dict[str, Any] = {
            "input_token_logprobs": [[value, token, None] for value, token in zip(input_logprobs, ids, strict=True)],
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(self.output_logprobs, self.output_ids, strict=True)
            ],
        }
        if self.top_logprobs_num:
            meta["input_top_logprobs"] = ([None, *map(_triples, self.input_top_logprobs)] if ids else [])[: len(ids)]
            meta["output_top_logprobs"] = [_triples(top) for top in self.output_top_logprobs]
        return meta


def parse_generate(body: bytes, *, vocab_size: int, max_input_tokens: int, context_length: int) -> GenerateRequest:
    """Reads a /generate body. Raises BadRequest for everything that is not a request for one prompt of token ids."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(payload, dict):
        raise BadRequest(f"expected a JSON object, found {type(payload).__name__}")
    fields = cast("dict[str, Any]", payload)
    if fields.get("stream"):
        raise BadRequest("stream is not supported by the embedded engine")
    token_ids_s = _token_ids(fields, vocab_size, max_input_tokens)
    sampling = fields.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params: expected an object")
    sampling = cast("dict[str, Any]", sampling)
    rid = fields.get("rid") or secrets.token_hex(16)
    if not isinstance(rid, str) or len(rid) > 1024:
        raise BadRequest("rid: expected a string of at most 1024 characters")
    if not isinstance(fields.get("extra_key"), (str, type(None))):
        raise BadRequest("extra_key: expected a string")
    new_tokens = _integer(sampling, "max_new_tokens", 128, 0, 1 << 40)
    return GenerateRequest(
        rid=rid,
        token_ids_s=token_ids_s,
        max_new_tokens=min(new_tokens, max(0, context_length - len(token_ids_s))) if new_tokens > 1 else new_tokens,
        temperature=_number(sampling, "temperature", 1.0),
        ignore_eos=bool(sampling.get("ignore_eos", False)),
        seed=_integer(sampling, "sampling_seed", 0, 0, 1 << 62),
        return_logprob=bool(fields.get("return_logprob", False)),
        top_logprobs_num=_integer(fields, "top_logprobs_num", 0, 0, min(MAX_TOP_LOGPROBS, vocab_size)),
        logprob_start=_integer(fields, "logprob_start_len", -1, -1, len(token_ids_s)),
    )


def _token_ids(fields: dict[str, Any], vocab_size: int, max_input_tokens: int) -> NDArray[np.int64]:
    ids = fields.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids: expected a non-empty list of token ids (text and batches are not supported)")
    ids = cast("list[Any]", ids)
    if len(ids) > max_input_tokens:
        raise BadRequest(f"the input ({len(ids)} tokens) is longer than the model's limit ({max_input_tokens} tokens)")
    if any(type(token) is not int for token in ids):  # bool is an int to isinstance
        raise BadRequest("input_ids: expected integers only, for one prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequest(
            f"input_ids: {next(i for i in ids if not 0 <= i < vocab_size)} is outside the vocabulary 0..{vocab_size - 1}"
        )
    return np.array(ids, dtype=np.int64)


def _integer(fields: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name}: expected an integer in {low}..{high}, found {str(value)[:40]}")
    return value


def _number(fields: dict[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 <= value < 1e6:
        raise BadRequest(f"{name}: expected a number from 0, found {str(value)[:40]}")
    return float(value)


def _triples(top: TopLogprobs) -> list[list[Any]]:
    return [[value, token, None] for value, token in top]
