"""Tables of README.md and kernels_cu/README.md, generated from the stored measurements so that they cannot drift.

    python -m cupy_resnet.proof.tables

A page marks the place of a table by ``<!-- table: NAME -->`` and ``<!-- end -->``; what stands between is rewritten.
NAME is one of `TABLES`, or a file that `cupy-resnet bench --json` wrote, without suffix, in ``notebooks/results``.
Only a source tree has the pages and the measurements.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .bench.end_to_end import EndToEndReport
from .bench.fusion import FusionReport
from .bench.listings import Listing, list_end_to_end, list_fusion, list_ladder, list_report
from .bench.report import Report
from .ladder import Layer, rungs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
PAGES = (ROOT / "README.md", ROOT / "kernels_cu" / "README.md")


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
    return f"{device}, torch {versions['torch']}, {report['date']}; raw samples in `notebooks/results/{file}.json`."


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


TABLES: dict[str, Callable[[], str]] = {"ladder": ladder, "layers": layers}

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
