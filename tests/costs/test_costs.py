"""The cost model against engines whose law is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafter_data.cost_fit import non_negative_least_squares
from drafter_data.costs import CostModel, costs_path
from drafter_data.errors import InputError


def work(
    model: CostModel, lengths: np.ndarray, law: tuple[float, float, float], in_flight: int, seed: int, start: float = 0
) -> float:
    """One server that serves in turn, `in_flight` requests open: latency is the time of all that stand before."""
    rng = np.random.default_rng(seed)
    clock, finishes = start, []
    for k, tokens in enumerate(lengths):
        service = (law[0] + law[1] * tokens + law[2] * tokens**2) * np.exp(rng.normal(0, 0.08))
        sent = finishes[k - in_flight] if k >= in_flight else start
        clock += service
        finishes.append(clock)
        model.observe(int(tokens), clock - sent, in_flight, finished_at=clock)
    return clock


@pytest.mark.parametrize("in_flight", [1, 16])
def test_costs_forecast_of_other_lengths_is_right_whatever_is_in_flight(in_flight: int) -> None:
    law = (0.02, 25e-6, 2e-9)
    model = CostModel("engine")
    rng = np.random.default_rng(1)
    work(model, np.exp(rng.normal(6.5, 0.8, 600)).clip(8, 8000), law, in_flight, 2)
    longer = np.exp(rng.normal(7.3, 0.5, 3000)).clip(8, 8000).astype(int)
    true = float((law[0] + law[1] * longer + law[2] * longer.astype(float) ** 2).sum())
    forecast = model.forecast(longer, in_flight=in_flight, bytes_per_token=100)
    assert forecast.seconds == pytest.approx(true, rel=0.08)
    assert forecast.low_seconds < forecast.seconds < forecast.high_seconds
    assert (forecast.samples, forecast.tokens, forecast.bytes) == (3000, longer.sum(), longer.sum() * 100)


def test_costs_nothing_observed_uses_the_prior_and_says_so() -> None:
    model = CostModel()
    assert model.fit().source == "prior"
    forecast = model.forecast([1000] * 10, in_flight=1, bytes_per_token=1)
    assert forecast.seconds == pytest.approx(10 * (0.02 + 0.025))
    assert forecast.high_seconds > 2 * forecast.seconds


def test_costs_engine_becomes_slower_is_followed_within_a_few_requests() -> None:
    model = CostModel("engine")
    lengths = np.random.default_rng(3).integers(100, 2000, 2000)
    clock = work(model, lengths, (0.02, 25e-6, 0), 8, 4)
    work(model, lengths[:300], (0.03, 37.5e-6, 0), 8, 5, start=clock)
    forecast = model.forecast(lengths, in_flight=8, bytes_per_token=1)
    assert forecast.seconds == pytest.approx(float((0.03 + 37.5e-6 * lengths).sum()), rel=0.05)


def test_costs_pause_and_outliers_do_not_count() -> None:
    model = CostModel("engine")
    lengths = np.random.default_rng(3).integers(100, 2000, 400)
    clock = work(model, lengths, (0.02, 25e-6, 0), 4, 4)
    clock = work(model, lengths[:200], (0.02, 25e-6, 0), 4, 5, start=clock + 3600)
    model.observe(500, 30.0, 4, finished_at=clock + 30)
    work(model, lengths[:100], (0.02, 25e-6, 0), 4, 6, start=clock + 30)
    forecast = model.forecast(lengths, in_flight=4, bytes_per_token=1)
    assert forecast.seconds == pytest.approx(float((0.02 + 25e-6 * lengths).sum()), rel=0.04)


def test_costs_history_is_kept_per_fingerprint_and_forecasts_the_next_run(tmp_path: Path) -> None:
    model = CostModel("engine-a")
    work(model, np.random.default_rng(3).integers(100, 2000, 500), (0.02, 25e-6, 0), 4, 4)
    path = costs_path(tmp_path, "engine-a")
    model.save(path)
    assert path == tmp_path / "costs" / "engine-a.json"
    loaded = CostModel.load(path)
    assert loaded.fit() == model.fit()
    assert CostModel.load(costs_path(tmp_path, "engine-b")).fit().source == "prior"
    path.write_text("{}")
    with pytest.raises(InputError, match="remove it"):
        CostModel.load(path)


def test_costs_history_stays_bounded(tmp_path: Path) -> None:
    model = CostModel("engine")
    for k in range(20_000):
        model.observe(100 + k % 50, 0.02, 1, finished_at=k * 0.03)
    model.save(tmp_path / "engine.json")
    assert (tmp_path / "engine.json").stat().st_size < 1_000_000


def test_non_negative_least_squares_meets_the_optimality_conditions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
        ours = non_negative_least_squares(x, y)
        assert (ours >= 0).all()
        # The optimality conditions of Karush, Kuhn and Tucker: the gradient is zero where c > 0 and not negative where c = 0.
        gradient = x.T @ (x @ ours - y)
        assert np.allclose(gradient[ours > 0], 0, atol=1e-7)
        assert (gradient[ours == 0] >= -1e-7).all()
