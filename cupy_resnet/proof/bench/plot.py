"""A comparison as a picture: throughput and latency against the batch size, for ours and every rival."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..plot_style import GREY, new_figure, series
from .report import Entry, Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_report(report: Report) -> "Figure":
    """Draws a comparison: one line of panels per network and precision, throughput left, latency right.

    Throughput is that of calls back to back, at their median. Latency is that of single calls: the median as a line,
    p10 to p90 as a band around it. Both axes are logarithmic. What was measured wrong is left out and named below.

    Args:
        report: with at least one row.

    Raises:
        ValueError: a report without rows.
        ImportError: Matplotlib is not installed.
    """
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in report.rows:
        groups.setdefault((row.model, row.precision, row.size), []).append(row)
    if not groups:
        raise ValueError("there is nothing to plot: the report has no rows")
    names = _names(report.rows)
    versions = report.machine["versions"]
    where = report.machine["device"] if report.rows[0].engine == "cuda" else report.machine.get("processor", "CPU")
    figure, panels = new_figure(
        f"cupy_resnet and PyTorch {versions.get('torch', '')} on {where}",
        rows=len(groups),
        columns=2,
        width=9.5,
        height=0.9 + 3.2 * len(groups),
        squeeze=False,
    )
    for (throughput, latency), ((model, precision, size), rows) in zip(panels, groups.items(), strict=True):
        ordered = sorted(rows, key=lambda row: row.N)
        for index, name in enumerate(names):
            _draw(throughput, latency, ordered, name, index)
        _finish(throughput, ordered, f"{model}, {precision}, {size} × {size}", "throughput / (images/s)")
        _finish(latency, ordered, "", "latency of a single call / ms")
    # constrained layout makes room for a legend of the figure only where it is "outside"
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9, frameon=False)
    figure.supxlabel(_note(report), x=0.01, ha="left", fontsize=7.5, color=GREY)
    return figure


def _names(rows: Sequence[Row]) -> list[str]:
    """Every contender, ours first, so that a colour means the same in all panels."""
    entries = [entry for row in rows for entry in row.entries]
    return list(dict.fromkeys(entry.name for entry in sorted(entries, key=lambda entry: not entry.ours)))


def _draw(throughput: "Axes", latency: "Axes", rows: Sequence[Row], name: str, index: int) -> None:
    points: list[tuple[Row, Entry]] = [
        (row, entry) for row in rows for entry in row.entries if entry.name == name and entry.wrong is None
    ]
    if not points:
        return
    look: dict[str, Any] = series(index) | {"markersize": 5, "linewidth": 1.5, "label": name}
    if points[0][1].ours:
        look |= {"linewidth": 2.6, "markersize": 6.5, "zorder": 4}
    batches = [row.N for row, _ in points]
    throughput.plot(batches, [row.images_per_second(entry) for row, entry in points], **look)
    latency.plot(batches, [entry.latency.median for _, entry in points], **look)
    low, high = [entry.latency.p10 for _, entry in points], [entry.latency.p90 for _, entry in points]
    latency.fill_between(batches, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _finish(axes: "Axes", rows: Sequence[Row], title: str, unit: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    batches = sorted({row.N for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if high / low < 100:  # powers of ten alone would leave one label or none
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("images in a batch")
    axes.set_ylabel(unit)


def _note(report: Report) -> str:
    samples = sorted({entry.latency.count for row in report.rows for entry in row.entries})
    count = f"{samples[0]}" if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    note = (
        f"Contenders took turns call by call; {count} calls each. Line: median; band: p10 to p90. "
        f"{report.machine['date']}."
    )
    wrong = {entry.name for row in report.rows for entry in row.entries if entry.wrong is not None}
    return note + (f" Wrong results in some rows, not drawn there: {', '.join(sorted(wrong))}." if wrong else "")
