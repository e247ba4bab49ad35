"""How fast an engine is that no run has used yet: prompts of the run's own lengths, as many at once as the run will have.

Prompts one at a time say little of that: an engine serves those that wait together in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.canary import Canary
from drafter_data.costs import CostModel
from drafter_data.engines.base import Engine
from drafter_data.errors import PreflightRefused
from drafter_data.extraction.session import DUMP_SHARE
from drafter_data.extraction.window import Window

MOST_SHARE = 0.01
"""Of the tokens to come, the canary's own included."""
MOST_TOKENS = 200_000
MOST_SECONDS = 10.0
"""Nothing more is sent after that; what is out is waited for."""
MOST_ASKED_AGAIN = 4
"""Of the prompts that failed in a burst: what fails alone as well is no matter of their number."""
MOST_ROUNDS = 4
"""Prompts for each place in flight: that many pass after the first ones, which find the engine idle."""
FEWEST = 4
CHECKED_MEANWHILE = 4
"""Dumps that are checked while their places in flight are taken again."""
GOLDEN = 0.6180339887


class _TooLate(Exception):
    """A prompt's turn came after the time for all of them."""


@dataclass(frozen=True)
class Burst:
    """Prompts that had the engine to themselves from the first sending to the last reply."""

    lengths: tuple[int, ...]
    seconds: float


def burst_lengths(lengths_n: NDArray[Any], in_flight: int, *, spent_tokens: int) -> list[int]:
    """Lengths to send, in order: spread like those to come, and so is every beginning of the list. Empty where one at a time is
    what the run does, or where the share of the tokens, less `spent_tokens`, holds fewer than four of them.
    """
    if in_flight < 2 or not len(lengths_n):
        return []
    budget = min(MOST_SHARE * float(lengths_n.sum()), MOST_TOKENS) - spent_tokens
    places_n = ((np.arange(MOST_ROUNDS * in_flight) + 0.5) * GOLDEN) % 1.0
    spread_n = np.quantile(lengths_n, places_n).astype(np.int64)
    count = int(np.searchsorted(np.cumsum(spread_n), budget))
    return [int(value) for value in spread_n[:count]] if count >= FEWEST else []


def send_burst(canary: Canary, engine: Engine, lengths: Sequence[int], in_flight: int, costs: CostModel) -> Burst | None:
    """Sends prompts of these lengths, checks every dump, and tells the cost model. None where one had to be asked for again: the
    time then holds more than these prompts. Raises PreflightRefused when of those few that are asked again, short and long ones,
    one fails alone as well.
    """
    info = engine.describe()
    window = Window(
        requests=in_flight,
        lengths_must_differ=info.lengths_must_differ,
        most_bytes=max(int(engine.free_bytes() * DUMP_SHARE), 1),
    )
    started = time.monotonic()

    @contextmanager
    def slot_in_time(tokens: int) -> Generator[None]:
        with window.slot(tokens):
            if time.monotonic() - started > MOST_SECONDS:
                raise _TooLate
            yield

    def send(ids_s: NDArray[np.int64]) -> tuple[int, float] | NDArray[np.int64] | None:
        """(tokens, when it was answered), the prompt where it failed, None where it was not sent."""
        with window.space(len(ids_s) * info.identity.bytes_per_token):
            try:
                return len(ids_s), canary.ask_once(ids_s, slot_in_time(len(ids_s))).answered_at
            except _TooLate:
                return None
            except PreflightRefused as error:
                canary.repeated.append(error.reason.removeprefix("canary-"))
                return ids_s

    prompts = [canary.prompt(length) for length in lengths]
    with ThreadPoolExecutor(in_flight + CHECKED_MEANWHILE) as pool:
        started = time.monotonic()
        try:
            outcomes = list(pool.map(send, prompts))
        except BaseException:
            engine.interrupt()  # or the pool would wait for each reply
            raise
    failed = [outcome for outcome in outcomes if isinstance(outcome, np.ndarray)]
    failed.sort(key=len)
    for place in sorted(set(np.linspace(0, len(failed) - 1, MOST_ASKED_AGAIN).astype(int).tolist())) if failed else ():
        canary.ask(failed[place])
    answered = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    if failed or len(answered) < FEWEST:
        return None
    burst = Burst(tuple(tokens for tokens, _ in answered), max(ended for _, ended in answered) - started)
    # Counted as of the run's own number also where the share of the tokens holds fewer: nothing else is as near to it.
    costs.observe_whole(burst.lengths, burst.seconds, in_flight)
    return burst
