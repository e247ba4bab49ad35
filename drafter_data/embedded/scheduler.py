"""Forms passes as SGLang does: waiting prompts are batched into prefill passes, which go before decode steps.

A prefill pass takes waiting requests in order until `max_prefill_tokens` or `prefill_max_requests`; a prompt that is longer than
the bound goes alone. With chunking, a pass holds at most `chunked_prefill_size` tokens and the last prompt is cut there; its rest
leads the next pass. A decode step is a pass of one token a running request.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque

from drafter_data.embedded.backend import Backend
from drafter_data.embedded.dumps import DumpWriter, PassPiece
from drafter_data.embedded.request import BadRequest, GenerateRequest
from drafter_data.embedded.settings import ServerSettings


class Scheduler:
    """One thread that runs passes until it is stopped."""

    def __init__(self, backend: Backend, writer: DumpWriter, settings: ServerSettings) -> None:
        self._backend = backend
        self._writer = writer
        self._settings = settings
        self._waiting: deque[GenerateRequest] = deque()
        self._running: list[GenerateRequest] = []
        self._rids: set[str] = set()
        self._wake = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; its `done` is set when it is answered. Raises BadRequest when its rid is in flight."""
        with self._wake:
            if request.rid in self._rids:
                raise BadRequest(f"rid {request.rid[:80]!r} is in flight already; send a new one")
            self._rids.add(request.rid)
            self._waiting.append(request)
            self._wake.notify()

    def stop(self, timeout_seconds: float) -> None:
        """Ends after the request at hand, so that no half-written file stays; what waits is answered with an error."""
        self._stop.set()
        with self._wake:
            self._wake.notify()
        self._thread.join(timeout_seconds)
        for request in [*self._waiting, *self._running]:
            self._finish(request, error="the server is shutting down")

    def _loop(self) -> None:
        while not self._stop.is_set():
            with self._wake:
                while not (self._waiting or self._running or self._stop.is_set()):
                    self._wake.wait()
                self._drop_aborted()
                prefill = self._form_prefill()
                decode = [] if prefill else list(self._running)
            try:
                if prefill:
                    self._run_prefill(prefill)
                elif decode:
                    self._run_decode(decode)
            except Exception as error:  # noqa: BLE001 - the requests at hand fail with it, loudly; the server goes on
                traceback.print_exc(file=sys.stderr)
                for request in [piece[0] for piece in prefill] or decode:
                    self._finish(request, error=f"{type(error).__name__}: {error}")

    def _drop_aborted(self) -> None:
        for request in [request for request in [*self._waiting, *self._running] if request.aborted]:
            self._finish(request, error="aborted: the client has gone")

    def _form_prefill(self) -> list[tuple[GenerateRequest, int, int]]:
        """(request, start, end) of the next prefill pass; empty when none waits or no more may run."""
        settings = self._settings
        chunk = settings.chunked_prefill_size if settings.chunked_prefill_size > 0 else sys.maxsize
        most_requests = min(settings.prefill_max_requests or sys.maxsize, settings.max_running_requests - len(self._running))
        pieces: list[tuple[GenerateRequest, int, int]] = []
        tokens = 0
        for request in self._waiting:
            rest = request.tokens - request.prefilled
            if len(pieces) >= most_requests or tokens >= chunk or (pieces and tokens + rest > settings.max_prefill_tokens):
                break
            taken = min(rest, chunk - tokens)
            pieces.append((request, request.prefilled, request.prefilled + taken))
            tokens += taken
        return pieces

    def _run_prefill(self, plan: list[tuple[GenerateRequest, int, int]]) -> None:
        started = time.monotonic()
        pieces: list[PassPiece] = []
        for request, start, end in plan:
            if self._stop.is_set():
                return
            pieces.append(PassPiece(request, start, end, self._backend.prefill(request, start, end)))
        self._writer.write(pieces, extend=True)
        self._backend.finish_pass(started, sum(piece.end - piece.start for piece in pieces), self._stop)
        for piece in pieces:
            piece.request.prefilled = piece.end
            if piece.end == piece.request.tokens:
                with self._wake:
                    self._waiting.remove(piece.request)
                    self._running.append(piece.request)
                self._advance(piece.request)

    def _run_decode(self, requests: list[GenerateRequest]) -> None:
        started = time.monotonic()
        pieces = [
            PassPiece(request, position, position + 1, self._backend.decode(request))
            for request in requests
            for position in [request.tokens + len(request.output_ids) - 1]
        ]
        self._writer.write(pieces, extend=False)
        self._backend.finish_pass(started, len(pieces), self._stop)
        for request in requests:
            self._advance(request)

    def _advance(self, request: GenerateRequest) -> None:
        """Takes the token that the pass brought, and finishes the request when that was its last."""
        if request.max_new_tokens > 0:
            self._backend.next_token(request)
            token = request.output_ids[-1]
            if self._backend.is_end(token) and not request.ignore_eos:
                self._finish(request, {"type": "stop", "matched": token})
                return
        if len(request.output_ids) >= request.max_new_tokens:
            self._finish(request, {"type": "length", "length": request.max_new_tokens})

    def _finish(self, request: GenerateRequest, reason: dict[str, object] | None = None, error: str = "") -> None:
        with self._wake:
            self._rids.discard(request.rid)
            if request in self._waiting:
                self._waiting.remove(request)
            if request in self._running:
                self._running.remove(request)
        request.finish_reason = reason or {"type": "abort", "message": error}
        request.error = error
        request.states = request.cache = request.rng = None
        request.done.set()
