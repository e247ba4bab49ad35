"""vLLM's HTTP API, as far as extraction uses it. No retries here: an attempt that may have been received needs a new request id.

Source: vLLM 0.32, `/v1/completions`, `/v1/models`, `/version`, `/health`.
"""

from __future__ import annotations

import time
from typing import Any

from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.engines.sglang_http import EngineBusy, EngineUnreachable, JsonClient, encoded
from drafter_data.errors import PreflightRefused, RequestRefused

ID_LABEL = "token_id:"


class VllmClient(JsonClient):
    """vLLM's API."""

    def __init__(self, url: str, *, timeout_seconds: float, top_logprobs: int) -> None:
        super().__init__(url, timeout_seconds=timeout_seconds)
        self._top_logprobs = top_logprobs
        self._model = ""

    def served_model(self) -> dict[str, Any]:
        """The served model's entry of `/v1/models`: `id`, `root` (its folder), `max_model_len`. Raises PreflightRefused."""
        try:
            found = self._json("GET", "/v1/models", None, "/v1/models", timeout_seconds=10.0)
        except (EngineUnreachable, EngineBusy, RequestRefused) as error:
            raise PreflightRefused(
                f"no vLLM at {self.url}: {error}; start it (`drafter-data engine vllm --help`) or name the right URL",
                reason="engine-not-there",
            ) from error
        try:
            entry: dict[str, Any] = found["data"][0]
            self._model = str(entry["id"])
            int(entry["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PreflightRefused(
                f"{self.url}/v1/models names no model with its max_model_len; is it a vLLM server?", reason="engine-not-there"
            ) from error
        return entry

    def version(self) -> str:
        """vLLM's version."""
        try:
            return str(self._json("GET", "/version", None, "/version", timeout_seconds=10.0).get("version", ""))
        except (EngineUnreachable, EngineBusy, RequestRefused):
            return ""

    def complete(self, request: PrefillRequest) -> PrefillReply:
        """Prefills one prompt. Raises RequestRefused (4xx), EngineBusy (5xx) or EngineUnreachable."""
        body = {
            "model": self._model,
            "prompt": request.token_ids_s,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "logprobs": self._top_logprobs,
            "return_tokens_as_token_ids": True,
        }
        label = f"request {request.request_id} ({request.tokens} tokens)"
        sent_at, start = time.time(), time.monotonic()
        headers = {"X-Request-Id": request.request_id}
        reply = self._json("POST", "/v1/completions", encoded(body), label, headers=headers)
        try:
            choice = reply["choices"][0]
            prompt_tokens = len(choice["prompt_token_ids"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineBusy(f"{label}: the reply has no prompt_token_ids; is {self.url} vLLM?", reason="bad-reply") from error
        return PrefillReply(
            request_id=request.request_id,
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            sent_at=sent_at,
            seconds=time.monotonic() - start,
            top_logprobs=_top_logprobs(choice),
            meta={"kv_transfer_params": reply.get("kv_transfer_params")},
        )

    def healthy(self) -> bool:
        """Whether the server answers `/health`."""
        return self._answers("/health", (2.0, 5.0))


def _top_logprobs(choice: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """(token id, log-probability) of the last position: vLLM gives {"token_id:5": logprob, …} for each new token."""
    try:
        first: dict[str, float] = choice["logprobs"]["top_logprobs"][0]
        return tuple((int(name.removeprefix(ID_LABEL)), float(value)) for name, value in first.items())
    except (KeyError, IndexError, TypeError, ValueError):
        return ()
