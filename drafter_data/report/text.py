"""Pictures of one line, for terminals, and tables for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from data_contracts.validation import RecheckStatistics

_STEPS = "▁▂▃▄▅▆▇█"


def sparkline(values_n: NDArray[np.float64] | Sequence[float], width: int = 60) -> str:
    """One letter a step, from the smallest value to the largest; more values than `width` are averaged in equal groups."""
    values = np.asarray(values_n, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    if len(values) > width:
        values = np.array([group.mean() for group in np.array_split(values, width)])
    low, high = float(values.min()), float(values.max())
    steps = np.zeros(len(values)) if high == low else (values - low) / (high - low) * (len(_STEPS) - 1)
    return "".join(_STEPS[round(float(step))] for step in steps)


def bar(share: float, width: int = 30) -> str:
    """`█████░░░░░`"""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def rechecks_text(again: RecheckStatistics) -> str:
    """What was extracted twice, and how far apart it was."""
    return (
        f"{again.compared:,} extracted a second time ({again.earlier:,} from the beginning of the run): largest deviation "
        f"{again.largest:.2g}, tolerance {again.tolerance:.2g}, {len(again.differing)} beyond it; "
        f"{again.chunks_without} of {again.chunks} chunks without one"
    )


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows that share their columns; numbers are set right, and a cell stays one cell whatever it holds."""
    if not rows:
        return ""
    names = list(rows[0])
    right = [all(isinstance(row[name], (int, float)) for row in rows) for name in names]
    lines = [_line([_cell(name) for name in names]), _line(["---:" if is_number else "---" for is_number in right])]
    return "\n".join([*lines, *(_line([_cell(row[name]) for name in names]) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
