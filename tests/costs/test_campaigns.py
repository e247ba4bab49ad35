"""The ETA over whole campaigns: a small sample of what `python -m benchmarks.eta` runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.campaigns import SHAPES, Campaign, run


def test_eta_steady_campaigns_are_right_from_the_start_where_extrapolation_is_not() -> None:
    campaigns = [Campaign(shape, "steady", 4, True, seed, samples=1500) for seed, shape in enumerate(SHAPES)]
    campaigns += [Campaign(shape, "steady", 16, False, seed, samples=1500) for seed, shape in enumerate(SHAPES)]
    ran = [run(campaign) for campaign in campaigns]
    later = [point for points in ran for point in points if point.progress > 0]
    assert np.median([points[0].error for points in ran]) < 0.15
    assert np.median([point.error for point in later]) < 0.05
    assert 0.7 < np.mean([point.covered for point in later]) <= 1
    assert np.quantile([point.extrapolation_error for point in later], 0.9) > 1


@pytest.mark.parametrize("event", ["drift", "restart"])
def test_eta_after_a_change_is_right_again_within_a_tenth_of_the_tokens(event: str) -> None:
    points = [point for seed in range(3) for point in run(Campaign("bimodal", event, 4, True, seed, samples=1500))]
    settled = [point for point in points if point.settled and point.progress > 0]
    assert np.median([point.error for point in settled]) < 0.10
    assert np.median([point.extrapolation_error for point in settled]) > np.median([point.error for point in settled])
