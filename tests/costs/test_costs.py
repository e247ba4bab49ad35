"""The cost model against engines whose law is known."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from drafter_data.cost_fit import non_negative_least_squares
from drafter_data.costs import CostHistory, CostModel, CostWindow, FoundInFlight, costs_path
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


def served_in_passes(
    lengths: np.ndarray, law: tuple[float, float], in_flight: int, ahead: bool
) -> list[tuple[int, float, int, float]]:
    """(tokens, seconds, in flight, replied at) of an engine that begins at 0 and takes five requests a pass: 4 ms a pass and `law`
    a request and a token. `ahead`: a pass is answered at the end of the next one, as engines with overlapping passes do.
    """
    waiting = [(int(n), 0.0, k + 1) for k, n in enumerate(lengths[:in_flight])]
    upcoming, clock, done = in_flight, 0.0, list[tuple[int, float, int, float]]()
    held = list[tuple[int, float, int]]()
    while waiting or held:
        served, waiting = waiting[:5], waiting[5:]
        clock += sum(law[0] + law[1] * n for n, _, _ in served) + (0.004 if served else 0.0)
        answered, held = (held, served) if ahead else (served, [])
        done += [(n, clock - sent, k, clock) for n, sent, k in answered]
        coming = [(int(n), clock, in_flight) for n in lengths[upcoming : upcoming + len(answered)]]
        waiting, upcoming = waiting + coming, upcoming + len(coming)
    return done


def test_costs_first_replies_told_of_late_and_in_another_order_count_from_the_first_sending() -> None:
    lengths = np.random.default_rng(6).integers(100, 1400, 1000)
    replies = served_in_passes(lengths, (0.01, 80e-6), 32, ahead=False)
    model = CostModel("engine")
    for k in range(5):  # a history with one in flight, where the engine is slower
        model.observe(1000, 0.4, 1, finished_at=k - 100)
    told = [*replies[32:40], *replies[:32]]  # the commits of a store's first samples wait for each other
    for tokens, seconds, in_flight, at in told:
        model.observe(tokens, seconds, in_flight, finished_at=at)
    left = replies[-1][3] - replies[39][3]
    assert model.forecast(lengths[40:], in_flight=32, bytes_per_token=1).seconds == pytest.approx(left, rel=0.1)


def test_costs_first_window_has_as_many_in_flight_as_its_last_request() -> None:
    model = CostModel("engine")
    for tokens, seconds, in_flight, at in served_in_passes(np.full(70, 500), (0.01, 80e-6), 32, ahead=False)[:45]:
        model.observe(tokens, seconds, in_flight, finished_at=at)
    assert model.usual_in_flight == 32


@pytest.mark.parametrize("ahead", [False, True])
def test_costs_what_is_done_of_the_requests_in_flight_is_not_to_come(ahead: bool) -> None:
    lengths = np.random.default_rng(6).integers(100, 1400, 1000)
    replies = served_in_passes(lengths, (0.01, 80e-6), 32, ahead)
    a_pass, done = replies[-1][3] / (len(lengths) / 5), 915
    model = CostModel("engine")
    for tokens, seconds, in_flight, at in replies[:done]:
        model.observe(tokens, seconds, in_flight, finished_at=at)
    last, left = replies[done - 1][3], lengths[done:]
    said = [model.forecast(left, in_flight=32, bytes_per_token=1, now=last + share * a_pass) for share in (0, 0.5, 0.9, 100, 1e6)]
    for forecast, share in zip(said[:3], (0, 0.5, 0.9), strict=True):
        true = replies[-1][3] - last - share * a_pass
        assert forecast.seconds == pytest.approx(true, abs=0.25 * a_pass)
        assert forecast.low_seconds <= true <= forecast.high_seconds
    idle = model.forecast(left, in_flight=32, bytes_per_token=1)
    assert said[0].high_seconds - said[0].low_seconds > 1.2 * (idle.high_seconds - idle.low_seconds), "how far is the engine?"
    assert said[3].seconds == said[4].seconds > 0.7 * idle.seconds, "an engine that hangs brings nothing nearer"
    assert model.forecast(left[:1], in_flight=32, bytes_per_token=1, now=last + 1e6).seconds > 0.01


def test_costs_interval_covers_on_hosts_whose_speed_wanders() -> None:
    covered: list[bool] = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(100, 1400, 2000)
        wander, walk = 0.0, list[float]()
        for _ in lengths:  # by 4.5 %, over some hundred requests
            wander = 0.997 * wander + rng.normal(0, 0.0035)
            walk.append(wander)
        finishes = np.cumsum((0.02 + 60e-6 * lengths) * np.exp(walk + rng.normal(0, 0.08, len(lengths))))
        model = CostModel("engine")
        for k, (tokens, at) in enumerate(zip(lengths, finishes, strict=True)):
            model.observe(int(tokens), float(at - (finishes[k - 16] if k >= 16 else 0)), 16, finished_at=float(at))
            if k + 1 in (150, 300, 600, 1000, 1400):
                forecast = model.forecast(lengths[k + 1 :], in_flight=16, bytes_per_token=1)
                covered.append(forecast.low_seconds <= finishes[-1] - at <= forecast.high_seconds)
    assert 0.85 <= np.mean(covered) <= 0.99


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


def test_costs_work_in_windows_of_other_lengths_and_numbers_in_flight_is_valued_by_one_law() -> None:
    """What the search for the number in flight compares: an engine that is a tenth slower with 16 in flight than with 2."""
    law, rng, model = (0.02, 25e-6, 2e-9), np.random.default_rng(8), CostModel("engine")
    heard = list[CostWindow]()
    model.on_window = heard.append
    clock = work(model, rng.integers(100, 3000, 400), law, 2, 3)
    work(model, rng.integers(100, 3000, 400), (1.1 * law[0], 1.1 * law[1], 1.1 * law[2]), 16, 4, start=clock)
    of_2, of_16 = ([window for window in heard if window.in_flight == number] for number in (2, 16))
    worth = model.expected_seconds([*of_2, *of_16])
    rates = [
        float(part.sum()) / sum(window.seconds for window in windows)
        for part, windows in ((worth[: len(of_2)], of_2), (worth[len(of_2) :], of_16))
    ]
    assert rates[0] / rates[1] == pytest.approx(1.1, rel=0.015)
    true = [sum(law[k] * x for k, x in enumerate((w.requests, w.tokens, w.tokens2))) for w in (*of_2, *of_16)]
    assert np.std(np.log(worth / true)) < 0.02  # one and the same factor for all


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


def changed(change: float) -> CostModel:
    """Has seen 340 requests of 0.1 s one at a time, then 60 at another speed."""
    rng, model, clock = np.random.default_rng(9), CostModel("engine"), 0.0
    for k in range(400):
        clock += 0.1 * float(np.exp(rng.normal(0, 0.03))) * (change if k >= 340 else 1.0)
        model.observe(1000, 0.1, 1, finished_at=clock)
    return model


@pytest.mark.parametrize("change", [0.87, 1.15])
def test_costs_small_change_of_speed_is_expected_to_last_as_long_again(change: float) -> None:
    """Hosts that others use as well come back to their usual speed."""
    model, usual = changed(change), (340 + 60 * change) / 400
    for count in (3, 60, 3000):
        said = model.forecast([1000] * count, in_flight=1, bytes_per_token=1)
        assert said.seconds / 0.1 == pytest.approx(min(count, 60) * change + max(0, count - 60) * usual, rel=0.025)
        assert said.low_seconds <= 0.1 * count * change * 1.01  # it may stay
        assert said.high_seconds >= 0.1 * count * change * 0.99


@pytest.mark.parametrize("change", [0.7, 1.4])
def test_costs_large_change_of_speed_is_expected_to_stay(change: float) -> None:
    said = changed(change).forecast([1000] * 3000, in_flight=1, bytes_per_token=1)
    assert said.seconds == pytest.approx(300 * change, rel=0.025)


def test_costs_forecast_does_not_jump_between_small_and_large_changes() -> None:
    said = list[float]()
    for change in np.linspace(1.12, 1.34, 23):
        windows = [_of_32(k, float(change) if k >= 300 else 1.0) for k in range(350)]
        said.append(CostModel("engine", windows).forecast([625] * 32_000, in_flight=32, bytes_per_token=1).seconds / 2000)
    assert said[0] == pytest.approx(1.02, abs=0.01)
    assert said[-1] == pytest.approx(1.34, abs=0.01)
    assert np.abs(np.diff(said)).max() < 0.05


def _of_32(k: int, pace: float, in_flight: int = 32) -> CostWindow:
    """A window of 32 requests of 625 tokens, 2 s at a pace of 1, give or take 4 %."""
    seconds = 2.0 * pace * (1 + 0.04 * float(np.sin(7.0 * k)))
    return CostWindow(requests=32, tokens=20_000, tokens2=12.5e6, seconds=seconds, in_flight=in_flight, ended_at=2.0 * k)


@pytest.mark.parametrize("count", [4, 12, 40])
@pytest.mark.parametrize(("before", "now"), [(1.3, 1.0), (1.0, 1.5)])
def test_costs_windows_of_another_number_in_flight_tell_nothing_of_the_speed(before: float, now: float, count: int) -> None:
    """The search went from 16 to 32, or the host became slower just after."""
    windows = [_of_32(k, before, 16) for k in range(300)] + [_of_32(300 + k, now) for k in range(count)]
    forecast = CostModel("engine", windows).forecast([625] * 3200, in_flight=32, bytes_per_token=1)
    assert forecast.seconds == pytest.approx(200 * now, rel=0.04)
    assert forecast.low_seconds <= 200 * now <= forecast.high_seconds


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
    assert loaded.fit().linear_seconds_per_token == pytest.approx(model.fit().linear_seconds_per_token, rel=0.01)
    assert loaded.fit().source == "observed"
    loaded.save(path)
    assert CostModel.load(path).fit() == loaded.fit()
    assert CostModel.load(costs_path(tmp_path, "engine-b")).fit().source == "prior"
    path.write_text("{}")
    with pytest.raises(InputError, match="remove it"):
        CostModel.load(path)


@pytest.mark.parametrize(
    ("mean", "bound", "age", "requests", "no_better"),
    [
        (2000, 64, 60, 2, ("more",)),
        (1001, 64, 60, 2, ("more",)),
        (3999, 64, 60, 2, ("more",)),
        (2000, 64, 86_400, 2, ()),  # nights of a minute each compare nothing by themselves
        (2000, 1, 60, 1, ()),
        (900, 64, 60, None, ()),
        (4100, 64, 60, None, ()),
    ],
)
def test_costs_found_in_flight_is_kept_and_holds_for_like_lengths(
    mean: int, bound: int, age: float, requests: int | None, no_better: tuple[str, ...], tmp_path: Path
) -> None:
    path = costs_path(tmp_path, "abc")
    found = FoundInFlight(requests=2, mean_tokens=2000, found_at=time.time() - age, no_better=("more",))
    CostModel("abc", found_in_flight=found).save(path)
    kept = CostModel.load(path)
    assert kept.found_in_flight == found
    lengths_n = np.array([mean - 10, mean + 10])
    held = kept.found_for(lengths_n, bound)
    assert (held.requests, held.no_better) == (requests, no_better) if held else requests is None
    assert kept.found_for(lengths_n[:0], bound) is None


def test_costs_two_sessions_at_once_keep_what_both_have_learnt(tmp_path: Path) -> None:
    path, rng = costs_path(tmp_path, "abc"), np.random.default_rng(3)
    before = CostModel("abc", found_in_flight=FoundInFlight(requests=2, mean_tokens=1000, found_at=1.0))
    work(before, rng.integers(100, 2000, 100), (0.02, 25e-6, 0), 4, 4)
    before.save(path)
    first, second = CostModel.load(path), CostModel.load(path)
    known = windows_of(path)
    work(first, rng.integers(100, 2000, 100), (0.02, 25e-6, 0), 4, 5)
    work(second, rng.integers(100, 2000, 100), (0.02, 25e-6, 0), 4, 6)
    first.found_in_flight = FoundInFlight(requests=8, mean_tokens=1000, found_at=3.0)
    second.found_in_flight = FoundInFlight(requests=4, mean_tokens=1000, found_at=2.0)
    first.save(path)
    of_first = windows_of(path)[len(known) :]
    second.save(path)
    assert windows_of(path)[: len(known) + len(of_first)] == [*known, *of_first]
    of_second = windows_of(path)[len(known) + len(of_first) :]
    assert len(of_first) > 5
    assert len(of_second) > 5
    assert CostModel.load(path).found_in_flight == first.found_in_flight
    for model in (first, second, before):  # nothing comes twice
        model.save(path)
    assert sorted(windows_of(path), key=str) == sorted([*known, *of_first, *of_second], key=str)
    path.write_text("{}")
    second.save(path)
    assert set(windows_of(path)) == {*known, *of_second}


def windows_of(path: Path) -> list[CostWindow]:
    return list(CostHistory.model_validate_json(path.read_bytes()).windows)


def test_costs_end_of_a_run_is_not_kept_as_its_speed(tmp_path: Path) -> None:
    """An engine that answers a pass at the end of the next one answers the last requests at once."""
    path, law = costs_path(tmp_path, "abc"), (0.01, 80e-6)
    model, lengths = CostModel("abc"), np.random.default_rng(4).integers(100, 1400, 600)
    for tokens, seconds, in_flight, at in served_in_passes(lengths, law, 32, ahead=True):
        model.observe(tokens, seconds, in_flight, finished_at=at)
    model.save(path)
    kept = [window for window in CostHistory.model_validate_json(path.read_bytes()).windows if not window.filling]
    law_3 = np.array([law[0] + 0.004 / 5, law[1], 0.0])
    pace_w = [float(law_3 @ (w.requests, w.tokens, w.tokens2)) / w.seconds for w in kept]
    assert len(kept) > 10
    assert pace_w == pytest.approx([1.0] * len(kept), rel=0.12)


def test_costs_canary_behind_a_run_makes_its_last_window_no_change_of_speed() -> None:
    rng, windows = np.random.default_rng(5), list[CostWindow]()
    for k in range(40):
        tokens = int(rng.integers(16_000, 24_000))
        seconds = 1e-4 * tokens * float(np.exp(rng.normal(0, 0.05))) * (0.7 if k == 39 else 1.0)
        windows.append(
            CostWindow(requests=32, tokens=tokens, tokens2=tokens**2 / 32, seconds=seconds, in_flight=32, ended_at=3.0 * k)
        )
    model, lengths = CostModel("abc", windows), [625] * 1000
    for k in range(7):
        model.observe(1000, 0.2, 1, finished_at=1e4 + 0.2 * k)
    assert model.forecast(lengths, in_flight=32, bytes_per_token=1).seconds == pytest.approx(62.5, rel=0.06)


def test_costs_history_that_names_no_number_in_flight_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "abc.json"
    path.write_text('{"fingerprint": "abc", "windows": [], "found_in_flight": {"requests": 0, "mean_tokens": 1, "found_at": 1}}')
    with pytest.raises(InputError, match=r"no cost history: .*greater than or equal to 1"):
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


def test_pause_in_the_first_window_of_a_busy_time_is_not_work_under_way() -> None:
    model = CostModel()
    for k in range(64):
        model.observe(1000, 0.4, 4, finished_at=10 + 0.1 * k)
    # An engine that compiles at its first request: none is ahead by 30 seconds for that.
    for k in range(64):
        model.observe(1000, 30.0 if k < 4 else 0.4, 4, finished_at=130 + 0.1 * k)
    last, rest = 130 + 6.3, [1000] * 40
    plain = model.forecast(rest, in_flight=4, bytes_per_token=1).seconds
    assert model.forecast(rest, in_flight=4, bytes_per_token=1, now=last).seconds > 0.97 * plain


def test_costs_burst_is_whole_and_outweighs_what_came_one_at_a_time() -> None:
    """Ten prompts in two passes of 20 ms and 25 us a token; alone each takes its own pass."""
    model, lengths = CostModel(), [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    model.observe(1000, 0.045, 1, finished_at=0.045)
    assert not model.tells_of(8)
    model.observe_whole(lengths, 0.04 + 25e-6 * sum(lengths), 8)
    assert (model.tells_of(8), model.tells_of(16), model.tells_of(32)) == (True, True, False)
    forecast = model.forecast(lengths * 100, in_flight=8, bytes_per_token=1)
    assert forecast.seconds == pytest.approx(100 * (0.04 + 25e-6 * sum(lengths)), rel=0.02)
    assert 0.2 * forecast.seconds < forecast.low_seconds < forecast.seconds < forecast.high_seconds


def test_costs_after_a_burst_nothing_is_under_way() -> None:
    model = CostModel()
    model.observe_whole([100] * 8, 1.0, 8)
    forecast = model.forecast([100] * 8, in_flight=8, bytes_per_token=1, now=1e9)
    assert forecast.seconds == pytest.approx(1.0, rel=0.01)
