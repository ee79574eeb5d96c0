"""Tables of README.md and kernels_cu/README.md, generated from the stored measurements so that they cannot drift.

    python -m cupy_resnet.proof.tables

A page marks the place of a table by ``<!-- table: NAME -->`` and ``<!-- end -->``; what stands between is rewritten.
NAME is one of `TABLES`, or a file that `cupy-resnet bench --json` wrote, without suffix, in ``notebooks/results``.
Only a source tree has the pages and the measurements.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..conv2d import H100
from ..conv2d.tuned import Table
from ..explanation import explain
from ..networks import describe
from .bench.end_to_end import EndToEndReport
from .bench.fusion import FusionReport
from .bench.listings import Listing, list_end_to_end, list_fusion, list_ladder, list_report, number
from .bench.report import Report
from .ceilings import Ceilings
from .ladder import Layer, rungs
from .profiling.results import Roof

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
PAGES = (ROOT / "README.md", ROOT / "kernels_cu" / "README.md")
TUNED = ROOT / "cupy_resnet" / "conv2d" / "tuned_h200.json"
"""The times of convolutions, each alone, that `cupy-resnet tune` measured for the shipped table."""

BOUNDED_BY = {"memory": "memory", "compute": "arithmetic"}
"""What `Roof.bound` says, in the tables' words."""


def load(name: str) -> dict[str, Any]:
    """Reads a stored measurement."""
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return report


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _origin(report: dict[str, Any], file: str) -> str:
    versions = report["versions"]
    if report["driver_cuda"] is None:
        device = f"{report['processor']}, {report['processors']} processors, NumPy {versions['numpy']}"
    else:
        device = (
            f"{report['device']}, CUDA driver {report['driver_cuda']}, CuPy {versions['cupy']}, "
            f"NVRTC {versions['nvrtc']}"
        )
    # Rows of runs before, with the same versions on another card of the kind, where a file has such.
    others = report.get("settings", {}).get("rows_of_other_runs", {})
    earlier = {rows: run.partition(",")[0] for rows, run in others.items()}
    dates = "".join(f" ({rows}: {date})" for rows, date in earlier.items() if date != report["date"])
    origin = f"{device}, torch {versions['torch']}, {report['date']}{dates}"
    return f"{origin}; raw samples in `notebooks/results/{file}.json`."


def _layers(report: dict[str, Any]) -> list[Layer]:
    return [Layer(**layer) for layer in report["layers"]]


def ladder() -> str:
    """The rungs, summed over the layers each supports."""
    report = load("ladder_fp32")
    rows = [
        [
            f"`{rung.name}`",
            str(rung.layers),
            f"{rung.milliseconds:.2f}",
            f"{rung.tflops:.1f}",
            f"{rung.percent_of_cudnn:.0f} %",
        ]
        for rung in rungs(report)
    ]
    header = ["rung", "layers", "ms", "TFLOP/s", "of cuDNN's speed"]
    winograd = {layer.text for layer in _layers(report) if "conv2d_winograd" in layer.kernels}
    own = {rung.name: rung for rung in rungs(report, winograd)}
    gain = own["conv2d_implicit_gemm"].milliseconds / own["conv2d_winograd"].milliseconds
    note = (
        f"On the {len(winograd)} layers that `conv2d_winograd` supports it is {gain:.2f} times as fast as "
        f"`conv2d_implicit_gemm`."
    )
    batch = f"The distinct convolutions of {report['model']}, N = {report['batch']}, each once. "
    return f"{_table(header, rows)}\n\n{batch}{note} {_origin(report, 'ladder_fp32')}"


def layers() -> str:
    """Every layer, TFLOP/s of each kernel and of cuDNN."""
    report = load("ladder_fp32")
    names = [rung.name for rung in rungs(report)]
    rows = []
    for layer in _layers(report):
        rates = [layer.flops / layer.median_ms(name) / 1e9 if name in layer.kernels else None for name in names]
        cudnn = layer.flops / layer.median_ms(layer.rival) / 1e9
        cells = ["–" if rate is None else f"{rate:.1f}" for rate in [*rates, cudnn]]
        rows.append([layer.text.split("×", 1)[1], *cells])
    short = [name.removeprefix("conv2d_") for name in names]
    return _table([f"layer (N = {report['batch']}), TFLOP/s", *short, "cuDNN"], rows)


def launches(model: str, batch: int = 256) -> str:
    """What a pass in fp16 launches on the GPU that the shipped table is of: that table's times, and how near the bound.

    Args:
        model: whose ``network_fp16_*`` is stored: its ceilings bound the launches.
        batch: images.
    """
    report = load(f"network_fp16_{model}")
    roof = Roof.of(Ceilings.from_dict(report["settings"]["ceilings"]), "fp16")
    device = replace(H100, name=report["device"])
    network = describe(model)
    shape = (batch, network.in_channels, network.default_size, network.default_size)
    passed = explain(network, shape, engine="cuda", device=device, precision="fp16", ready=True)
    tuned = Table.parse(TUNED.read_bytes()).entries
    lines: Counter[tuple[str, ...]] = Counter()
    times = least_times = 0.0
    for step in passed:
        problem = step.record.pair or step.record.problem
        if problem is None or step.record.op == "stem":
            continue  # has nothing to choose from, and no entry in the table
        entry = tuned[problem, True]
        bound, least = roof.bound(step.record.flops, step.record.nbytes)
        text = step.problem.split("×", 1)[1].removesuffix(", fp16").replace(", pad 1×1", "")
        near = f"{100 * least / entry.microseconds:.0f} %"
        lines[text, entry.variant, number(entry.microseconds), BOUNDED_BY[bound], near] += 1
        times, least_times = times + entry.microseconds, least_times + least
    header = [f"{model}, N = {batch}, fp16", "launches", "kernel", "µs", "bound by", "of the bound's speed"]
    rows = [[text, str(count), *cells] for (text, *cells), count in lines.items()]
    together = f"All of these, each alone: {number(times)} µs, {100 * least_times / times:.0f} % of the bounds' speed."
    where = f"{report['device']}; times of `{TUNED.name}`, ceilings of `network_fp16_{model}.json`."
    return f"{_table(header, rows)}\n\n{together} {where}"


TABLES: dict[str, Callable[[], str]] = {
    "ladder": ladder,
    "layers": layers,
    "launches_resnet18": lambda: launches("resnet18"),
    "launches_resnet50": lambda: launches("resnet50"),
}

LISTINGS: dict[str, Callable[[dict[str, Any]], Listing]] = {
    "bench": lambda report: list_report(Report.from_dict(report)),
    "fusion": lambda report: list_fusion(FusionReport.from_dict(report)),
    "end_to_end": lambda report: list_end_to_end(EndToEndReport.from_dict(report)),
    "ladder": list_ladder,
}
"""By the ``format`` of a stored measurement: how it is listed."""


def table(name: str) -> str:
    """Returns a table in Markdown with what it was measured on.

    Args:
        name: of `TABLES`, or of a stored measurement with a ``format`` of `LISTINGS`.

    Raises:
        KeyError: there is neither.
    """
    if name in TABLES:
        return TABLES[name]()
    if not (RESULTS / f"{name}.json").is_file():
        raise KeyError(f"there is no table {name!r}: neither one of {', '.join(TABLES)} nor a file in {RESULTS}")
    report = load(name)
    if report.get("format") not in LISTINGS:
        raise KeyError(f"{name}.json is no measurement of {', '.join(LISTINGS)}")
    listing = LISTINGS[report["format"]](report)
    notes = " ".join(f"{note.rstrip('.')}." for note in (listing.title, *listing.notes))
    return f"{_table(listing.header, listing.rows)}\n\n{notes} {_origin(report, name)}"


def render(text: str) -> str:
    """Returns a page with every marked table rewritten.

    Raises:
        KeyError: a mark names a table that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{table(match[1])}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", replace, text, flags=re.S)


def render_all() -> None:
    """Rewrites the tables of every page."""
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    render_all()
