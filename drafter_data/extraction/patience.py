"""Telling the engine's trouble from a sample's: whether to wait, to try again, or to give up.

* No connection: the engine is away. It is waited for within a bound; past it, EngineLost.
* The connection broke in mid-request: the engine may have died of this very prompt. From the third time on the prompt goes alone;
  after `MOST_BROKEN` times it is the prompt's failure.
* No answer in time: while others were answered, or when the engine answers a probe, it is the prompt's failure; else the engine
  hangs and is waited for as above.
* 5xx: busy. Tried again for a while; then the sample's failure when others got through or a probe does, else EngineLost.
"""

from __future__ import annotations

import time
from threading import Event

from drafter_data.engines.base import Engine
from drafter_data.engines.sglang_http import EngineBroke, EngineBusy, EngineSilent, EngineUnreachable
from drafter_data.errors import EngineLost, Interrupted, SampleError

FIRST_PAUSE_SECONDS = 0.2
MOST_PAUSE_SECONDS = 5.0
MOST_BROKEN = 5
SUSPECT_BROKEN = 2
BUSY_SECONDS = 60.0


class Patience:
    """What all samples of a session know of the engine. Thread-safe."""

    def __init__(self, engine: Engine, stop: Event, engine_wait_seconds: float) -> None:
        self.engine = engine
        self.stop = stop
        self.engine_wait_seconds = engine_wait_seconds
        self.last_answer_at = float("-inf")

    def answered(self) -> None:
        """Some request was answered."""
        self.last_answer_at = time.monotonic()

    def begin(self) -> Trouble:
        """The trouble of one request, none so far."""
        return Trouble(self)


class Trouble:
    """What one request has met."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since: float | None = None
        self._broken = 0
        self._pause = FIRST_PAUSE_SECONDS

    @property
    def suspect(self) -> bool:
        """Whether the prompt may be what brings the engine down: then no other may go down with it."""
        return self._broken >= SUSPECT_BROKEN

    def wait_out(self, error: EngineUnreachable | EngineBusy, sent_at: float) -> None:
        """Returns when the request may be sent again. Raises SampleError when it is the sample's failure, EngineLost when the
        engine's.
        """
        patience = self._patience
        if isinstance(error, EngineBusy) and error.reason != EngineBusy.reason:
            raise error  # an answer that cannot be read
        self._since = self._since if self._since is not None else sent_at
        if isinstance(error, EngineSilent):
            if patience.last_answer_at > sent_at:
                raise SampleError(f"{error}, while others were answered", reason="no-answer")
            self._wait_alive(error)
            raise SampleError(f"{error}, while the engine answers a probe", reason="no-answer")
        if isinstance(error, EngineBroke):
            self._broken += 1
            if self._broken >= MOST_BROKEN:
                raise SampleError(f"{error}: {self._broken} times with this prompt", reason="engine-breaks")
        if isinstance(error, EngineBusy):
            self._check_busy(error)
        else:
            self._check_bound(error)
        self._rest()

    def _check_busy(self, error: EngineBusy) -> None:
        assert self._since is not None
        waited = time.monotonic() - self._since
        if waited < min(BUSY_SECONDS, self._patience.engine_wait_seconds):
            return
        if self._patience.last_answer_at > self._since or self._patience.engine.alive():
            raise error
        raise EngineLost(
            f"{error}; so for {waited:.0f} s, and nothing else was answered: see the engine's log and retry the run, which goes "
            "on where it stopped",
            reason="engine-busy",
        ) from error

    def _wait_alive(self, error: EngineSilent) -> None:
        while not self._patience.engine.alive():
            self._check_bound(error, "engine-hung")
            self._rest()

    def _check_bound(self, error: EngineUnreachable, reason: str | None = None) -> None:
        assert self._since is not None
        bound = self._patience.engine_wait_seconds
        if time.monotonic() - self._since >= bound:
            raise EngineLost(
                f"{error}; not back within {bound:.0f} s: start the engine and retry the run, which goes on where it stopped",
                reason=reason,
            ) from error

    def _rest(self) -> None:
        if self._patience.stop.wait(self._pause):
            raise Interrupted("the run was stopped: start it again, it goes on where it stopped")
        self._pause = min(self._pause * 2, MOST_PAUSE_SECONDS)
