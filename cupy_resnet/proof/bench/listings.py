"""Reports as tables of text, for the terminal and for the pages alike."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ladder import library_rungs, rungs
from .end_to_end import EndToEndReport
from .fusion import FusionReport, Pass
from .report import STREAM_FROM, Entry, Kind, Report, Row
from .statistics import Summary

WORDS: dict[Kind, str] = {"latency": "single calls", "stream": "calls back to back"}

BOUNDS = {
    "launches": "what ours launches, each launch by itself",
    "operations": "every operation by itself, also where ours computes several in one launch",
}
"""By `Row.bound_of`."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A table and the sentences that belong to it.

    Args:
        title: what is listed.
        header: of the columns; all but the first hold numbers.
        rows: of cells.
        notes: sentences below.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def number(value: float | None) -> str:
    """Returns a number with three significant digits, none of them after the point from 100 on; – for none."""
    if value is None:
        return "–"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Returns a percentage in words; – for none."""
    return "–" if value is None else f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"


def list_row(row: Row) -> Listing:
    """Lists the contenders of one row, and says how ours compare."""
    header = ["contender", "median ms", "p10", "p90", "p99", "back to back ms", "images/s", "memory MB", "first call s"]
    if row.bound_ms is not None:
        header.append("of the roofline")
    rows = []
    for entry in row.entries:
        times = (entry.latency.median, entry.latency.p10, entry.latency.p90, entry.latency.p99, entry.stream.median)
        cells = [entry.name if entry.wrong is None else f"{entry.name} (wrong)", *map(number, times)]
        cells.append(f"{row.images_per_second(entry):,.0f}")
        cells.append(number(None if entry.peak_bytes is None else entry.peak_bytes / 1e6))
        cells.append(f"{entry.first_call_s:.2f}")
        if row.bound_ms is not None:
            cells.append(percent(row.percent_of_bound(entry)))
        rows.append(tuple(cells))
    samples = row.entries[0].latency.count if row.entries else 0
    title = (
        f"{row.model}, N = {row.N}, {row.precision}, {row.size} × {row.size} pixels, {row.engine} engine, "
        f"{samples} single calls each"
    )
    notes = [f"{entry.name}: {sentence}" for entry in row.ours for sentence in _ratios(row, entry)]
    notes += [f"{entry.name} does not count: {entry.wrong}" for entry in row.rivals if entry.wrong is not None]
    notes += [f"{name} is left out: {reason}" for name, reason in row.failed.items()]
    notes += _roofline([row])
    return Listing(title=title, header=tuple(header), rows=rows, notes=tuple(notes))


def _ratios(row: Row, entry: Entry) -> list[str]:
    """Sentences: the row's figure first, then the other ratio."""
    if entry.wrong is not None:
        return [f"no ratio, since {entry.wrong}"]
    kinds: tuple[Kind, Kind] = ("stream", "latency") if row.kind == "stream" else ("latency", "stream")
    sentences = []
    for kind in kinds:
        rival, found = row.fastest_rival(kind), row.ratio(entry, kind)
        figure = " (the figure for this N)" if kind == row.kind else ""
        if found.value is None or rival is None:
            sentences.append(f"{WORDS[kind]}{figure}: –, {found.reason}")
        else:
            sentences.append(f"{WORDS[kind]}{figure}: {found} the speed of the fastest rival, {rival.name}")
    return sentences


def list_report(report: Report) -> Listing:
    """Lists a comparison, one line per row and contender of ours."""
    header = [
        "network",
        "ours, ms",
        "fastest rival, ms",
        "ratio",
        "back to back: ours, ms",
        "fastest rival, ms",
        "ratio",
    ]
    roofline = any(row.bound_ms is not None for row in report.rows)
    header += ["images/s", *(["of the roofline"] if roofline else [])]
    rows, reasons = [], []
    for row in report.rows:
        for entry in row.ours:
            name = f"{row.model}, N = {row.N}, {row.precision}{entry.name.removeprefix('ours')}"
            cells = [name]
            for kind in ("latency", "stream"):
                found, rival = row.ratio(entry, kind), row.fastest_rival(kind)
                cells.append(number(entry.summary(kind).median))
                cells.append("–" if rival is None else f"{number(rival.summary(kind).median)} ({rival.name})")
                cells.append(str(found) if kind == row.kind else f"({found})")
                if found.value is None and kind == row.kind:
                    reasons.append(f"{name}: – because {found.reason}.")
            cells.append(f"{row.images_per_second(entry):,.0f}")
            if roofline:
                cells.append(percent(row.percent_of_bound(entry)))
            rows.append(tuple(cells))
    note = (
        f"Medians. The first three columns are of single calls, each waited for; the ratio in parentheses is not the "
        f"row's figure, which is that of single calls for N < {STREAM_FROM} and of calls back to back from there on."
    )
    notes = (note, *(f"{sentence}." for sentence in _roofline(report.rows)), *reasons)
    return Listing(title="Ratios", header=tuple(header), rows=rows, notes=notes)


def _roofline(rows: Sequence[Row]) -> list[str]:
    """Says what the percentage is of; nothing where there is none."""
    of = dict.fromkeys(BOUNDS[row.bound_of] for row in rows if row.bound_ms is not None)
    sentences = [
        f"Of the roofline: the least time that memory and arithmetic allow {what}, in percent of the time back to back"
        for what in of
    ]
    # In fp32 it is no strict bound: Winograd makes fewer multiplications than are counted.
    strict = [row for row in rows if row.precision != "fp32"]
    if any((row.percent_of_bound(entry) or 0) > 100 for row in strict for entry in row.entries):
        sentences.append(
            "More than 100 % means that the device's ceilings were measured while it was busy with something else: "
            "`cupy-resnet profile --measure-ceilings` measures them again"
        )
    return sentences


def list_fusion(report: FusionReport) -> Listing:
    """Lists what fusing buys, stage by stage."""
    on_gpu = report.stages[0].device is not None
    times = ("host, ms", "GPU, ms") if on_gpu else ("ms",)
    header = ("stage", "operations", "MB moved", *times, "gain", *(f"torch: {name}" for name in times))
    rows, notes = [], []
    for stage in report.stages:
        rival, gain = report.rival(stage), report.gain(stage)
        cells = [stage.name, str(stage.operations), number((stage.nbytes or 0) / 1e6), *_times(stage, on_gpu)]
        cells.append("" if stage is report.stages[0] else str(gain))
        cells += ["–"] * len(times) if rival is None else [*_times(rival, on_gpu)[:-1], _named(rival, on_gpu)]
        rows.append(tuple(cells))
        if gain.value is None and stage is not report.stages[0]:
            notes.append(f"{stage.name}: no gain is given: {gain.reason}.")
    notes += [f"torch's {each.name} does not count: {each.wrong}." for each in report.torch if each.wrong is not None]
    notes.append("MB moved: the fewest bytes the operations must move. –: torch has no module that does this.")
    if on_gpu:
        notes.append("Host: until a pass is enqueued. GPU: its time without waiting for the host.")
    title = (
        f"{report.model}, N = {report.N}, {report.precision}, {report.size} × {report.size} pixels, {report.engine} "
        f"engine, median of {report.stages[0].host.count}"
    )
    return Listing(title=title, header=header, rows=rows, notes=tuple(notes))


def _times(each: Pass, on_gpu: bool) -> list[str]:
    return [number(each.host.median), number(each.time.median)] if on_gpu else [number(each.host.median)]


def _named(each: Pass, on_gpu: bool) -> str:
    return f"{_times(each, on_gpu)[-1]} ({each.name})"


def list_end_to_end(report: EndToEndReport) -> Listing:
    """Lists where an image's time goes on its way from file to label."""
    occupancy = report.occupancy
    busy = {"decode": "threads", "preprocess": "threads", "copy": "engine", "inference": "engine"}
    rows = [
        (stage, number(ms), percent(100 * report.shares[stage]), busy[stage]) for stage, ms in report.stages_ms.items()
    ]
    ours = Summary.of(report.ours_s)
    notes = [
        f"{report.images_per_second:,.0f} images/s: {report.images} files, {report.megabytes:.1f} MB, in "
        f"{number(ours.median)} s, median of {ours.count} runs; batches of {report.batch_size}, "
        f"{report.workers} threads",
        f"busy: the threads {percent(100 * occupancy['threads'])}, the engine {percent(100 * occupancy['engine'])} of "
        "the time; stages of different images overlap",
    ]
    if report.rival_images_per_second is not None:
        found = report.ratio
        said = f"{found} its speed" if found.value is not None else f"no ratio: {found.reason}"
        notes.append(
            f"Pillow, torchvision's transforms and torch, same threads, same batches: "
            f"{report.rival_images_per_second:,.0f} images/s, {said}; the same class for {report.agreement:.1%}"
        )
    return Listing(
        title=f"{report.model}, {report.precision}, {report.engine} engine, from files to labels",
        header=("stage", "ms per image", "share", "on"),
        rows=rows,
        notes=tuple(notes),
    )


def list_ladder(report: Mapping[str, Any]) -> Listing:
    """Lists kernels and torch's convolution in every precision, summed over the problems each supports."""
    library = report["layers"][0]["library"] if report["layers"] else "cudnn"
    name = {"cudnn": "cuDNN", "onednn": "oneDNN"}[library]
    tested = [*rungs(report), *library_rungs(report)]
    scale, unit = (1.0, "TFLOP/s") if max((rung.tflops for rung in tested), default=0.0) >= 0.5 else (1e3, "GFLOP/s")
    rows = [
        (
            rung.name.replace(library, name).replace("_", " ") if rung.name.startswith(library) else rung.name,
            str(rung.layers),
            number(rung.milliseconds),
            number(rung.tflops * scale),
            percent(rung.percent_of_cudnn),
        )
        for rung in tested
    ]
    header = ("kernel", "problems", "ms", unit, f"of {name} {report['precision']}")
    notes = [
        f"{kernel} does not count on {layer['text']}: {reason}."
        for layer in report["layers"]
        for kernel, reason in layer["wrong"].items()
    ]
    title = (
        _problems(report["layers"])
        if report.get("model") is None
        else (f"The distinct convolutions of {report['model']}, N = {report['batch']}, each once")
    )
    return Listing(title=f"{title}, {report['precision']}", header=header, rows=rows, notes=tuple(notes))


def _problems(layers: Sequence[Mapping[str, Any]]) -> str:
    return layers[0]["text"] if len(layers) == 1 else f"{len(layers)} convolutions, each once"
