"""The first samples of a store are looked at a few at a time; the rest wait until they can be compared with those."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from drafter_data.extraction.outliers import ENOUGH, Outliers


def test_only_as_many_as_are_needed_are_looked_at_side_by_side() -> None:
    outliers, unknown = Outliers(), list[int]()
    all_begun = threading.Barrier(ENOUGH)

    def look(number: int) -> None:
        with outliers.turn():
            if outliers.deviation(np.zeros(3)) is None:
                unknown.append(number)
                all_begun.wait(timeout=10)  # the first ones do go side by side
            outliers.add(np.zeros(3))

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(look, range(64)))
    assert len(unknown) == ENOUGH


def test_a_turn_that_fails_lets_the_next_one_begin() -> None:
    outliers = Outliers()
    for _ in range(3 * ENOUGH):
        try:
            with outliers.turn():
                raise ValueError
        except ValueError:
            pass
    with outliers.turn():
        assert outliers.deviation(np.zeros(3)) is None
