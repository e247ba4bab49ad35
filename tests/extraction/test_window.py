"""The in-flight window: bounds hold whatever the threads do, nobody waits for ever, and the limit finds its place by itself."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_data.costs import CostWindow
from drafter_data.extraction.tuning import CONTROL_FILE, HOLD_SECONDS, MOST_AT_FIRST, InFlightTuner, first_in_flight
from drafter_data.extraction.window import Window


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("lengths_must_differ", [False, True])
def test_window_many_threads_with_some_alone_bounds_hold_and_all_get_through(lengths_must_differ: bool) -> None:
    window = Window(requests=5, lengths_must_differ=lengths_must_differ, most_bytes=1000)
    lock, open_lengths, broken, done = threading.Lock(), list[int](), list[str](), list[int]()
    alone_now = 0

    def one(number: int) -> None:
        nonlocal alone_now
        draw = random.Random(number)
        tokens, alone = draw.randrange(1, 12), draw.random() < 0.1
        with window.space(tokens * 50), window.slot(tokens, alone=alone):
            with lock:
                if lengths_must_differ and tokens in open_lengths:
                    broken.append("length")
                open_lengths.append(tokens)
                alone_now += alone
                if len(open_lengths) > 5 or (alone_now and len(open_lengths) > 1) or window.bytes_in_flight > 1000:
                    broken.append(f"{open_lengths} {alone_now} {window.bytes_in_flight}")
            time.sleep(draw.random() * 0.002)
            with lock:
                open_lengths.remove(tokens)
                alone_now -= alone
                done.append(number)
        del alone

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(300)))
    assert (broken, len(done), window.in_flight, window.bytes_in_flight) == ([], 300, 0, 0)


def test_window_dump_larger_than_the_bound_goes_alone() -> None:
    window = Window(requests=2, lengths_must_differ=False, most_bytes=10)
    with window.space(25):
        assert window.bytes_in_flight == 25


def test_window_limit_raised_while_threads_wait_lets_them_go() -> None:
    window, release = Window(requests=1, lengths_must_differ=False, most_bytes=100), threading.Event()

    def hold(tokens: int) -> None:
        with window.slot(tokens):
            release.wait(20)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(hold, tokens) for tokens in range(4)]
        eventually(lambda: window.in_flight == 1)
        window.set_limit(4)
        eventually(lambda: window.in_flight == 4)
        release.set()
        for future in futures:
            future.result()


def test_window_urgent_request_goes_before_those_that_wait() -> None:
    window, order = Window(requests=1, lengths_must_differ=False, most_bytes=100), list[int]()

    def go(tokens: int, urgent: bool) -> None:
        with window.slot(tokens, urgent=urgent):
            order.append(tokens)

    with ThreadPoolExecutor(4) as pool, window.slot(0):
        for tokens in (1, 2, 3):
            pool.submit(go, tokens, tokens == 3)
            eventually(lambda waiting=tokens: len(window._waiting) == waiting)
    assert order == [3, 1, 2]


class _Engine:
    """Serves more with more in flight up to a number of them, and `loss` less a doubling from another number on. Each window is
    better or worse by `noise`, and 20 s by 20 s by `wander`.
    """

    def __init__(self, full_at: int, *, best: int = 1 << 20, loss: float = 0.0, noise: float = 0.0, wander: float = 0.0) -> None:
        self.full_at, self.best, self.loss, self.noise, self.wander = full_at, best, loss, noise, wander
        self.now = 50_000.0  # a monotonic clock begins anywhere
        self._random = random.Random(5)

    def rate(self, in_flight: int) -> float:
        return 10 * min(in_flight, self.full_at) * (1 - self.loss) ** max(0.0, math.log2(in_flight / self.best))

    def window(self, in_flight: int) -> CostWindow:
        requests = max(4, in_flight)
        seconds = requests / self.rate(in_flight) * (1 + self.noise * self._random.uniform(-1, 1))
        seconds *= 1 + self.wander * math.sin(2 * math.pi * self.now / 40)
        self.now += seconds
        return CostWindow(
            requests=requests,
            tokens=100 * requests,
            tokens2=1e4 * requests,
            seconds=seconds,
            in_flight=in_flight,
            ended_at=self.now,
        )


def tuner(
    folder: Path, *, first: int = MOST_AT_FIRST, bound: int, engine_limit: int = 512, no_better: Sequence[str] = ()
) -> InFlightTuner:
    window = Window(requests=1, lengths_must_differ=False, most_bytes=1)
    made = InFlightTuner(
        window, folder / CONTROL_FILE, first=first, bound=bound, engine_limit=engine_limit, no_better=no_better,
        expected_seconds=lambda windows: np.array([1e-3 * window.tokens for window in windows]),
    )  # fmt: skip
    made.close()  # the test keeps time
    return made


def tuned(searching: InFlightTuner, engine: _Engine, seconds: float, most_open: int = 1 << 20) -> list[int]:
    """Lets an engine work for so long; the numbers in flight, one a window."""
    used, end = list[int](), engine.now + seconds
    while engine.now < end:
        used.append(min(searching.decide(engine.now), most_open))
        searching.took(engine.window(used[-1]))
    return used


@pytest.mark.parametrize(("full_at", "found"), [(8, MOST_AT_FIRST), (16, MOST_AT_FIRST), (40, 64), (500, 128)])
def test_tuner_throughput_that_stops_growing_ends_the_growth(full_at: int, found: int, tmp_path: Path) -> None:
    searching = tuner(tmp_path, bound=128)
    tuned(searching, _Engine(full_at), HOLD_SECONDS / 2)
    assert searching.settled == found


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_tuner_engine_that_is_faster_with_fewer_is_given_fewer(noise: float, tmp_path: Path) -> None:
    """SGLang on a CPU with prompts of 1,800 tokens: 7,850 tokens/s with 2 in flight, 7,300 with 8, 6,800 with 32."""
    searching = tuner(tmp_path, bound=64)
    tuned(searching, _Engine(2, best=2, loss=0.035, noise=noise), HOLD_SECONDS if noise == 0 else 5 * HOLD_SECONDS)
    assert searching.settled == 2


def test_tuner_next_run_begins_with_what_was_found_and_tries_others_later(tmp_path: Path) -> None:
    engine, first_run = _Engine(2, best=2, loss=0.035), tuner(tmp_path, first=8, bound=64)
    assert first_run.found(1800) is None
    tuned(first_run, engine, HOLD_SECONDS)
    found = first_run.found(1800)
    assert found is not None
    assert (found.requests, found.mean_tokens, set(found.no_better)) == (2, 1800, {"more", "fewer"})
    next_run = tuner(tmp_path, first=found.requests, bound=64, no_better=found.no_better)
    assert set(tuned(next_run, engine, HOLD_SECONDS - 1)) == {2}
    assert {1, 4} < set(tuned(next_run, engine, HOLD_SECONDS))
    assert next_run.settled == 2


def test_tuner_direction_that_brought_more_is_open_to_the_next_run(tmp_path: Path) -> None:
    engine, first_run = _Engine(500), tuner(tmp_path, bound=128)
    while first_run.settled == MOST_AT_FIRST:
        tuned(first_run, engine, 1.0)
    found = first_run.found(100)
    assert found is not None
    assert (found.requests, found.no_better) == (64, ("fewer",))
    next_run = tuner(tmp_path, first=64, bound=128, no_better=found.no_better)
    tuned(next_run, engine, HOLD_SECONDS / 2)
    assert next_run.settled == 128


@pytest.mark.parametrize(("noise", "wander"), [(0.15, 0.0), (0.05, 0.08)])
def test_tuner_noise_alone_costs_less_than_a_hundredth(noise: float, wander: float, tmp_path: Path) -> None:
    engine = _Engine(16, noise=noise, wander=wander)
    started = engine.now
    used = tuned(tuner(tmp_path, bound=64), engine, 20 * HOLD_SECONDS)
    at_full_rate = sum(max(4, number) for number in used) / engine.rate(16)
    assert at_full_rate / (engine.now - started) > 0.99


def test_tuner_engine_that_takes_more_later_is_given_more(tmp_path: Path) -> None:
    engine, searching = _Engine(16), tuner(tmp_path, bound=64)
    tuned(searching, engine, HOLD_SECONDS / 2)
    assert searching.settled == MOST_AT_FIRST
    engine.full_at = 64
    tuned(searching, engine, 2 * HOLD_SECONDS)
    assert searching.settled == 64


def test_tuner_what_never_comes_to_be_in_flight_is_given_up(tmp_path: Path) -> None:
    """The dump folder's bytes, or lengths that must differ, may keep to fewer than the limit."""
    searching = tuner(tmp_path, first=8, bound=64)
    engine = _Engine(64)
    used = tuned(searching, engine, HOLD_SECONDS / 2, most_open=8)
    assert searching.settled == searching.decide(engine.now) == 8
    assert set(used) <= {2, 8}


@pytest.mark.parametrize("seconds", [3.0, HOLD_SECONDS])
def test_tuner_finds_nothing_where_something_else_bounds_the_number(seconds: float, tmp_path: Path) -> None:
    """The dump folder's bytes, before any comparison and after one: the next run must not begin with what they allowed."""
    searching, engine = tuner(tmp_path, first=32, bound=64), _Engine(16)
    tuned(searching, engine, seconds)
    tuned(searching, engine, HOLD_SECONDS, most_open=3)
    assert searching.settled <= 3
    assert searching.found(100) is None


def test_tuner_trial_during_which_the_engine_is_gone_is_no_comparison(tmp_path: Path) -> None:
    searching, engine = tuner(tmp_path, first=8, bound=64), _Engine(64)
    while searching.decide(engine.now) == 8:
        searching.took(engine.window(8))
    engine.now += HOLD_SECONDS
    assert searching.decide(engine.now) == 8
    assert searching.found(100) is None


def test_tuner_home_that_is_never_reached_is_what_there_is(tmp_path: Path) -> None:
    """With 6 of 8 possible at most, fewer must be tried all the same."""
    searching = tuner(tmp_path, first=8, bound=64)
    used = tuned(searching, _Engine(1, best=1, loss=0.2), 2 * HOLD_SECONDS, most_open=5)
    assert searching.settled == 1
    assert {5, 1} <= set(used)


def test_tuner_outage_makes_no_comparison_long(tmp_path: Path) -> None:
    engine, searching = _Engine(64), tuner(tmp_path, first=8, bound=64)
    tuned(searching, engine, 1.0)
    engine.now += 3600
    tuned(searching, engine, HOLD_SECONDS, most_open=8)
    assert searching.decide(engine.now) == searching.settled == 8


def test_tuner_what_came_while_a_person_named_the_number_counts_for_nothing(tmp_path: Path) -> None:
    engine, searching = _Engine(8, noise=0.05), tuner(tmp_path, first=8, bound=64)
    while searching.decide(engine.now) == 8:
        searching.took(engine.window(8))
    (tmp_path / CONTROL_FILE).write_text("16")
    engine.full_at = 16  # a better minute
    assert set(tuned(searching, engine, 2 * HOLD_SECONDS)) == {16}
    engine.full_at = 8
    (tmp_path / CONTROL_FILE).unlink()
    tuned(searching, engine, HOLD_SECONDS)
    assert searching.settled == 8


def test_tuner_goes_on_where_a_fit_fails(tmp_path: Path) -> None:
    asked = threading.Event()

    def failing(_: object) -> NDArray[np.float64]:
        asked.set()
        raise np.linalg.LinAlgError("singular")

    window = Window(requests=8, lengths_must_differ=False, most_bytes=1)
    searching = InFlightTuner(window, tmp_path / CONTROL_FILE, first=8, bound=64, engine_limit=64, expected_seconds=failing)
    engine, deadline = _Engine(64), time.monotonic() + 20
    engine.now = time.monotonic() + 1
    try:
        while not asked.is_set():
            assert time.monotonic() < deadline
            searching.took(engine.window(window.limit))
            time.sleep(0.01)
        eventually(lambda: window.limit == 8)
        (tmp_path / CONTROL_FILE).write_text("3")
        eventually(lambda: window.limit == 3)
    finally:
        searching.close()


@pytest.mark.parametrize(("tokens", "first"), [(100, 32), (600, 32), (1800, 8), (2353, 8), (5000, 4), (60_000, 2)])
def test_run_begins_with_what_fills_two_passes(tokens: int, first: int) -> None:
    lengths_n = np.full(1000, tokens)
    assert first_in_flight(lengths_n, 64) == first
    assert first_in_flight(lengths_n, 1) == 1
    assert first_in_flight(lengths_n[:0], 64) >= 1


def test_tuner_control_file_raises_and_lowers_within_the_engine_limit(tmp_path: Path) -> None:
    asked = tuner(tmp_path, bound=32, engine_limit=48)
    found: list[int] = []
    for text in ("3", "40\n", "4000", "0", "auto", "¤", "7" * 5000):
        (tmp_path / CONTROL_FILE).write_text(text)
        found.append(asked.decide(1.0))
        assert asked.settled == found[-1]
    assert found == [3, 40, 48, 1, MOST_AT_FIRST, MOST_AT_FIRST, 48]
