"""One sample through the engine into the store: send, claim, verify, commit, release; again with a new request id when it fails.

This is the one place where a request is tried again. A 4xx answer never is. What is the engine's trouble (`patience.py`) is waited
out within a bound and costs no attempt, since it says nothing about the sample.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Event

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_contracts.extraction import SampleFailure
from data_contracts.receipt import Receipt
from drafter_data.costs import CostModel
from drafter_data.engines.base import ClaimedDump, Engine, PrefillReply, PrefillRequest
from drafter_data.engines.sglang_http import EngineBusy, EngineUnreachable
from drafter_data.errors import DumpAmbiguous, DumpMissing, DumpRejected, Interrupted, PassMixed, RequestRefused, SampleError
from drafter_data.extraction.outliers import FAR, Outliers, signature_of
from drafter_data.extraction.patience import Patience
from drafter_data.extraction.window import Window
from drafter_data.store.store import Store
from drafter_data.verification import hash_and_check, states_distance

BACKOFF_SECONDS = 0.2
MOST_BACKOFF_SECONDS = 10.0
MOST_MIXED_PASSES = 20
LIKENESS_FACTOR = 10
"""Times the tolerance of two extractions of one prompt: a prompt of another length takes other kernels."""


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
    """How long and how often. `tolerance`: distance of two extractions of one prompt."""

    attempts: int
    dump_timeout_seconds: float
    engine_wait_seconds: float
    state_bytes_per_token: int
    tolerance: float = 0.0


@dataclass(frozen=True)
class Extracted:
    """A claimed dump with the reply it belongs to, when that came (monotonic), and how many requests were open at its sending."""

    dump: ClaimedDump
    reply: PrefillReply
    answered_at: float
    in_flight: int


class SampleExtractor:
    """Extracts single samples; called from many threads."""

    def __init__(
        self, engine: Engine, store: Store, window: Window, limits: SampleLimits, costs: CostModel, outliers: Outliers
    ) -> None:
        self._engine = engine
        self._store = store
        self._window = window
        self._limits = limits
        self._costs = costs
        self._outliers = outliers
        self._expected_lh = (len(store.identity.layers), store.identity.hidden_size)
        self._labels_lack = not engine.describe().labelled
        self.stop = Event()
        self._patience = Patience(engine, self.stop, limits.engine_wait_seconds)

    def extract(self, work: SampleWork, chunk: str, given_up: Event | None = None) -> Future[Receipt] | SampleFailure:
        """Brings one state into the store, or says why not: it is verified and written, and its receipt comes once it is on disk.
        Raises EngineLost, Interrupted, StoreError or OSError, which stop the chunk, as an OSError in place of the receipt does;
        `given_up` tells that it has stopped: nothing more is sent for it.
        """
        alone, attempt, mixed = False, 1, 0
        while True:
            # Dumps without labels only tell for certain what went wrong when no other request is out.
            last_chance = self._labels_lack and attempt > 1 and attempt == self._limits.attempts
            try:
                return self._attempt(work, chunk, attempt, given_up, alone=alone or last_chance)
            except (RequestRefused, EngineBusy) as error:
                last = error
                if isinstance(error, RequestRefused) or error.reason == EngineBusy.reason:
                    return _failure(work, error, attempt)  # refused, or busy throughout our patience
                attempt += 1
            except PassMixed as error:
                last, mixed = error, mixed + 1
            except SampleError as error:
                last, alone = error, alone or isinstance(error, DumpAmbiguous)
                attempt += 1
            if attempt > self._limits.attempts or mixed > MOST_MIXED_PASSES:
                return _failure(work, last, attempt + mixed - 1)
            self.stop.wait(min(BACKOFF_SECONDS * 2 ** (attempt - 2), MOST_BACKOFF_SECONDS) if attempt > 1 else 0)

    def _attempt(self, work: SampleWork, chunk: str, attempt: int, given_up: Event | None, *, alone: bool) -> Future[Receipt]:
        with ExitStack() as held:
            held.enter_context(self._window.space(work.tokens * self._limits.state_bytes_per_token))
            extracted = self.fetch(work, given_up, alone=alone)
            held.callback(self.give_back, extracted.dump)
            # By the times of replies: the first commits of a store wait for each other and end all at once.
            self._costs.observe(work.tokens, extracted.reply.seconds, extracted.in_flight, finished_at=extracted.answered_at)
            with self._outliers.turn():
                self._check_likeness(work, extracted.dump, given_up)
            return self._store.commit_soon(
                extracted.dump,
                work.state_key,
                work.token_ids_s,
                chunk=chunk,
                attempts=attempt,
                engine_seconds=extracted.reply.seconds,
                release=held.pop_all().close,
            )

    def give_back(self, dump: ClaimedDump) -> None:
        """Releases a dump. That it cannot be removed says nothing about its sample: it is left lying."""
        with suppress(DumpRejected):
            self._engine.release(dump)

    def fetch(self, work: SampleWork, given_up: Event | None = None, *, alone: bool = False, urgent: bool = False) -> Extracted:
        """One request and its dump, not stored: the caller releases it. Raises SampleError, or EngineLost past the
        waiting bound.
        """
        trouble = self._patience.begin()
        while True:
            request = PrefillRequest(self._engine.new_request_id(), work.state_key, work.token_ids_s)
            sent_at = time.monotonic()
            try:
                with self._window.slot(work.tokens, alone=alone or trouble.suspect, urgent=urgent) as in_flight:
                    if self.stop.is_set() or (given_up is not None and given_up.is_set()):
                        raise Interrupted("the run was stopped: start it again, it goes on where it stopped")
                    sent_at = time.monotonic()
                    reply = self._engine.send(request)
                    answered_at = time.monotonic()
                    self._patience.answered()
                    check_reply(request, reply)
                    dump = self._engine.claim(request, reply, time.monotonic() + self._limits.dump_timeout_seconds)
                return Extracted(dump, reply, answered_at, in_flight)
            except (EngineUnreachable, EngineBusy) as error:
                self._engine.abandon(request)
                trouble.wait_out(error, sent_at)  # no slot is held while waiting
            except SampleError as error:
                self._engine.abandon(request)
                raise self._explained(error, work) from error

    def _explained(self, error: SampleError, work: SampleWork) -> SampleError:
        """A dump that is missing because the dump folder is full says so."""
        if not isinstance(error, DumpMissing) and error.reason != "capture-failed":
            return error
        need, free = work.tokens * self._limits.state_bytes_per_token, self._engine.free_bytes()
        if free >= 2 * need:
            return error
        return DumpMissing(
            f"{error}; the dump folder has {free / 1e6:.1f} MB free and a dump of {work.tokens} tokens takes {need / 1e6:.1f} MB: "
            "remove what fills it, or enlarge the RAM disk",
            reason="dump-folder-full",
        )

    def _check_likeness(self, work: SampleWork, dump: ClaimedDump, given_up: Event | None) -> None:
        """States that are unlike the store's others, and the first ones of a store, are compared with those of the beginning of
        their prompt: a causal model gives that the same states, mixed rows or axes do not. Raises DumpRejected.
        """
        if dump.states_slh.shape != (work.tokens, *self._expected_lh) or self._expected_lh[0] < 2:
            return  # commit says what is wrong with it
        with np.errstate(all="ignore"):
            signature = signature_of(dump.states_slh, dump.dtype)
            deviation = self._outliers.deviation(signature)
        if deviation is None or not deviation <= FAR:
            label = f"sample {work.state_key[:12]}"
            _check_content(dump, label)
            beginning = SampleWork(work.state_key, work.token_ids_s[: max(1, work.tokens * 2 // 3)])
            distance = self._distance(beginning, dump, given_up)
            if not distance <= LIKENESS_FACTOR * self._limits.tolerance:
                seen = "" if deviation is None else f"unlike the store's others ({deviation:.0f} deviations), and "
                raise DumpRejected(
                    f"{label}: its states are {seen}not those of its first {beginning.tokens} tokens asked alone: they differ by "
                    f"{distance:.2e} (relative, worst layer)",
                    reason="states-unlike",
                )
        self._outliers.add(signature)

    def _distance(self, work: SampleWork, dump: ClaimedDump, given_up: Event | None) -> float:
        """Distance of a new extraction to the beginning of a dump."""
        again = self.fetch(work, given_up, urgent=True).dump
        try:
            _check_content(again, f"sample {work.state_key[:12]}, its first {work.tokens} tokens asked alone")
            return states_distance(again, dump, of_beginning=True)
        finally:
            self.give_back(again)


def _check_content(dump: ClaimedDump, label: str) -> None:
    """The commit's checks, made before so that what they find is named as they name it."""
    hash_and_check(dump.states_slh, dump.dtype, xxhash.xxh3_128(), label)


def check_reply(request: PrefillRequest, reply: PrefillReply) -> None:
    """Raises SampleError (`prompt-tokens`) when the engine did not take the prompt whole."""
    if reply.prompt_tokens != request.tokens:
        raise SampleError(
            f"request {request.request_id}: sent {request.tokens} tokens, the engine counted {reply.prompt_tokens}: it cut the "
            "prompt or answered another one; raise its context length or drop longer rows",
            reason="prompt-tokens",
        )


def _failure(work: SampleWork, error: SampleError, attempts: int) -> SampleFailure:
    return SampleFailure(state_key=work.state_key, tokens=work.tokens, reason=error.reason, detail=str(error), attempts=attempts)
