"""The embedded engine's HTTP side: HTTP/1.1 with keep-alive on 127.0.0.1, in the form of SGLang's native API.

Faults (`faults.py`) sit between the parts that `EmbeddedServer` puts together: a `DumpWriter` around the writer for faults of
dumps, `EmbeddedServer.generate` for faults of replies.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import numpy as np

from data_contracts.dump import DUMP_VERSION
from data_contracts.identity import state_key_of_bytes
from drafter_data.embedded.backend import Backend, LlamaBackend
from drafter_data.embedded.dumps import DumpFormat, DumpWriter, LabelledWriter, UnlabelledWriter, prepare_folder
from drafter_data.embedded.fault_writer import FaultyWriter
from drafter_data.embedded.faults import Faults
from drafter_data.embedded.llama import Llama
from drafter_data.embedded.request import BadRequest, GenerateRequest, parse_generate
from drafter_data.embedded.scheduler import Scheduler
from drafter_data.embedded.settings import ServerSettings
from drafter_data.embedded.timed import TimedBackend
from drafter_data.errors import UsageError

MAX_BODY_BYTES = 32 << 20
HEALTH_RID_PREFIX = "HEALTH_CHECK_"
_CLIENT_POLL_SECONDS = 0.25
_IDLE_SECONDS = 600
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class EmbeddedServer:
    """Model, scheduler, dumps and HTTP server of one engine. `port` is bound when the constructor returns."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.backend = make_backend(settings)
        prepare_folder(settings.dump_folder)
        form = DumpFormat(
            settings.dump_folder, self.backend.layers, self.backend.hidden_size, self.backend.dtype, settings.final_norm
        )
        plain = LabelledWriter(form) if settings.dumps == "labelled" else UnlabelledWriter(form)
        writer: DumpWriter = plain
        self.faults = Faults(settings.fault, settings.faults) if settings.fault or settings.faults else None
        if self.faults:
            writer = FaultyWriter(plain, form, self.backend, self.faults)
        self.scheduler = Scheduler(self.backend, writer, settings)
        self._log = settings.request_log.open("a", buffering=1) if settings.request_log else None
        self._log_lock = threading.Lock()
        self._health_count = 0
        try:
            self._http = _HttpServer(self, settings.port)
        except OSError as error:
            raise UsageError(f"port {settings.port}: {error.strerror}; choose another one, or 0 for a free one") from error
        self.port = int(self._http.server_address[1])

    @property
    def max_input_tokens(self) -> int:
        """The longest prompt that is taken; one place of the context is kept for the token that SGLang always samples."""
        return max(1, self.backend.context_length - 1)

    def start(self) -> None:
        """Warms up as SGLang does, then answers requests in the background."""
        self.scheduler.start()
        if not self.settings.skip_server_warmup:
            self._run_internal(f"warmup-{time.time_ns():x}", [10, 11, 12], 8)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True).start()

    def stop(self) -> None:
        """Stops taking connections, ends the pass at hand, and closes the request log."""
        self._http.shutdown()
        self.scheduler.stop(timeout_seconds=5)
        self._http.server_close()
        if self._log is not None:
            self._log.close()

    def generate(self, body: bytes, connection: socket.socket) -> GenerateRequest | None:
        """Runs one /generate body to its end; None when the client has gone. Raises BadRequest."""
        request = parse_generate(
            body,
            vocab_size=self.backend.vocab_size,
            max_input_tokens=self.max_input_tokens,
            context_length=self.backend.context_length,
        )
        if self.faults:
            self.faults.before(request, connection)
            if foreign := self.faults.foreign(request):
                self.scheduler.submit(foreign)
        self.scheduler.submit(request)
        self._record(request)
        while not request.done.wait(_CLIENT_POLL_SECONDS):
            if _has_gone(connection):
                request.aborted = True
                return None
        return request

    def health(self) -> bool:
        """A forward pass of token 0, as SGLang's /health and /health_generate run."""
        with self._log_lock:
            self._health_count += 1
            count = self._health_count
        return self._run_internal(f"{HEALTH_RID_PREFIX}{time.time()}_{count}", [0], 1)

    def info(self) -> dict[str, Any]:
        """The body of /server_info: every launch flag, and what the client must know of limits and dumps."""
        settings, backend = self.settings, self.backend
        return {
            **settings.as_flags(),
            "model_path": str(settings.model or ""),
            "served_model_name": str(settings.model or ""),
            "dtype": _DTYPE_NAMES[backend.dtype],
            "port": self.port,
            "layers": list(backend.layers),
            "hidden_size": backend.hidden_size,
            "num_layers": backend.num_layers,
            "context_length": backend.context_length,
            "max_req_input_len": self.max_input_tokens,
            "disable_radix_cache": True,
            "tp_size": 1,
            "version": _version(),
            "drafter_data": {
                "dump_version": DUMP_VERSION,
                "dump_folder": str(settings.dump_folder.resolve()),
                "layers": list(backend.layers),
                "final_norm": settings.final_norm,
                "dumps": settings.dumps,
                "hidden_size": backend.hidden_size,
                "num_layers": backend.num_layers,
                "timed": settings.timed,
            },
        }

    def _run_internal(self, rid: str, ids: list[int], new_tokens: int) -> bool:
        request = GenerateRequest(rid, np.array(ids, dtype=np.int64), max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        self.scheduler.submit(request)
        request.done.wait()
        return not request.error

    def _record(self, request: GenerateRequest) -> None:
        if self._log is not None:
            key = state_key_of_bytes(request.token_ids_s.astype("<u4").tobytes())
            line = {"rid": request.rid, "tokens": request.tokens, "state_key": key, "time": request.arrived_at}
            with self._log_lock:
                self._log.write(json.dumps(line) + "\n")


def make_backend(settings: ServerSettings) -> Backend:
    """The timed backend, or the model. Raises InputError or UsageError."""
    if settings.timed:
        return TimedBackend(settings)
    assert settings.model is not None
    model = Llama.load(settings.model)
    return LlamaBackend(model, settings.layers_for(model.config.num_layers), settings.final_norm)


def _version() -> str:
    try:
        return version("drafter-data")
    except PackageNotFoundError:
        return "0"


def _has_gone(connection: socket.socket) -> bool:
    """Whether the client has closed its side. Bytes of a next request in the pipe are left where they are."""
    try:
        readable, _, _ = select.select([connection], [], [], 0)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, engine: EmbeddedServer, port: int) -> None:
        self.engine = engine
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the client's affair; anything else is shown."""
        del request
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            print(f"connection of {client_address}:", file=sys.stderr)  # noqa: T201
            traceback.print_exc(file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "drafter-data-embedded"
    sys_version = ""
    wbufsize = -1  # one write a reply
    disable_nagle_algorithm = True
    timeout = _IDLE_SECONDS
    server: _HttpServer  # pyright: ignore[reportIncompatibleVariableOverride]
    routes: ClassVar[dict[tuple[str, str], str]] = {
        ("GET", "/ready"): "_ok",
        ("GET", "/health"): "_health",
        ("GET", "/health_generate"): "_health",
        ("GET", "/server_info"): "_info",
        ("GET", "/get_server_info"): "_info",
        ("POST", "/flush_cache"): "_flush",
        ("GET", "/flush_cache"): "_flush",
        ("POST", "/generate"): "_generate",
    }

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Requests are not logged here: `--request-log` does."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses (a malformed request line, an unknown method), in JSON like everything else."""
        del explain
        self.close_connection = True
        self.request_version = self.protocol_version  # a garbled line counts as HTTP/0.9, whose answers have no status line
        self._send(code, {"error": {"message": message or HTTPStatus(code).phrase}})

    def _answer(self, method: str) -> None:
        path = self.path.partition("?")[0]
        try:
            body = self._body()
            route = self.routes.get((method, path))
            if route is None:
                known = any(path == known for _, known in self.routes)
                raise BadRequest(
                    f"{method} {path[:80]} is not served here", HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
                )
            getattr(self, route)(body)
        except BadRequest as error:
            self._send(error.status, {"error": {"message": str(error), "type": "BadRequestError", "code": int(error.status)}})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None:
            if self.headers.get("Transfer-Encoding"):
                self.close_connection = True
                raise BadRequest("send a Content-Length, not a chunked body", HTTPStatus.LENGTH_REQUIRED)
            return b""
        if not length.isascii() or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise BadRequest(
                f"a body of {length[:20]} bytes: expected at most {MAX_BODY_BYTES}", HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            )
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError("the client left in mid-body")
        return body

    def _ok(self, body: bytes) -> None:
        del body
        if self._unwell():
            return
        self._send(HTTPStatus.OK, {"status": "ready"})

    def _unwell(self) -> bool:
        """Answers 503 while the fault `health-503` is on."""
        unwell = self.server.engine.faults is not None and self.server.engine.faults.now("health-503")
        if unwell:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "fault: health-503"})
        return unwell

    def _health(self, body: bytes) -> None:
        del body
        if self._unwell():
            return
        healthy = self.server.engine.health()
        self._send(HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE, {"status": "ok" if healthy else "failed"})

    def _info(self, body: bytes) -> None:
        del body
        self._send(HTTPStatus.OK, self.server.engine.info())

    def _flush(self, body: bytes) -> None:
        del body
        self._send(HTTPStatus.OK, {"success": True, "message": "no prefix is ever cached here"})

    def _generate(self, body: bytes) -> None:
        request = self.server.engine.generate(body, self.connection)
        if request is None:
            self.close_connection = True
        elif request.error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": {"message": request.error}})
        else:
            faults = self.server.engine.faults
            self._send(HTTPStatus.OK, faults.reply(request) if faults else request.reply())

    def _send(self, status: int, payload: dict[str, Any]) -> None:
        data = json.dumps(payload).encode()
        with suppress(ConnectionError):  # the client has gone: nobody is left to tell
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
