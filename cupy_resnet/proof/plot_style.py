"""How every figure looks: one palette that colour-blind readers can tell apart, one way to make and to store one.

Matplotlib is imported on first use, and only its object interface: no window, no backend, no state shared with the
caller's own figures.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..weights_store.writing import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "black": "black",
    "yellow": "#F0E442",
}
"""Okabe and Ito's palette (Color Universal Design, 2008), the ones that print darkest first."""

COLORS = tuple(OKABE_ITO.values())
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""One per colour, so that a series can be told apart in grey as well."""

GREY = "#6E6E6E"
"""For what is not a series: ceilings, notes, grid."""

FORMATS = (".png", ".svg", ".pdf")
DPI = 160


def series(index: int) -> dict[str, Any]:
    """Returns colour and marker of the series with this index, as keywords for ``Axes.plot`` and the like."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def new_figure(
    title: str = "", *, rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.5, **subplots: Any
) -> tuple["Figure", Any]:
    """Makes a figure in the house style.

    Args:
        title: above the whole figure, left; empty for none.
        rows, columns: of axes.
        width, height: of the figure in inches.
        subplots: further arguments of ``Figure.subplots``, as ``sharey=True`` or ``width_ratios=[2, 1]``.

    Returns:
        The figure, and what ``Figure.subplots`` returns: one ``Axes``, or an array of them.

    Raises:
        ImportError: Matplotlib is not installed; the message says how to get it.
    """
    figure_class = _figure_class()
    figure = figure_class(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, **subplots)
    for each in figure.axes:
        style(each)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, axes


def style(axes: "Axes") -> None:
    """Gives axes that were made elsewhere (``twinx``, ``add_subplot``) the house style."""
    axes.set_prop_cycle(color=COLORS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color="#D9D9D9", linewidth=0.6)
    axes.tick_params(labelsize=9)
    for text, size in ((axes.xaxis.label, 9.5), (axes.yaxis.label, 9.5), (axes.title, 10)):
        text.set_fontsize(size)


def render(figure: "Figure", suffix: str = ".png", *, dpi: int = DPI) -> bytes:
    """Returns a figure as the content of a file.

    Args:
        figure: as `new_figure` returns it.
        suffix: one of `FORMATS`.
        dpi: dots per inch of a PNG.

    Raises:
        ValueError: another suffix.
    """
    if suffix.lower() not in FORMATS:
        raise ValueError(f"a plot is written as {', '.join(FORMATS)}, not as {suffix or 'a file without a suffix'}")
    from matplotlib import rc_context

    # Text stays text in an SVG, and neither date nor random identifiers make two equal plots differ.
    content = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cupy_resnet"}):
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix.lower())
        figure.savefig(content, format=suffix.lower().removeprefix("."), dpi=dpi, metadata=metadata)
    return content.getvalue()


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a figure to a file, atomically; the suffix, one of `FORMATS`, says in which format.

    Raises:
        ValueError: another suffix.
        OSError: the file cannot be written.
    """
    write_file(path, render(figure, path.suffix))


def check_plot_path(path: Path) -> None:
    """Raises what `save_figure` would raise for lack of Matplotlib or for the suffix: before a long measurement."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a plot is written as {', '.join(FORMATS)}, but {path} ends in none of these")
    _figure_class()


def _figure_class() -> type["Figure"]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need Matplotlib: pip install 'cupy-resnet[notebooks]'") from error
    return Figure
