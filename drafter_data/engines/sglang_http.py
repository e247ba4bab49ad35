"""SGLang HTTP API, as far as extraction uses it. No retries here: an attempt that may have arrived needs a new request id.

Source: SGLang 0.5.23, `/generate`, `/server_info`, `/ready`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
import orjson
from urllib3.exceptions import HTTPError, LocationParseError, ProtocolError, ReadTimeoutError
from urllib3.response import BaseHTTPResponse
from urllib3.util import Timeout, Url, make_headers, parse_url

from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.engines.interruptible import OpenSockets
from drafter_data.errors import EngineLost, PreflightRefused, RequestRefused, SampleError

MAX_REPLY_BYTES = 8 << 20
MOST_LOGPROBS = 64
CONNECT_SECONDS = 5.0
TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_NONE: Mapping[str, str] = {}


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
    """One base URL that speaks JSON over connections that are kept alive.

    urllib3 and not requests, which is built on it: at thousands of short requests the client's CPU is the engine's, where they
    share a host.
    """

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        found = _parsed(url.rstrip("/"))
        self.url = found._replace(auth=None).url
        """Without the password that it may have held: it stands in messages and records."""
        self._timeout = timeout_seconds
        self._sockets = OpenSockets()
        self._pool, self._prefix = self._sockets.pool(found), found.path or ""
        # No compression: a few bytes could become gigabytes.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if found.auth:
            self._headers |= make_headers(basic_auth=unquote(found.auth))

    def interrupt(self) -> None:
        """Breaks off all requests, now and in future: they raise EngineUnreachable at once."""
        self._sockets.interrupt()

    def _open(
        self, method: str, path: str, body: bytes | None, timeout_seconds: tuple[float, float], headers: Mapping[str, str] = _NONE
    ) -> BaseHTTPResponse:
        """Sends a request; the answer's body is yet to be read. `timeout_seconds`: to connect, to wait. Raises HTTPError."""
        connect, read = timeout_seconds
        return self._pool.urlopen(
            method,
            self._prefix + path,
            body=body,
            headers={**self._headers, **headers},
            timeout=Timeout(connect=connect, read=read),
            retries=False,
            redirect=False,
            preload_content=False,
        )

    def _answers(self, path: str, timeout_seconds: tuple[float, float]) -> bool:
        """Whether a GET is answered with 200."""
        try:
            with self._open("GET", path, None, timeout_seconds) as response:
                return response.status == 200
        except HTTPError:
            return False

    def _json(
        self,
        method: str,
        path: str,
        body: bytes | None,
        label: str,
        *,
        timeout_seconds: float | None = None,
        headers: Mapping[str, str] = _NONE,
    ) -> dict[str, Any]:
        """One request; the answer's JSON object. Raises EngineUnreachable, EngineBusy or RequestRefused."""
        seconds = timeout_seconds or self._timeout
        try:
            with self._open(method, path, body, (CONNECT_SECONDS, seconds), headers) as response:
                text = self._bounded(response, time.monotonic() + seconds)
                status = response.status
        except HTTPError as error:
            raise _unreachable(error)(f"{label}: no answer from {self.url} ({type(error).__name__})") from error
        if status in TRANSIENT_STATUSES:
            raise EngineBusy(f"{label}: {self.url} answered {status}: {_message(text)}")
        if status >= 300:  # no redirect is followed: it may lead anywhere
            raise RequestRefused(f"{label}: {self.url} answered {status}: {_message(text)}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineBusy(f"{label}: {self.url} answered no JSON: {_message(text)}", reason="bad-reply") from error
        if not isinstance(found, dict):
            raise EngineBusy(f"{label}: {self.url} answered {type(found).__name__}, expected an object", reason="bad-reply")
        return found

    def _bounded(self, response: BaseHTTPResponse, deadline: float) -> bytes:
        """The body as it comes, up to a bound of bytes and time: a server must neither fill our memory nor drip for ever."""
        parts, size = list[bytes](), 0
        try:
            while part := response.read1(1 << 16, decode_content=False):
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    raise EngineBusy(f"{self.url} answered more than {MAX_REPLY_BYTES} bytes", reason="bad-reply")
                if time.monotonic() > deadline:
                    raise EngineSilent(f"{self.url} did not end its answer in time")
                parts.append(part)
        except TimeoutError as error:
            raise EngineSilent(f"{self.url} did not end its answer in time") from error
        except (HTTPError, OSError) as error:
            kind = EngineSilent if isinstance(error, ReadTimeoutError) else EngineBroke
            raise kind(f"{self.url} broke off its answer ({type(error).__name__})") from error
        return b"".join(parts)


class SGLangClient(JsonClient):
    """SGLang's API."""

    def __init__(self, url: str, *, timeout_seconds: float, top_logprobs: int) -> None:
        super().__init__(url, timeout_seconds=timeout_seconds)
        self._top_logprobs = top_logprobs

    def generate(self, request: PrefillRequest) -> PrefillReply:
        """Prefills one prompt. Raises RequestRefused (4xx), EngineBusy (5xx) or EngineUnreachable."""
        body: dict[str, Any] = {
            "input_ids": request.token_ids_s,
            "rid": request.request_id,
            "extra_key": request.request_id,  # a prefix cache of its own: no row may come from another request
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        if self._top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": self._top_logprobs, "logprob_start_len": -1}
        sent_at, start = time.time(), time.monotonic()
        reply = self._json("POST", "/generate", encoded(body), f"request {request.request_id} ({request.tokens} tokens)")
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
        return self._answers("/ready", (2.0, 5.0))

    def works(self) -> bool:
        """Whether the server answers `/health_generate`, which runs a forward pass of its own."""
        return self._answers("/health_generate", (2.0, 20.0))


def _parsed(url: str) -> Url:
    try:
        found = parse_url(url)
    except LocationParseError:
        found = Url()
    if found.scheme not in ("http", "https") or not found.host or found.query is not None or found.fragment is not None:
        # What stands before an @ may hold a password, and so may a query, also where the rest is no URL.
        shown = re.split("[?#]", re.sub(r"^([A-Za-z]+://)?.*@", r"\1", url))[0]
        raise PreflightRefused(f"{shown!r} is no engine's URL; expected http://HOST:PORT", reason="engine-not-there")
    return found


def _unreachable(error: HTTPError) -> type[EngineUnreachable]:
    if isinstance(error, ReadTimeoutError):
        return EngineSilent
    return EngineBroke if isinstance(error, ProtocolError) else EngineUnreachable


def encoded(body: Mapping[str, Any]) -> bytes:
    """JSON, in which arrays of numbers are lists."""
    return orjson.dumps(body, np.ndarray.tolist, orjson.OPT_SERIALIZE_NUMPY)  # it takes C-contiguous arrays alone


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
