"""A server that answers with malice: bounded in bytes and in time, and every answer has a reason."""

from __future__ import annotations

import base64
import json
import threading
import time
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from urllib3.util import parse_url

from drafter_data.claiming.folder import DumpFolder
from drafter_data.engines.base import EngineInfo, PrefillReply, PrefillRequest
from drafter_data.engines.interruptible import OpenSockets
from drafter_data.engines.sglang_http import MAX_REPLY_BYTES, EngineUnreachable, SGLangClient, encoded
from drafter_data.engines.vllm import VllmEngine
from drafter_data.engines.vllm_http import VllmClient
from drafter_data.errors import DrafterDataError, DumpRejected, PreflightRefused, RequestRefused, SampleError
from tests.faults.test_hostile_folder import IDENTITY

REQUEST = PrefillRequest("dd-aaaaaaaa-1", "k", np.arange(16, 22))


@contextmanager
def answering(answer: Any) -> Generator[str]:
    """A server whose handler is `answer(handler)`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            try:
                answer(self)
            except OSError:
                self.close_connection = True

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def body(data: bytes, **headers: str) -> Any:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 50))
    handler.end_headers()
    while True:
        handler.wfile.write(b"[" * (1 << 16))


def dripping(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 20))
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.1)


def bomb() -> bytes:
    import gzip

    return gzip.compress(b" " * (64 << 20))


META = {"prompt_tokens": 6, "cached_tokens": 0}
REFUSED = {
    "endless": endless,
    "deep nesting": body(b"[" * 1_000_000),
    "deep objects": body(b'{"a":' * 500_000 + b"1" + b"}" * 500_000),
    "not JSON": body(b"<html>"),
    "a list": body(b"[]"),
    "no meta_info": body(b"{}"),
    "meta_info is a list": body(b'{"meta_info": []}'),
    "bytes that are no text": body(b"\xff\xfe\x00"),
    "zip bomb": body(bomb(), Content_Encoding="gzip"),
    "number of a million digits": body(b'{"meta_info": {"prompt_tokens": ' + b"9" * 1_000_000 + b"}}"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_reply_that_is_hostile_is_a_bad_reply_in_bounded_memory(kind: str) -> None:
    with answering(REFUSED[kind]) as url:
        client = SGLangClient(url, timeout_seconds=20, top_logprobs=8)
        tracemalloc.start()
        try:
            with pytest.raises(SampleError) as caught:
                client.generate(REQUEST)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            client.interrupt()
    assert caught.value.reason == "bad-reply"
    assert len(str(caught.value)) < 600
    assert peak < 20 * MAX_REPLY_BYTES


def test_reply_that_drips_for_ever_ends_at_the_time_limit() -> None:
    with answering(dripping) as url:
        client = SGLangClient(url, timeout_seconds=0.5, top_logprobs=8)
        start = time.monotonic()
        with pytest.raises(EngineUnreachable) as caught:
            client.generate(REQUEST)
        assert time.monotonic() - start < 3
        assert caught.value.reason == "engine-silent"
        client.interrupt()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": "six", "cached_tokens": [], "output_top_logprobs": "x"},
        {"prompt_tokens": True, "output_top_logprobs": [[["a", {}, 3]]]},
        {"prompt_tokens": -5, "output_top_logprobs": [[[float("nan"), 10**30, None]]]},
        {"prompt_tokens": None, "output_top_logprobs": [[[float("inf")] * 3] * 9]},
        {"drafter_data": [[[{"error": 7}]]], "prompt_tokens": 6, "output_top_logprobs": {}},
    ],
)
def test_reply_of_wrong_types_is_no_token_count_and_no_proof(fields: dict[str, Any]) -> None:
    with answering(body(json.dumps({"meta_info": fields}).encode())) as url:
        client = SGLangClient(url, timeout_seconds=5, top_logprobs=8)
        try:
            reply = client.generate(REQUEST)
            assert type(reply.prompt_tokens) is int and type(reply.cached_tokens) is int
            assert all(type(token) is int and type(value) is float for token, value in reply.top_logprobs)
        except DrafterDataError as error:
            assert error.reason == "bad-reply"
        client.interrupt()


def test_redirect_is_not_followed() -> None:
    """It may lead anywhere, and a client that follows one repeats a POST as a GET."""
    reached = threading.Event()

    def elsewhere(handler: BaseHTTPRequestHandler) -> None:
        reached.set()
        body(b"{}")(handler)

    def redirecting(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(elsewhere) as target, answering(redirecting) as url:
        client = SGLangClient(url, timeout_seconds=5, top_logprobs=8)
        with pytest.raises(RequestRefused, match="answered 307"):
            client.generate(REQUEST)
        assert not client.ready()
        client.interrupt()
    assert not reached.is_set()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:30000", "ftp://127.0.0.1", "http://", "http://[::1", "", "engine", "http://127.0.0.1:1?key=x", "http://h/#x"],
)
def test_what_is_no_url_is_said_so(url: str) -> None:
    with pytest.raises(PreflightRefused, match="expected http://HOST:PORT"):
        SGLangClient(url, timeout_seconds=5, top_logprobs=8)


@pytest.mark.parametrize(
    "url",
    [
        "me:secret@host:30000", "http://me:secret@host:99999", "http://me:se/cret@host:1", "http://me:p?secret@h:1",
        "http://me:p#secret@h:1", "http://me:secret@ho st:1", "http://me:secret@[::1", "https://h/?api_key=secret",
    ],
)  # fmt: skip
def test_what_is_no_url_is_said_so_without_its_password(url: str) -> None:
    with pytest.raises(PreflightRefused, match="expected http://HOST:PORT") as refused:
        SGLangClient(url, timeout_seconds=5, top_logprobs=8)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(("url", "port"), [("http://[::1]", 80), ("https://[::1]/x", 443), ("http://[::1]:30000", 30000)])
def test_address_of_ipv6_has_its_port(url: str, port: int) -> None:
    """http.client would take what follows its last colon for one."""
    connection = OpenSockets().pool(parse_url(url))._new_conn()
    assert (connection.host, connection.port) == ("::1", port)


def test_password_in_the_url_is_sent() -> None:
    """A proxy before the engine may ask for one."""
    found = list[str | None]()

    def asking(handler: BaseHTTPRequestHandler) -> None:
        found.append(handler.headers["Authorization"])
        body(b"{}")(handler)

    with answering(asking) as url:
        client = SGLangClient(url.replace("//", "//me:p%40ss@"), timeout_seconds=5, top_logprobs=8)
        assert client.ready()
        client.interrupt()
        with pytest.raises(EngineUnreachable) as told:
            client.generate(REQUEST)
    assert found == ["Basic " + base64.b64encode(b"me:p@ss").decode()]
    assert url in str(told.value), "messages and records name the engine"
    assert "p%40ss" not in str(told.value)


def test_path_in_the_url_is_a_prefix() -> None:
    paths = list[str]()

    def routed(handler: BaseHTTPRequestHandler) -> None:
        paths.append(handler.path)
        body(json.dumps({"meta_info": META}).encode())(handler)

    with answering(routed) as url:
        client = SGLangClient(f"{url}/engines/3/", timeout_seconds=5, top_logprobs=8)
        assert client.ready()
        assert client.generate(REQUEST).prompt_tokens == 6
        client.interrupt()
    assert paths == ["/engines/3/ready", "/engines/3/generate"]


def test_prompt_ids_that_lie_apart_in_memory_are_sent_as_they_are() -> None:
    ids_s = np.arange(100, 112, dtype=np.int64)[::2]
    assert json.loads(encoded({"input_ids": ids_s})) == {"input_ids": [100, 102, 104, 106, 108, 110]}


def test_interrupt_ends_a_request_that_nobody_answers_at_once() -> None:
    held = threading.Event()

    def silent(_: BaseHTTPRequestHandler) -> None:
        held.wait(30)

    with answering(silent) as url:
        client = SGLangClient(url, timeout_seconds=600, top_logprobs=8)
        threading.Timer(0.3, client.interrupt).start()
        start = time.monotonic()
        with pytest.raises(EngineUnreachable):
            client.generate(REQUEST)
        assert time.monotonic() - start < 3
        with pytest.raises(EngineUnreachable):
            client.generate(REQUEST)  # and no later one waits
        assert time.monotonic() - start < 3
        held.set()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "{dumps}/../outside/x", "{dumps}/a/../../x", "{dumps}/..", "{dumps}/", 7, None, ["x"]]
)
def test_reply_that_names_a_path_outside_the_dump_folder_is_refused(tmp_path: Path, path: object) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir(mode=0o700)
    info = EngineInfo("vllm", "", IDENTITY, None, 100, 8, False, True, "f")  # type: ignore[arg-type]
    engine = VllmEngine(VllmClient("http://127.0.0.1:9", timeout_seconds=1, top_logprobs=8), info, DumpFolder.open(dumps))
    named = path.format(dumps=dumps) if isinstance(path, str) else path
    reply = PrefillReply(REQUEST.request_id, 6, 0, 0.0, 0.0, meta={"kv_transfer_params": {"hidden_states_path": named}})
    with pytest.raises(SampleError) as caught:
        engine.claim(REQUEST, reply, time.monotonic() + 0.2)
    expected = "hostile-name" if isinstance(path, str) else "no-capture-hook"
    assert caught.value.reason in (expected, "label-differs")
    assert isinstance(caught.value, DumpRejected) or not isinstance(path, str)
    engine.close()
