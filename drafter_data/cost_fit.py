"""Fitting wall time over windows of completions: coefficients, how sure they are, and how much the future may differ.

Legend: W windows in order of time; columns 3 = (requests, tokens, tokens^2) of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TUKEY = 6.0
PAUSE = 3.0
"""A window that took this many times what its neighbours did holds a pause: it says nothing about the engine's speed."""
AGE_WINDOWS = 512
FEWEST_RECENT, FEWEST_BLOCKS = 8, 4
CHANGE, SMALLEST_CHANGE, CHANGE_ROUNDS = 16.0, 0.03, 3
"""A change of speed is believed when it explains this many squared noises, and is no smaller than this share."""
SMALL_CHANGE, LARGE_CHANGE = 0.15, 0.25
"""Logarithms of speed. A change smaller than the first may go as it came, as on hosts that others use as well; one larger than the
second stays; those between count in part."""
STAYS = 0.6
"""Standard error of what a small change brings or costs when it does not go: with 90 % it may just stay."""
MODEL_SHARE, OTHER_LENGTHS_SHARE = 0.03, 0.05
"""What the law itself misses, as a share, and how much more when lengths change by a factor of e. Real hosts wander more than the
engines of `benchmarks.eta`, for minutes and without notice: there the 90 % interval covers a little more than that."""


@dataclass(frozen=True)
class Fitted:
    """`coefficients_3` in seconds at today's speed, their covariance, and `noise`: seconds a root second by which like work varies.

    `usual`: the mean of all windows over today's speed, which has lasted for `lasted` seconds; 1 where no small change was found.
    """

    coefficients_3: Floats
    covariance_33: Floats
    noise: float
    recent_tokens: float
    usual: float
    lasted: float

    def seconds_and_error(self, work_3: Floats) -> tuple[float, float]:
        """Seconds of some work, and the standard error of that: of the fit, of the noise, of a small change that may stay or go,
        and of the law itself, which is less sure for other lengths than those of late (`recent_tokens` a request).

        A small change of speed is taken to last as long again as it has lasted; what is left then is done at the usual speed.
        """
        today = float(work_3 @ self.coefficients_3)
        seconds = min(today, self.lasted) + max(0.0, today - self.lasted) * self.usual
        of_fit = float(work_3 @ self.covariance_33 @ work_3)
        mean_tokens = work_3[1] / max(work_3[0], 1.0)
        share = MODEL_SHARE + OTHER_LENGTHS_SHARE * abs(float(np.log(max(mean_tokens, 1.0) / max(self.recent_tokens, 1.0))))
        of_change = STAYS * (today - seconds)
        return seconds, float(np.sqrt(of_fit + self.noise**2 * seconds + (share * seconds) ** 2 + of_change**2))


def fit_windows(x_w3: Floats, seconds_w: Floats, weight_w: Floats) -> Fitted:
    """Fits windows in order of time. `weight_w`: how much each says about the conditions that are asked for (0 to 1).

    All windows say how cost grows with length; how fast the engine is now, only those since its speed last changed: the older ones
    are brought to today's speed first.
    """
    usable_w = weight_w * _without_pauses(x_w3, seconds_w)
    # Windows with other numbers in flight tell of lengths only: a canary's, behind a run, would make the run's last one a change.
    used = _used(usable_w)
    speed_w = np.where(used, usable_w, 0.0)
    recent, factor = _last_change(x_w3[used], seconds_w[used], usable_w[used])
    changed_at = int(np.flatnonzero(used)[-recent]) if recent < np.count_nonzero(used) else 0
    coefficients_3, robust_w = _fit(x_w3, _at_todays_speed(seconds_w, len(seconds_w) - changed_at, factor), usable_w)
    expected_w = np.maximum(x_w3 @ coefficients_3, 1e-12)
    since_w = np.where(np.arange(len(seconds_w)) < changed_at, 0.0, speed_w)
    coefficients_3 = coefficients_3 * _level(expected_w, seconds_w, since_w)
    expected_w = np.maximum(x_w3 @ coefficients_3, 1e-12)
    noise, usual = _noise(expected_w, seconds_w, since_w), 1.0
    goes = float(np.clip((LARGE_CHANGE - abs(np.log(factor))) / (LARGE_CHANGE - SMALL_CHANGE), 0, 1)) if changed_at else 0.0
    if goes:
        usual = _level(expected_w, seconds_w, speed_w)
        noise = max(noise, goes * _noise(expected_w * usual, seconds_w, speed_w))
        usual = float(np.clip(usual, min(factor, 1 / factor), max(factor, 1 / factor)) ** goes)
    covariance_33 = _covariance(x_w3, expected_w, usable_w * robust_w, since_w, coefficients_3, noise)
    lasted = float(seconds_w[since_w > 0].sum())
    return Fitted(coefficients_3, covariance_33, noise, _lately(x_w3[used]), usual, lasted)


def _lately(x_w3: Floats) -> float:
    """Mean tokens a request of the latest windows."""
    latest_w3 = x_w3[-max(FEWEST_RECENT, len(x_w3) // 4) :]
    return float(latest_w3[:, 1].sum() / latest_w3[:, 0].sum())


def non_negative_least_squares(x_wk: Floats, y_w: Floats) -> Floats:
    """argmin |x c - y| with c >= 0, exactly: the best of the unconstrained solutions over the subsets of the few columns."""
    columns = x_wk.shape[1]
    scale_k = np.linalg.norm(x_wk, axis=0)
    scale_k[scale_k == 0] = 1.0
    scaled_wk = x_wk / scale_k
    # A trace on the diagonal settles columns that are multiples of each other (windows of one length only).
    gram_kk = scaled_wk.T @ scaled_wk + 1e-10 * np.eye(columns)
    moment_k, total = scaled_wk.T @ y_w, float(y_w @ y_w)
    best_k, best_error = np.zeros(columns), total
    for subset in range((1 << columns) - 1, 0, -1):
        chosen = [k for k in range(columns) if subset >> k & 1]
        solution = np.linalg.solve(gram_kk[np.ix_(chosen, chosen)], moment_k[chosen])
        if (solution < 0).any():
            continue
        error = total - float(moment_k[chosen] @ solution)
        if error < best_error - 1e-12 * total:
            best_error = error
            best_k = np.zeros(columns)
            best_k[chosen] = solution
        if len(chosen) == columns:
            break  # nothing constrained can be better
    return best_k / scale_k


def _without_pauses(x_w3: Floats, seconds_w: Floats) -> Floats:
    """0 for windows with a pause, 1 for the others."""
    ratio_w = seconds_w / np.maximum(x_w3 @ _fit(x_w3, seconds_w, np.ones_like(seconds_w))[0], 1e-12)
    return (ratio_w <= PAUSE * _local_median(ratio_w)).astype(np.float64)


def _fit(x_w3: Floats, seconds_w: Floats, weight_w: Floats, rounds: int = 5) -> tuple[Floats, Floats]:
    """(coefficients, robust weights): variance grows with a window's length; older windows count less; biweight."""
    base_w = weight_w * np.maximum(0.5 ** (np.arange(len(seconds_w))[::-1] / AGE_WINDOWS), 0.05)
    expected_w, robust_w = seconds_w, np.ones_like(seconds_w)
    coefficients_3 = np.zeros(3)
    for _ in range(rounds):
        root_w = np.sqrt(base_w * robust_w / np.maximum(expected_w, 1e-12))
        coefficients_3 = non_negative_least_squares(x_w3 * root_w[:, None], seconds_w * root_w)
        expected_w = np.maximum(x_w3 @ coefficients_3, 1e-12)
        residual_w = (seconds_w - expected_w) / np.sqrt(expected_w)
        robust_w = np.maximum(_biweight(residual_w), 1e-3)
    return coefficients_3, robust_w


def _at_todays_speed(seconds_w: Floats, recent: int, factor: float) -> Floats:
    today_w = seconds_w.copy()
    today_w[: len(today_w) - recent] *= factor
    return today_w


def _last_change(x_w3: Floats, seconds_w: Floats, weight_w: Floats) -> tuple[int, float]:
    """(windows since the engine's speed last changed, what times of older windows are to be multiplied by).

    Tries changes at a row of places and takes the one that leaves least unexplained, if that is much less than without a change.
    How much of a difference is the speed's and how much that of the lengths is settled by turns.
    """
    count = len(seconds_w)
    coefficients_3 = _fit(x_w3, seconds_w, weight_w, rounds=2)[0]
    noise = _noise(np.maximum(x_w3 @ coefficients_3, 1e-12), seconds_w, weight_w, level_free=True)
    without = best = _unexplained(x_w3 @ coefficients_3, seconds_w, weight_w, noise)
    found = (count, 1.0)
    places = _spread_places(FEWEST_RECENT, count - FEWEST_RECENT, 4 / 3)
    for _ in range(2):
        for recent in places:
            factor, left = _change_at(recent, x_w3, seconds_w, weight_w, noise)
            if left < best and abs(factor - 1) > SMALLEST_CHANGE:
                best, found = left, (recent, factor)
        if found[0] == count:
            break
        # Once more around the best place: a window on the wrong side of a change is an outlier on its side.
        places = [round(found[0] * share) for share in (0.86, 0.91, 0.95, 1.05, 1.1, 1.15)]
        places = [place for place in places if FEWEST_RECENT <= place <= count - FEWEST_RECENT]
    return found if without - best > CHANGE else (count, 1.0)


def _spread_places(first: int, last: int, ratio: float) -> list[int]:
    places: list[int] = []
    while first <= last:
        places.append(first)
        first = max(first + 4, round(first * ratio))
    return places


def _change_at(recent: int, x_w3: Floats, seconds_w: Floats, weight_w: Floats, noise: float) -> tuple[float, float]:
    """(factor for the older windows, what is left unexplained) of a change before the last `recent` windows."""
    factor, now = 1.0, 1.0
    expected_w = seconds_w
    for _ in range(CHANGE_ROUNDS):
        coefficients_3 = _fit(x_w3, _at_todays_speed(seconds_w, recent, factor), weight_w, rounds=2)[0]
        expected_w = np.maximum(x_w3 @ coefficients_3, 1e-12)
        now = _level(expected_w[-recent:], seconds_w[-recent:], weight_w[-recent:])
        factor = now / _level(expected_w[:-recent], seconds_w[:-recent], weight_w[:-recent])
    return factor, _unexplained(expected_w * now, _at_todays_speed(seconds_w, recent, factor), weight_w, noise)


def _unexplained(expected_w: Floats, seconds_w: Floats, weight_w: Floats, noise: float) -> float:
    """Sum of squared residuals in units of the noise; an outlier counts no more than three times that."""
    square_w = np.square(seconds_w - expected_w) / np.maximum(expected_w, 1e-12) / noise**2
    return float(weight_w @ np.minimum(square_w, 9.0))


def _level(expected_w: Floats, seconds_w: Floats, weight_w: Floats) -> float:
    """Seconds a second expected: a mean, since stalls that come again and again are part of the engine's speed."""
    total = float(expected_w @ weight_w)
    return max(float(seconds_w @ weight_w) / total, 1e-9) if total > 0 else 1.0


def _total(expected_w: Floats, weight_w: Floats) -> float:
    return max(float(expected_w @ weight_w), 1e-9)


def _noise(expected_w: Floats, seconds_w: Floats, weight_w: Floats, *, level_free: bool = False) -> float:
    """Seconds a root second: the largest over blocks of 1, 2, 4 … windows, since neighbours vary together."""
    used = _used(weight_w)
    expected_w, seconds_w = expected_w[used], seconds_w[used]
    if level_free:
        expected_w = expected_w * _local_median(seconds_w / expected_w)
    largest, block = 0.0, 1
    while block == 1 or len(seconds_w) >= FEWEST_BLOCKS * block:
        starts = np.arange(0, len(seconds_w), block)
        expected_b = np.add.reduceat(expected_w, starts) if len(starts) else expected_w
        residual_b = np.add.reduceat(seconds_w, starts) - expected_b if len(starts) else expected_w
        square = float(np.mean(np.square(residual_b) / np.maximum(expected_b, 1e-12))) if len(starts) else 0.0
        largest = max(largest, square)
        block *= 2
    few = 1 + 4 / max(len(seconds_w), 1)
    return float(np.sqrt(largest) * few) if len(seconds_w) > 1 else 0.3 * float(np.sqrt(expected_w.sum()))


def _used(weight_w: Floats) -> NDArray[np.bool_]:
    """Windows of the conditions that are asked for, or what is nearest to them."""
    return weight_w > 0.1 * weight_w.max(initial=0)


def _covariance(
    x_w3: Floats, expected_w: Floats, weight_w: Floats, since_w: Floats, coefficients_3: Floats, noise: float
) -> Floats:
    """How far the coefficients may be off: the shape by all windows, the level by those since the last change."""
    prior_33 = np.diag(1 / np.maximum(coefficients_3, 1e-15) ** 2)  # each is known to about its own size at worst
    active = coefficients_3 > 0
    scaled_w3 = x_w3 * np.sqrt(weight_w / np.maximum(expected_w, 1e-12))[:, None]
    information_33 = scaled_w3.T @ scaled_w3 / max(noise**2, 1e-12) + prior_33
    covariance_33 = np.zeros((3, 3))
    covariance_33[np.ix_(active, active)] = np.linalg.inv(information_33[np.ix_(active, active)])
    level_error2 = noise**2 / _total(expected_w, since_w)
    return covariance_33 + level_error2 * np.outer(coefficients_3, coefficients_3)


def _local_median(values_w: Floats, span: int = 9) -> Floats:
    """Running median."""
    if len(values_w) < span:
        return np.full_like(values_w, np.median(values_w)) if len(values_w) else values_w
    padded = np.pad(values_w, span // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, span), axis=1)


def _biweight(residual_w: Floats) -> Floats:
    """Tukey's weights (Beaton and Tukey 1974), by the median absolute deviation."""
    spread = max(1.4826 * float(np.median(np.abs(residual_w))), 1e-9) if len(residual_w) > 2 else float(np.inf)
    u_w = residual_w / (TUKEY * spread)
    return np.where(np.abs(u_w) < 1, (1 - u_w**2) ** 2, 0.0)


def in_flight_weights(observed_w: Floats, asked: int | None) -> Any:
    """Windows with about the number in flight that is asked for count most; others only where there are few of those."""
    if asked is None:
        return np.ones_like(observed_w)
    distance_w = np.abs(np.log2(np.maximum(observed_w, 1.0) / max(asked, 1)))
    return np.exp2(-4 * distance_w) + 1e-6
