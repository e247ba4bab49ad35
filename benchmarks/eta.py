"""The ETA on simulated campaigns, beside the extrapolation of samples a second on the same ones.

Campaigns: short, long, bimodal, sorted up and sorted down lengths; steady, a drift of the engine's speed by 30 %, or a restart in
the middle; 1, 4, 16 or 32 in flight; half with a history of another data set on the same engine, half with probes only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.campaigns import EVENTS, SHAPES, Campaign, Point, all_campaigns, run
from benchmarks.reporting import Cell, Result, publish

COLUMNS = (
    "lengths", "event", "points", "median error", "90 % of errors below", "interval covers", "half width", "before the first chunk",
    "samples/s: median", "samples/s: 90 % below",
)  # fmt: skip
Ran = Sequence[tuple[Campaign, list[Point]]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=14, help="campaigns of each lengths and event")
    parser.add_argument("--samples", type=int, default=5000, help="samples a campaign")
    options = parser.parse_args()
    campaigns = all_campaigns(options.repeats, options.samples)
    with ProcessPoolExecutor() as pool:
        ran = list(zip(campaigns, pool.map(run, campaigns), strict=True))
    rows = [_row(ran, shape, event) for event in EVENTS for shape in SHAPES]
    rows += [_row(ran, "all", event) for event in (*EVENTS, "all")]
    steady = settled(ran, "all", "steady")
    changed = [point for event in ("drift", "restart") for point in settled(ran, "all", event)]
    first = before(ran, "all")
    covered = np.mean([point.covered for point in settled(ran, "all", "all")])
    publish(
        Result(
            name="eta",
            title=f"ETA: error of the remaining time in {len(ran)} simulated campaigns of {options.samples:,} samples",
            command="python -m benchmarks.eta",
            columns=COLUMNS,
            rows=rows,
            goals={
                "steady, median error from 5 % of the tokens on (goal < 5 %)": f"{median_error(steady):.1%}",
                "steady, before the first chunk (goal < 15 %)": f"{median_error(first):.1%} (median)",
                "10 % of the tokens after a drift or restart (goal < 10 %)": f"{median_error(changed):.1%} (median)",
                "the 90 % interval covers (goal 85-97 %)": f"{covered:.1%}",
                "samples a second, steady, median and 90 % below": f"{_quantile(steady, 0.5):.1%}, {_quantile(steady, 0.9):.0%}",
            },
            notes=[
                "points: forecasts at each twentieth of the tokens; those before a drift or restart, and within 10 % of the tokens "
                "after it, cannot be right and are left out on both sides",
                "`before the first chunk` is the median of steady campaigns; an extrapolation has nothing to say there",
            ],
        )
    )


def settled(ran: Ran, shape: str, event: str) -> list[Point]:
    """Forecasts from 5 % of the tokens on that could be right."""
    return [
        point
        for campaign, points in ran
        if shape in ("all", campaign.shape) and event in ("all", campaign.event)
        for point in points
        if point.settled and point.progress > 0
    ]


def before(ran: Ran, shape: str) -> list[Point]:
    """Forecasts before the first chunk of steady campaigns."""
    return [points[0] for campaign, points in ran if campaign.event == "steady" and shape in ("all", campaign.shape)]


def median_error(points: Sequence[Point]) -> float:
    """Median of the relative errors of the remaining time."""
    return float(np.median([point.error for point in points]))


def _quantile(points: Sequence[Point], q: float) -> float:
    return float(np.quantile([point.extrapolation_error for point in points], q))


def _row(ran: Ran, shape: str, event: str) -> list[Cell]:
    points = settled(ran, shape, event)
    widths = [(point.high_seconds - point.low_seconds) / 2 / point.forecast_seconds for point in points]
    first = f"{median_error(before(ran, shape)):.1%}" if event == "steady" else ""
    return [
        shape,
        event,
        len(points),
        f"{median_error(points):.1%}",
        f"{np.quantile([point.error for point in points], 0.9):.1%}",
        f"{np.mean([point.covered for point in points]):.0%}",
        f"{np.median(widths):.1%}",
        first,
        f"{_quantile(points, 0.5):.1%}",
        f"{_quantile(points, 0.9):.0%}",
    ]


if __name__ == "__main__":
    main()
