"""The in-flight window: bounds hold whatever the threads do, nobody waits for ever, and the limit finds its place by itself."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafter_data.extraction.tuning import CONTROL_FILE, FIRST, HOLD_SECONDS, InFlightTuner
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
    """Brings tokens at a rate that grows with the requests in flight up to a number of them."""

    def __init__(self, full_at: int) -> None:
        self.full_at, self.samples, self.now = full_at, 0.0, 0.0

    def step(self, in_flight: int) -> None:
        self.samples += 0.25 * 10 * min(in_flight, self.full_at)
        self.now += 0.25

    def done(self) -> tuple[int, int]:
        return int(self.samples), int(self.samples) * 100


def tuner(engine: _Engine, folder: Path, *, bound: int, engine_limit: int = 512) -> InFlightTuner:
    made = InFlightTuner(
        Window(requests=1, lengths_must_differ=False, most_bytes=1), folder / CONTROL_FILE, bound=bound, engine_limit=engine_limit,
        done=engine.done,
    )  # fmt: skip
    made.close()  # the test keeps time
    return made


@pytest.mark.parametrize(("full_at", "found"), [(8, FIRST), (16, FIRST), (40, 64), (500, 128)])
def test_tuner_throughput_that_stops_growing_ends_the_growth(full_at: int, found: int, tmp_path: Path) -> None:
    engine, limit = _Engine(full_at), FIRST
    climbing = tuner(engine, tmp_path, bound=128)
    while engine.now < HOLD_SECONDS / 2:
        engine.step(limit)
        limit = climbing.decide(engine.now)
    assert limit == found


def test_tuner_engine_that_takes_more_later_is_given_more(tmp_path: Path) -> None:
    engine, limit = _Engine(16), FIRST
    climbing = tuner(engine, tmp_path, bound=64)
    while engine.now < 3 * HOLD_SECONDS:
        engine.step(limit)
        limit = climbing.decide(engine.now)
        if engine.now == HOLD_SECONDS / 2:
            engine.full_at = 64
    assert limit == 64


def test_tuner_control_file_raises_and_lowers_within_the_engine_limit(tmp_path: Path) -> None:
    engine = _Engine(16)
    asked = tuner(engine, tmp_path, bound=32, engine_limit=48)
    found: list[int] = []
    for text in ("3", "40\n", "4000", "0", "auto", "¤"):
        (tmp_path / CONTROL_FILE).write_text(text)
        found.append(asked.decide(engine.now))
    assert found == [3, 40, 48, 1, FIRST, FIRST]
