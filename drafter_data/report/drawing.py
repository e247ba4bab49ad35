"""Drawing with matplotlib, imported only when something is drawn, without its global state: threads may draw at the same time."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 100
INK, FAINT, BLUE, GREEN, LIGHT_GREEN, RED, AMBER = "#24292f", "#d0d7de", "#0b62d6", "#1a7f37", "#9ad8a8", "#cf222e", "#d4870b"


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure on the Agg canvas, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=DOTS_PER_INCH, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title, labels, and a frame that does not draw the eye."""
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(True, color=FAINT, linewidth=0.5, alpha=0.7)
    axes.set_axisbelow(True)


def plain_numbers(axis: Any) -> None:
    """Ticks such as 128 and 1,500 also on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def plain(value: float, _: int | None) -> str:
        return f"{value:,.10g}"

    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(NullFormatter())


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG with a palette of 128 colours, a third of the size (Pillow comes with matplotlib)."""
    plain = io.BytesIO()
    figure.savefig(plain, format="png")
    from PIL import Image

    small = io.BytesIO()
    Image.open(plain).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    return small.getvalue()


def embedded(png: bytes, what: str) -> str:
    """Markdown that shows `png` in place; `what` is for those who cannot see it."""
    return f"![{what}](data:image/png;base64,{base64.b64encode(png).decode()})"
