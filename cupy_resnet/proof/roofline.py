"""The roofline: every operation by its operations per byte, below what memory and arithmetic allow.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (CACM 2009).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .plot_style import GREY, new_figure, series
from .profiling.results import Profile, Roof

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = 6
"""Points that are named: those that take the most time."""

FIGURE_SPACE = "\u2007"
"""As wide as a digit."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One operation in the diagram.

    Args:
        label: what it is; points with the same label are alike, and named once.
        group: its colour and marker, as the kernel's name.
        intensity: operations per byte, more than 0.
        tflops: 10¹² operations per second.
        share: of the total time, 0 to 1.
    """

    label: str
    group: str
    intensity: float
    tflops: float
    share: float


def plot_profile(profile: Profile) -> "Figure":
    """Draws a profile's operations; those without arithmetic have no place in the diagram and are counted in a note."""
    alike: dict[tuple[str, ...], list[Any]] = {}
    for op in profile.ops:
        alike.setdefault((op.op, op.problem, op.kernel, op.config), []).append(op)
    points = []
    for ops in alike.values():
        label = (ops[0].short_layer or f"{ops[0].op} {ops[0].problem}") + (
            f" and {len(ops) - 1} alike" if len(ops) > 1 else ""
        )
        points += [
            Point(label=label, group=op.kernel, intensity=op.intensity, tflops=op.tflops, share=op.share)
            for op in ops
            if op.flops
        ]
    N, C, H, W = profile.input_shape
    figure = plot_roofline(
        points,
        profile.roof,
        title=f"{profile.model}, {N} × {C} × {H} × {W}, {profile.precision}, {profile.engine} engine",
    )
    left_out = [op for op in profile.ops if not op.flops]
    note = f"{profile.ceilings.device}. Operations timed one by one, launch overlap off, median of {profile.samples}."
    if left_out:
        note += f" Not shown: {len(left_out)} without arithmetic, {sum(op.share for op in left_out):.1%} of the time."
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color=GREY)
    return figure


def plot_roofline(points: Sequence[Point], roof: Roof, *, title: str = "", labels: int = LABELS) -> "Figure":
    """Draws points below a roof, both axes logarithmic; a point's area is its share of the time.

    Args:
        points: at least one.
        roof: its slope is the memory's, its flat part the arithmetic's, if that is known.
        title: above the figure.
        labels: how many sets of points with the same label are named, those with the largest share first; 0 for none.
    """
    figure, axes = new_figure(title, width=9.0, height=5.0)
    unit, scale = ("TFLOP/s", 1.0) if max(point.tflops for point in points) >= 0.5 else ("GFLOP/s", 1e3)
    _draw_roof(axes, points, roof, scale, unit)
    groups = list(dict.fromkeys(point.group for point in sorted(points, key=lambda p: -p.share)))
    for index, group in enumerate(groups):
        mine = [point for point in points if point.group == group]
        style = series(index)
        axes.scatter(
            [point.intensity for point in mine],
            [point.tflops * scale for point in mine],
            s=[20 + 900 * point.share for point in mine],
            label=group,
            alpha=0.75,
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
            **style,
        )
    axes.set_xlabel("operations per byte moved / (FLOP/B)")
    axes.set_ylabel(f"rate / ({unit})")
    legend = axes.legend(
        title="kernel", loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, title_fontsize=8.5, frameon=False
    )
    legend.set_alignment("left")
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    largest = _tell_largest(axes, points, labels)
    figure.draw_without_rendering()  # the axes have their final size: angles and distances can be had
    _name_slope(axes, slope=roof.bytes_per_s / 1e12 * scale, name=f"memory {_bandwidth(roof.bytes_per_s)}")
    _number(axes, points, largest, scale)
    return figure


def _draw_roof(axes: "Axes", points: Sequence[Point], roof: Roof, scale: float, unit: str) -> None:
    slope = roof.bytes_per_s / 1e12 * scale  # of the rate over operations per byte
    ridge = roof.ridge
    reach = [point.intensity for point in points] + ([ridge] if ridge else [])
    left, right = min(reach) / 2, max(reach) * 3
    xs = np.array([left, ridge or right, right])
    top = roof.flops_per_s / 1e12 * scale if roof.flops_per_s else np.inf
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(xs, np.minimum(slope * xs, top), color=GREY, linewidth=1.6, zorder=2)
    floor = min(point.tflops * scale for point in points) / 2
    ceiling = max(min(top, slope * right), max(point.tflops * scale for point in points)) * 2.5
    axes.set_xlim(left, right)
    axes.set_ylim(floor, ceiling)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    if ridge:
        name = f"{roof.compute} {top:.3g} {unit}"
        axes.text(right * 0.95, top * 1.08, name, color=GREY, fontsize=8.5, ha="right", va="bottom")


def _name_slope(axes: "Axes", *, slope: float, name: str) -> None:
    """Writes along the memory's line, a little inside of where it enters the picture."""
    origin, corner = axes.transAxes.transform([(0, 0), (1, 1)])
    width, height = (np.ptp(np.log10(limits)) for limits in (axes.get_xlim(), axes.get_ylim()))
    angle = np.degrees(np.arctan2((corner[1] - origin[1]) / height, (corner[0] - origin[0]) / width))
    x = max(axes.get_xlim()[0], axes.get_ylim()[0] / slope) * 1.5
    text: dict[str, Any] = {"color": GREY, "fontsize": 8.5, "rotation": float(angle), "rotation_mode": "anchor"}
    axes.annotate(name, (x, slope * x), (-3, 5), textcoords="offset points", **text)


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e12:.2f} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.3g} GB/s"


def _tell_largest(axes: "Axes", points: Sequence[Point], labels: int) -> list[list[Point]]:
    """Lists beside the diagram what takes the most time, numbered; returns those points, number by number."""
    sets: dict[str, list[Point]] = {}
    for point in points:
        sets.setdefault(point.label, []).append(point)
    shares = {label: sum(point.share for point in members) for label, members in sets.items()}
    largest = sorted(shares, key=lambda label: -shares[label])[:labels]
    if not largest:
        return []
    lines = [
        f"{n}   {f'{shares[label]:4.0%}'.replace(' ', FIGURE_SPACE)}   {label}" for n, label in enumerate(largest, 1)
    ]
    text = "\n".join(["share of the time", *lines])
    axes.text(1.02, 0.0, text, transform=axes.transAxes, fontsize=8, va="bottom", linespacing=1.5)
    return [sets[label] for label in largest]


def _number(axes: "Axes", points: Sequence[Point], largest: Sequence[Sequence[Point]], scale: float) -> None:
    """Puts the numbers of `_tell_largest` near their points, where they hide neither points nor words."""
    occupied = [axes.transData.transform((point.intensity, point.tflops * scale)) for point in points]
    for text in axes.texts:
        box = text.get_window_extent()
        occupied += [np.array([x, (box.y0 + box.y1) / 2]) for x in np.linspace(box.x0, box.x1, 7)]
    for number, members in enumerate(largest, 1):
        x = float(np.median([point.intensity for point in members]))
        y = float(np.median([point.tflops for point in members])) * scale
        place = _free_place(axes.transData.transform((x, y)), occupied)
        occupied.append(place)
        axes.annotate(
            str(number),
            (x, y),
            tuple(axes.transData.inverted().transform(place)),
            fontsize=8.5,
            fontweight="bold",
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6},
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": GREY, "linewidth": 0.6},
            zorder=4,
        )


def _free_place(point: np.ndarray, occupied: Sequence[np.ndarray]) -> np.ndarray:
    """Where near `point` a number is farthest from everything else; in pixels."""
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    candidates = [point + radius * np.array([np.cos(a), np.sin(a)]) for radius in (34, 54) for a in angles]
    return max(candidates, key=lambda place: min(float(np.hypot(*(place - other))) for other in occupied))
