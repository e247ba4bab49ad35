"""The pictures: lengths, an extraction on its way, norms of a validated store, a training curve. Each returns a small PNG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from data_contracts.handoff import TrainingPoint
from data_contracts.lengths import LengthProfile
from data_contracts.validation import LayerStatistics
from drafter_data.report.chunks import STATES, ChunkState
from drafter_data.report.drawing import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    LIGHT_GREEN,
    RED,
    dress,
    new_figure,
    plain_numbers,
    png_of,
)
from drafter_data.report.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 9.0
SHOWN_SOURCES = 20
_COLOURS: dict[ChunkState, str] = {
    "stored": GREEN,
    "at work": BLUE,
    "failed": RED,
    "partly": LIGHT_GREEN,
    "waiting": FAINT,
}


def lengths_picture(profile: LengthProfile) -> bytes:
    """Above how many samples have which length, below each run's quantiles, on one logarithmic axis of tokens."""
    groups = profile.groups[: SHOWN_SOURCES + 1]
    figure = new_figure(WIDTH, 2.6 + 0.28 * len(groups))
    histogram, quantiles = figure.subplots(2, 1, sharex=True, height_ratios=(2.0, 0.6 + 0.28 * len(groups)))
    _histogram(histogram, profile)
    for row, group in enumerate(groups):
        at = group.quantiles_tokens
        quantiles.plot([at["min"], at["max"]], [row, row], color=FAINT, linewidth=1.5, zorder=2)
        quantiles.plot([at["p10"], at["p90"]], [row, row], color=BLUE, linewidth=4, alpha=0.35, solid_capstyle="butt", zorder=3)
        quantiles.plot([at["p25"], at["p75"]], [row, row], color=BLUE, linewidth=10, solid_capstyle="butt", zorder=4)
        quantiles.plot([at["p50"]], [row], "|", color="white", markersize=9, markeredgewidth=2, zorder=5)
        quantiles.plot([at["p99"]], [row], "d", color=AMBER, markersize=5, zorder=5)
    dress(quantiles, "By run: median, p25 to p75 (thick), p10 to p90, p99 (diamond), shortest to longest", "tokens a sample")
    quantiles.set_yticks(range(len(groups)), [_short(group.run) for group in groups])
    quantiles.set_ylim(len(groups) - 0.4, -0.6)
    return png_of(figure)


def _histogram(axes: Axes, profile: LengthProfile) -> None:
    lower = np.array(profile.histogram_lower_tokens or (1,), dtype=np.float64)
    samples = profile.histogram_samples or (0,)
    bars = axes.bar(lower, samples, width=lower, align="edge", color=BLUE, alpha=0.8, edgecolor="white")
    axes.bar_label(bars, labels=[f"{count:,}" if count else "" for count in samples], fontsize=8, color=INK, padding=1)
    axes.set_xscale("log", base=2)
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.margins(y=0.15)
    filled = np.flatnonzero(samples)
    if len(filled):
        axes.set_xlim(float(lower[filled[0]]) / 1.2, float(lower[filled[-1]]) * 2.4)
    dress(axes, f"Lengths of all {sum(samples):,} samples", y="samples")


def extraction_picture(history: History, chunks: Sequence[ChunkState]) -> bytes:
    """Forecast against progress and throughput over time, and below them the chunk grid by state, where there are chunks."""
    columns = _grid_columns(len(chunks))
    grid = (math.ceil(len(chunks) / columns) * WIDTH / columns + 0.45) if chunks else 0.0
    figure = new_figure(WIDTH, 3.1 + grid)
    parts = figure.subfigures(2 if chunks else 1, 1, height_ratios=(3.1, grid) if chunks else None, squeeze=False)[:, 0]
    progress, rate = parts[0].subplots(1, 2)
    unit, seconds = _time_unit(history)
    _progress(progress, history, unit, seconds)
    _throughput(rate, history, unit, seconds)
    if chunks:
        _grid(parts[1].subplots(1, 1), chunks, columns)
    return png_of(figure)


def _time_unit(history: History) -> tuple[str, float]:
    longest = float(history.elapsed_n[-1]) if len(history.elapsed_n) else 0.0
    if history.latest is not None:
        longest += history.latest.seconds
    for unit, seconds in (("s", 1.0), ("min", 60.0)):
        if longest < 180 * seconds:
            return unit, seconds
    return "h", 3600.0


def _horizon(history: History) -> float:
    """Seconds that the axis shows: to the end of the forecasts' intervals, unless these are guesses far beyond the rest."""
    left, first = history.latest, history.first
    now = float(history.elapsed_n[-1]) if len(history.elapsed_n) else 0.0
    likely = max(now + (left.seconds if left is not None else 0.0), first.seconds if first is not None else 0.0, 1.0)
    most = max(now + (left.high_seconds if left is not None else 0.0), first.high_seconds if first is not None else 0.0, likely)
    return 1.04 * min(most, 2 * likely)


def _progress(axes: Axes, history: History, unit: str, unit_seconds: float) -> None:
    elapsed_n, share_n = history.elapsed_n / unit_seconds, 100 * history.share_n
    begin = float(share_n[0]) if len(share_n) else 0.0
    if history.first is not None and history.first.seconds > 0 and begin < 100:
        first = history.first
        low, mid, high = (value / unit_seconds for value in (first.low_seconds, first.seconds, first.high_seconds))
        axes.fill([0, low, high], [begin, 100, 100], color=AMBER, alpha=0.18, linewidth=0, label="forecast at the start, 90 %")
        axes.plot([0, mid], [begin, 100], color=AMBER, linewidth=1.2, linestyle="--")
    axes.plot(elapsed_n, share_n, color=BLUE, linewidth=2, label="done")
    if history.latest is not None and history.latest.samples and len(elapsed_n):
        now, left = float(elapsed_n[-1]), history.latest
        axes.plot([now, now + left.seconds / unit_seconds], [share_n[-1], 100], color=BLUE, linewidth=1.2, linestyle=":")
        interval = [now + left.low_seconds / unit_seconds, now + left.high_seconds / unit_seconds]
        axes.plot(interval, [100, 100], color=BLUE, linewidth=4, alpha=0.5, label="forecast now, 90 %")
    dress(axes, "Forecast against progress", f"elapsed ({unit})", "% of the tokens")
    axes.set_xlim(0, _horizon(history) / unit_seconds)
    axes.set_ylim(0, 104)
    axes.legend(fontsize=8, loc="best", frameon=False)


def _throughput(axes: Axes, history: History, unit: str, unit_seconds: float) -> None:
    dress(axes, "Throughput", f"elapsed ({unit})", "tokens/s")
    if len(history.rate_n) > 1:
        edges_n, rate_n = history.elapsed_n / unit_seconds, history.rate_n[1:]
        usual = float(np.median(rate_n))
        axes.stairs(rate_n, edges_n, color=BLUE, alpha=0.15, fill=True)
        axes.stairs(rate_n, edges_n, color=BLUE, linewidth=1.4, baseline=None)
        axes.axhline(usual, color=INK, linewidth=0.8, linestyle="--")
        axes.set_title(f"median {usual:,.0f}, errors {history.errors:,}", loc="right", fontsize=8, color=INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    plain_numbers(axes.yaxis)


def _grid_columns(chunks: int) -> int:
    """So many that the squares fill a strip a quarter as high as it is wide."""
    return max(40, math.ceil(math.sqrt(4 * chunks)))


def _grid(axes: Axes, chunks: Sequence[ChunkState], columns: int) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows = math.ceil(len(chunks) / columns)
    codes = np.full(rows * columns, -1, dtype=np.int64)
    codes[: len(chunks)] = [STATES.index(state) for state in chunks]
    shown = np.ma.masked_less(codes.reshape(rows, columns), 0)
    colours = ListedColormap([_COLOURS[state] for state in STATES])
    line = 1.2 if columns <= 60 else 0.4
    axes.pcolormesh(shown, cmap=colours, vmin=-0.5, vmax=len(STATES) - 0.5, edgecolors="white", linewidth=line)
    axes.set_ylim(rows, 0)
    axes.set_xlim(0, columns)
    axes.set_axis_off()
    axes.set_title(f"{len(chunks):,} chunks", loc="left", fontsize=10, color=INK, fontweight="bold")
    counts = Counter(chunks)
    present = [Patch(color=_COLOURS[state], label=f"{counts[state]:,} {state}") for state in STATES if counts[state]]
    axes.legend(handles=present, fontsize=8, frameon=False, ncols=len(STATES), loc="lower right", bbox_to_anchor=(1.0, 1.0))


def norms_picture(layers: Sequence[LayerStatistics]) -> bytes:
    """Root mean square of each stored layer over the checked samples, and whether its share of a sample changed over the run."""
    over_run = any(one.ratio_over_run for one in layers)
    figure = new_figure(WIDTH, 3.0)
    plots = figure.subplots(1, 2 if over_run else 1, squeeze=False)[0]
    _norms(plots[0], layers)
    if over_run:
        _ratios(plots[1], layers)
    return png_of(figure)


def _norms(axes: Axes, layers: Sequence[LayerStatistics]) -> None:
    places = np.arange(len(layers))
    low_n, mid_n, high_n = (np.array([getattr(one, name) for one in layers]) for name in ("rms_p01", "rms_p50", "rms_p99"))
    axes.vlines(places, low_n, high_n, color=BLUE, linewidth=9, alpha=0.35)
    axes.plot(places, mid_n, "o-", color=BLUE, linewidth=1, markersize=5)
    for place, mid in zip(places, mid_n, strict=True):
        axes.annotate(f"{mid:.3g}", (place, mid), xytext=(9, 0), textcoords="offset points", fontsize=8, color=INK, va="center")
    dress(axes, "Size by layer: median, p1 to p99 over samples", "layer", "root mean square")
    axes.set_xticks(places, [one.layer for one in layers])
    axes.set_xlim(-0.5, len(layers) - 0.5)
    if len(low_n) and low_n.min() > 0 and high_n.max() / low_n.min() > 30:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def _ratios(axes: Axes, layers: Sequence[LayerStatistics]) -> None:
    """Each layer's ratio to the sample's others, in parts of the run, against its median: a step is an engine that changed."""
    for place, one in enumerate(layers):
        ratio_n = np.array(one.ratio_over_run, dtype=np.float64)
        if len(ratio_n):
            ends_n = 100 * (np.arange(len(ratio_n)) + 0.5) / len(ratio_n)
            off_n = 100 * (ratio_n / np.median(ratio_n) - 1)
            axes.plot(ends_n, off_n, ".-", color=(BLUE, GREEN, AMBER, RED, INK)[place % 5], linewidth=1.2, label=one.layer)
    dress(axes, "Ratio to the other layers, over the run", "% of the run", "% off its median")
    lowest, highest = axes.get_ylim()
    reach = max(5.0, abs(lowest), abs(highest))
    axes.set_ylim(-reach, reach)
    axes.legend(title="layer", title_fontsize=8, fontsize=8, frameon=False, ncols=4, loc="lower left")


def training_picture(points: Sequence[TrainingPoint]) -> bytes:
    """Loss by step, and the accuracy where the trainer reports one."""
    accurate = [point for point in points if point.accuracy is not None]
    figure = new_figure(WIDTH, 2.9)
    plots = figure.subplots(1, 2 if accurate else 1, squeeze=False)[0]
    finite = [point for point in points if math.isfinite(point.loss)]
    plots[0].plot([point.step for point in finite], [point.loss for point in finite], color=BLUE, linewidth=1.5)
    dress(plots[0], "Loss", "step")
    if accurate:
        plots[1].plot([point.step for point in accurate], [100 * (point.accuracy or 0) for point in accurate], color=GREEN)
        dress(plots[1], "Accuracy while training", "step", "%")
        plots[1].set_ylim(bottom=0)
    for axes in plots:
        axes.margins(x=0.02)
        plain_numbers(axes.xaxis)
    return png_of(figure)


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:15]}…{name[-16:]}"
