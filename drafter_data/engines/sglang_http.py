"""SGLang HTTP API, as far as extraction uses it. No retries here: an attempt that may have arrived needs a new request id.

Source: SGLang 0.5.23, `/generate`, `/server_info`, `/ready`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import requests
from urllib3.exceptions import HTTPError, NewConnectionError, ReadTimeoutError

from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.engines.interruptible import OpenSockets
from drafter_data.errors import EngineLost, PreflightRefused, RequestRefused, SampleError

MAX_REPLY_BYTES = 8 << 20
MOST_LOGPROBS = 64
TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class EngineBusy(SampleError):
    """The engine answered 5xx (or 408, 429): the request may be sent again."""

    reason = "engine-busy"


class EngineUnreachable(EngineLost):
    """No answer: refused, reset or timed out. Whether the engine is dead, hung or busy is for the caller to find out."""

    reason = "engine-unreachable"


class EngineSilent(EngineUnreachable):
    """The request was taken and not answered in time."""

    reason = "engine-silent"


class EngineBroke(EngineUnreachable):
    """The connection broke in mid-request."""

    reason = "engine-broke"


class JsonClient:
    """One base URL that speaks JSON; a connection a thread, kept alive."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        self._timeout = (5.0, timeout_seconds)
        self._local = threading.local()
        self._sockets = OpenSockets()

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = self._sockets.session()
        return session

    def interrupt(self) -> None:
        """Breaks off all requests, now and in future: they raise EngineUnreachable at once."""
        self._sockets.interrupt()

    def _json(
        self,
        method: str,
        path: str,
        body: bytes | None,
        label: str,
        *,
        timeout_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One request; the answer's JSON object. Raises EngineUnreachable, EngineBusy or RequestRefused."""
        timeout = self._timeout if timeout_seconds is None else (self._timeout[0], timeout_seconds)
        # No compression: a few bytes could become gigabytes.
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        try:
            with self._session().request(
                method, self.url + path, data=body, timeout=timeout, stream=True, headers=sent
            ) as response:
                text = _bounded(response, time.monotonic() + timeout[1])
                status = response.status_code
        except requests.RequestException as error:
            raise _unreachable(error)(f"{label}: no answer from {self.url} ({type(error).__name__})") from error
        if status in TRANSIENT_STATUSES:
            raise EngineBusy(f"{label}: {self.url} answered {status}: {_message(text)}")
        if status >= 400:
            raise RequestRefused(f"{label}: {self.url} answered {status}: {_message(text)}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineBusy(f"{label}: {self.url} answered no JSON: {_message(text)}", reason="bad-reply") from error
        if not isinstance(found, dict):
            raise EngineBusy(f"{label}: {self.url} answered {type(found).__name__}, expected an object", reason="bad-reply")
        return found


class SGLangClient(JsonClient):
    """SGLang's API."""

    def __init__(self, url: str, *, timeout_seconds: float, top_logprobs: int) -> None:
        super().__init__(url, timeout_seconds=timeout_seconds)
        self._top_logprobs = top_logprobs

    def generate(self, request: PrefillRequest) -> PrefillReply:
        """Prefills one prompt. Raises RequestRefused (4xx), EngineBusy (5xx) or EngineUnreachable."""
        body: dict[str, Any] = {
            "input_ids": request.token_ids_s.tolist(),
            "rid": request.request_id,
            "extra_key": request.request_id,  # a prefix cache of its own: no row may come from another request
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        if self._top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": self._top_logprobs, "logprob_start_len": -1}
        sent_at, start = time.time(), time.monotonic()
        reply = self._json(
            "POST", "/generate", json.dumps(body).encode(), f"request {request.request_id} ({request.tokens} tokens)"
        )
        meta = reply.get("meta_info")
        if not isinstance(meta, dict):
            raise EngineBusy(
                f"request {request.request_id}: the reply has no meta_info; is {self.url} an SGLang server?", reason="bad-reply"
            )
        return PrefillReply(
            request_id=request.request_id,
            prompt_tokens=_integer(meta.get("prompt_tokens")),
            cached_tokens=_integer(meta.get("cached_tokens")),
            sent_at=sent_at,
            seconds=time.monotonic() - start,
            top_logprobs=_top_logprobs(meta),
            meta=meta,
        )

    def server_info(self) -> dict[str, Any]:
        """`/server_info`. Raises PreflightRefused when nothing answers there."""
        try:
            return self._json("GET", "/server_info", None, "/server_info", timeout_seconds=10.0)
        except (EngineUnreachable, EngineBusy, RequestRefused) as error:
            raise PreflightRefused(
                f"no engine at {self.url}: {error}; start it (`drafter-data engine --help`) or name the right URL",
                reason="engine-not-there",
            ) from error

    def ready(self) -> bool:
        """Whether the server answers `/ready`, which runs no forward pass."""
        try:
            return self._session().get(f"{self.url}/ready", timeout=(2.0, 5.0)).status_code == 200
        except requests.RequestException:
            return False

    def works(self) -> bool:
        """Whether the server answers `/health_generate`, which runs a forward pass of its own."""
        try:
            return self._session().get(f"{self.url}/health_generate", timeout=(2.0, 20.0)).status_code == 200
        except requests.RequestException:
            return False


def _unreachable(error: requests.RequestException) -> type[EngineUnreachable]:
    if isinstance(error, (requests.ConnectTimeout, requests.exceptions.SSLError)):
        return EngineUnreachable
    if isinstance(error, requests.Timeout):
        return EngineSilent
    cause = error.args[0] if error.args else None
    never_connected = isinstance(getattr(cause, "reason", None), NewConnectionError)
    return EngineUnreachable if never_connected or not isinstance(error, requests.ConnectionError) else EngineBroke


def _bounded(response: requests.Response, deadline: float) -> bytes:
    """The body as it comes, up to a bound of bytes and time: a server must neither fill our memory nor drip for ever."""
    parts, size = list[bytes](), 0
    try:
        while part := response.raw.read1(1 << 16, decode_content=False):
            size += len(part)
            if size > MAX_REPLY_BYTES:
                raise EngineBusy(f"{response.url} answered more than {MAX_REPLY_BYTES} bytes", reason="bad-reply")
            if time.monotonic() > deadline:
                raise EngineSilent(f"{response.url} did not end its answer in time")
            parts.append(part)
    except TimeoutError as error:
        raise EngineSilent(f"{response.url} did not end its answer in time") from error
    except (HTTPError, OSError) as error:
        kind = EngineSilent if isinstance(error, ReadTimeoutError) else EngineBroke
        raise kind(f"{response.url} broke off its answer ({type(error).__name__})") from error
    return b"".join(parts)


def _message(text: bytes) -> str:
    try:
        found = json.loads(text)
        message = found["error"]["message"] if isinstance(found.get("error"), dict) else found.get("error") or found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = text.decode(errors="replace")
    return " ".join(str(message).split())[:300]


def _integer(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 40 else 0


def _top_logprobs(meta: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """(token id, log-probability) of the last position: SGLang gives [[logprob, id, text], …] for each new token."""
    try:
        return tuple((int(entry[1]), float(entry[0])) for entry in meta["output_top_logprobs"][0][:MOST_LOGPROBS])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return ()
