"""One sample through the engine into the store: send, claim, verify, commit, release; again with a new request id when it fails.

This is the one place where a request is tried again. A 4xx answer never is. An engine that does not answer is waited for within a
bound; that costs no attempt, since it says nothing about the sample.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event

import numpy as np
from numpy.typing import NDArray

from data_contracts.extraction import SampleFailure
from data_contracts.receipt import Receipt
from drafter_data.engines.base import ClaimedDump, Engine, PrefillReply, PrefillRequest
from drafter_data.engines.sglang_http import EngineUnreachable
from drafter_data.errors import DumpAmbiguous, EngineLost, PassMixed, RequestRefused, SampleError
from drafter_data.extraction.window import Window
from drafter_data.store.store import Store

BACKOFF_SECONDS = 0.2
MOST_BACKOFF_SECONDS = 10.0
MOST_MIXED_PASSES = 20


@dataclass(frozen=True)
class SampleWork:
    """A sample to extract. `token_ids_s` int64 [S]."""

    state_key: str
    token_ids_s: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Prompt length."""
        return len(self.token_ids_s)


@dataclass(frozen=True)
class SampleLimits:
    """How long and how often."""

    attempts: int
    dump_timeout_seconds: float
    engine_wait_seconds: float
    state_bytes_per_token: int


@dataclass(frozen=True)
class Extracted:
    """A claimed dump with the reply it belongs to, and how many requests were open when it was sent."""

    dump: ClaimedDump
    reply: PrefillReply
    in_flight: int


class SampleExtractor:
    """Extracts single samples; called from many threads."""

    def __init__(self, engine: Engine, store: Store, window: Window, limits: SampleLimits) -> None:
        self._engine = engine
        self._store = store
        self._window = window
        self._limits = limits
        self.stop = Event()

    def extract(self, work: SampleWork, chunk: str) -> tuple[Receipt, Extracted] | SampleFailure:
        """Brings one state into the store, or says why not. Raises EngineLost, StoreError or OSError, which stop the chunk."""
        alone, attempt, mixed = False, 1, 0
        while True:
            try:
                return self._attempt(work, chunk, attempt, alone=alone)
            except RequestRefused as error:
                return _failure(work, error, attempt)
            except PassMixed as error:
                last, mixed = error, mixed + 1
            except SampleError as error:
                last, alone = error, alone or isinstance(error, DumpAmbiguous)
                attempt += 1
            if attempt > self._limits.attempts or mixed > MOST_MIXED_PASSES or self.stop.is_set():
                return _failure(work, last, attempt + mixed - 1)
            self._pause(attempt)

    def _attempt(self, work: SampleWork, chunk: str, attempt: int, *, alone: bool) -> tuple[Receipt, Extracted]:
        with self._window.space(work.tokens * self._limits.state_bytes_per_token):
            extracted = self.fetch(work, alone=alone)
            try:
                receipt = self._store.commit(
                    extracted.dump,
                    work.state_key,
                    work.token_ids_s,
                    chunk=chunk,
                    attempts=attempt,
                    engine_seconds=extracted.reply.seconds,
                )
            finally:
                self._engine.release(extracted.dump)
        return receipt, extracted

    def fetch(self, work: SampleWork, *, alone: bool = False) -> Extracted:
        """One request and its dump, not stored: the caller releases it. Raises SampleError, or EngineLost past the
        waiting bound.
        """
        lost_since: float | None = None
        while True:
            request = PrefillRequest(self._engine.new_request_id(), work.state_key, work.token_ids_s)
            try:
                with self._window.slot(work.tokens, alone=alone) as in_flight:
                    reply = self._engine.send(request)
                    _check_reply(request, reply)
                    dump = self._engine.claim(request, reply, time.monotonic() + self._limits.dump_timeout_seconds)
                return Extracted(dump, reply, in_flight)
            except EngineUnreachable as error:
                self._engine.abandon(request)
                lost_since = lost_since or time.monotonic()
                self._wait_for_engine(error, lost_since)
            except SampleError:
                self._engine.abandon(request)
                raise

    def _wait_for_engine(self, error: EngineUnreachable, since: float) -> None:
        """Returns when the engine answers again. Raises EngineLost when it has not within the bound, counted from the
        first failure.
        """
        pause = BACKOFF_SECONDS
        while True:
            if time.monotonic() - since >= self._limits.engine_wait_seconds or self.stop.is_set():
                raise EngineLost(
                    f"{error}; not back within {self._limits.engine_wait_seconds:.0f} s: start the engine and retry the run, "
                    "which goes on where it stopped"
                ) from error
            self.stop.wait(pause)
            pause = min(pause * 2, MOST_BACKOFF_SECONDS)
            if self._engine.alive():
                return

    def _pause(self, attempt: int) -> None:
        self.stop.wait(min(BACKOFF_SECONDS * 2 ** (attempt - 2), MOST_BACKOFF_SECONDS) if attempt > 1 else 0)


def _check_reply(request: PrefillRequest, reply: PrefillReply) -> None:
    if reply.prompt_tokens != request.tokens:
        raise SampleError(
            f"request {request.request_id}: sent {request.tokens} tokens, the engine counted {reply.prompt_tokens}: it cut the "
            "prompt or answered another one; raise its context length or drop longer rows",
            reason="prompt-tokens",
        )


def _failure(work: SampleWork, error: SampleError, attempts: int) -> SampleFailure:
    return SampleFailure(state_key=work.state_key, tokens=work.tokens, reason=error.reason, detail=str(error), attempts=attempts)
