"""What good samples look like is learnt as they vary in the store: with their rows alone, or with the sample as well."""

from __future__ import annotations

import numpy as np
import pytest

from drafter_data.validation.reference import LayerReference
from drafter_data.validation.signature import Signature

LAYERS = 3


def signatures(rows_n: list[int], alike: float) -> list[Signature]:
    """Shapes around zero, whose variance is 1 / rows and, of what all rows of a sample have in common, 1 / alike."""
    draw = np.random.default_rng(0)
    found = list[Signature]()
    for rows in rows_n:
        noise_ll = draw.normal(0, np.sqrt(1 / rows + 1 / alike), (LAYERS, LAYERS))
        shape_ll = np.triu(noise_ll) + np.triu(noise_ll, 1).T
        found.append(Signature(np.arange(rows), shape_ll, np.ones(LAYERS), np.ones(LAYERS), np.ones((rows, 1), np.float32)))
    return found


@pytest.mark.parametrize(("alike", "expected"), [(np.inf, (1024, np.inf)), (64.0, (16, 256))])
def test_rows_beyond_which_a_sample_is_known_no_better_are_learnt(alike: float, expected: tuple[float, float]) -> None:
    rows_n = np.geomspace(8, 2000, 400).astype(int).tolist()
    least, most = expected
    assert least <= LayerReference.learn(signatures(rows_n, alike)).half_rows <= most


def test_where_all_samples_have_as_many_rows_nothing_is_to_be_learnt_of_that() -> None:
    learnt = LayerReference.learn(signatures([24] * 400, 64.0))
    assert learnt.half_rows == np.inf
    assert all(learnt.fits(one.shape_ll, 24) for one in signatures([24] * 400, 64.0))
