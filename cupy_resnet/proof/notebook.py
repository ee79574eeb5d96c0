"""What the notebooks share: pictures and tables that any viewer shows, CUDA quoted from its source, where they run."""

import base64
import html
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conv2d import VARIANTS, Conv2dProblem
from ..conv2d.device import H100
from ..engines.cuda_engine import cuda_obstacle, describe_device, find_device
from ..resources import folder
from .clock import CudaClock
from .machine import describe_machine
from .plot_style import OKABE_ITO, new_figure, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NUMBER = re.compile(r"–|[\d.,]+ ?%?")
PICTURE_DPI = 120


class Picture:
    """A figure, kept as the PNG it was drawn to, that a notebook shows at its size in inches.

    Args:
        figure: as `plot_style.new_figure` returns it.
    """

    def __init__(self, figure: "Figure") -> None:
        self._png = render(figure, dpi=PICTURE_DPI)
        self._width = round(96 * figure.get_figwidth())

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        return {"image/png": base64.b64encode(self._png).decode()}, {"image/png": {"width": self._width}}

    def __repr__(self) -> str:
        return f"<a picture, {self._width} pixels wide>"


class Grid:
    """A table.

    Args:
        header: names of the columns.
        rows: cells as text; a column of numbers, with or without ``%``, is set to the right.
    """

    def __init__(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.header, self.rows = list(header), [list(row) for row in rows]

    def _repr_html_(self) -> str:
        columns = [[row[index] for row in self.rows] for index in range(len(self.header))]
        sides = ["right" if all(map(_NUMBER.fullmatch, column)) else "left" for column in columns]

        def line(tag: str, cells: Sequence[str]) -> str:
            styles = [f'<{tag} style="text-align: {side}">' for side in sides]
            return f"<tr>{''.join(f'{s}{html.escape(c)}</{tag}>' for s, c in zip(styles, cells, strict=True))}</tr>"

        return f"<table>{line('th', self.header)}{''.join(line('td', row) for row in self.rows)}</table>"

    def __repr__(self) -> str:
        return "\n".join(" | ".join(row) for row in [self.header, *self.rows])


class Quote:
    """Lines of a CUDA file, highlighted as C++.

    Args:
        name: of the file.
        first: number of the first line.
        lines: as they stand there.
    """

    def __init__(self, name: str, first: int, lines: Sequence[str]) -> None:
        self.name, self.first, self.lines = name, first, list(lines)

    def _repr_markdown_(self) -> str:
        last = self.first + len(self.lines) - 1
        return f"`kernels_cu/{self.name}`, lines {self.first}–{last}:\n\n```cpp\n" + "\n".join(self.lines) + "\n```"

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def quote(kernel: str, begin: str) -> Quote:
    """Quotes a statement, loop or function of a kernel from its source, so that it is what really runs.

    Args:
        kernel: name of a ``.cu`` file without its suffix, or of a header with it, as ``"include/epilogue.cuh"``.
        begin: text of its first line, the first such line in the file; it ends where the braces that it opens close.

    Raises:
        ValueError: the file has no such line.
    """
    name = kernel if kernel.endswith(".cuh") else f"{kernel}.cu"
    lines = (folder("kernels_cu") / name).read_text(encoding="utf-8").splitlines()
    first = next((number for number, line in enumerate(lines) if begin in line), None)
    if first is None:
        raise ValueError(f"kernels_cu/{name} has no line with {begin!r}")
    depth, opened = 0, False
    for last in range(first, len(lines)):
        code = lines[last].partition("//")[0]
        depth += code.count("{") - code.count("}")
        opened = opened or "{" in code
        if depth <= 0 and (opened or code.rstrip().endswith(";")):
            break
    chosen = lines[first : last + 1]
    margin = len(chosen[0]) - len(chosen[0].lstrip())
    return Quote(name, first + 1, [line if line.startswith("#") else line[margin:] for line in chosen])


def head(kernel: str, part: str) -> str:
    """Returns what the head of a kernel's file says under a word, as ``"This rung"``, in one line; empty if nothing."""
    found: list[str] = []
    for line in (folder("kernels_cu") / f"{kernel}.cu").read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        text = line.removeprefix("// ")
        if text.startswith(f"{part} "):
            found.append(text.removeprefix(part).strip())
        elif found and text.startswith("  "):
            found.append(text.strip())
        elif found:
            break
    return " ".join(found)


@dataclass(frozen=True)
class Place:
    """Where a notebook runs.

    Args:
        device: the GPU's name, or None.
        obstacle: why there is none, in a sentence; None with a GPU.
    """

    device: str | None
    obstacle: str | None

    def _repr_markdown_(self) -> str:
        if self.device:
            return f"**This notebook runs on an {self.device}**: what it measures is measured here and now."
        shown = "What is shown was **recorded**; where and when is said beside it."
        return f"**No GPU is used here.** {shown}\n\n*Why: {self.obstacle}.*"

    def __repr__(self) -> str:
        return self._repr_markdown_()


def where_am_i() -> Place:
    """Tells whether there is a GPU to measure on, or why recorded results are shown instead."""
    obstacle = cuda_obstacle()
    return Place(None if obstacle else str(describe_machine(engine="cuda")["device"]), obstacle)


def plot_bars(
    title: str,
    values: Mapping[str, float],
    axis: str,
    *,
    behind: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
    marks: Mapping[str, float] | None = None,
    mark: str = "",
) -> "Figure":
    """Draws a bar for each name.

    Args:
        title: of the figure.
        values: lengths of the bars, from the top.
        axis: what the length is, with its unit.
        behind: lengths of wider, grey bars behind them.
        notes: text at the end of each bar; by default its length.
        marks: where to cross each bar with a line.
        mark: what that line is.
    """
    figure, axes = new_figure(title, height=1.4 + 0.3 * len(values))
    longest = max([*values.values(), *(behind or {}).values(), *(marks or {}).values()])
    for y, (name, value) in enumerate(values.items()):
        back = (behind or {}).get(name, 0.0)
        axes.barh(y, back, height=0.62, color="#E3E3E3")
        axes.barh(y, value, height=0.34 if behind else 0.62, color=OKABE_ITO["blue"])
        end, note = max(value, back), (notes or {}).get(name, f"{value:.1f}")
        if marks and 0 <= marks[name] - end < 0.08 * longest:
            end = marks[name]  # else the line would cross the text
        axes.annotate(note, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
        if marks:
            axes.plot([marks[name]] * 2, [y - 0.4, y + 0.4], color=OKABE_ITO["vermilion"], linewidth=2.5)
    if marks:
        axes.plot([], [], color=OKABE_ITO["vermilion"], linewidth=2.5, label=mark)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, (1.35 if notes else 1.08) * longest)
    axes.set_xlabel(axis)
    return figure


def measure_here(problem: Conv2dProblem, variant: str, config: Any, samples: int = 20) -> float | None:
    """Returns the seconds a kernel takes in a configuration, alone, median over `samples`; None where it cannot run.

    That is without a GPU, and on one that lacks what the kernel multiplies with, or the shared memory that the
    configuration, chosen for an H100, takes.
    """
    if cuda_obstacle():
        return None
    kernel, device = VARIANTS[variant], describe_device(find_device(None))
    if not kernel.supports(problem, device)[0]:
        return None
    if config in kernel.candidates(problem, H100) and config not in kernel.candidates(problem, device):
        return None
    import cupy

    from ..conv2d.variants import Filter, Operands
    from ..engines.cuda_engine import CudaEngine

    ops, normal = CudaEngine(precision=problem.precision), np.random.default_rng(0).standard_normal
    # Both in the type that the engine stores filters in, which is the activations' as well.
    x, weight = (ops.filter(normal(shape, np.float32)).weight for shape in (problem.input_shape, problem.filter_shape))
    y = cupy.empty(problem.output_shape, problem.arithmetic.storage)
    call = partial(kernel.launch, problem, Operands(x, Filter(weight), None, None, y, False), config)
    clock = CudaClock(ops.device)
    call()  # compiles
    return statistics.median(clock.alone(call)[1] for _ in range(samples))


def recorded_on(report: dict[str, Any]) -> str:
    """Returns where, with what and when a stored report was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"Recorded {report['date']} on an {report['device']}, CUDA driver {report['driver_cuda']}, {versions}."
