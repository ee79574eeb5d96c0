"""The modes of `cupy-resnet bench`: each measures, prints its table, and stores what it found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from .console import make_table, print_json, print_table, printable, say, working

if TYPE_CHECKING:
    from ..proof.bench.listings import Listing
    from ..proof.bench.timing import Effort


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for on the command line; names and numbers are checked already as far as all modes share them.

    Args:
        models, batches, precisions: at least one each.
        kernels, rivals: names, or None for the default.
        effort, size, engine, commit: as `cupy_resnet.proof.bench` takes them.
        roofline: whether to tell how near the device's ceilings a time is.
        output: a file for JSON, ``"-"`` for stdout, or None.
        plot: a file for the figure, or None.
        convs: convolutions in words, or None for those of a network.
        folder: of image files.
        weights, workers: as for `cupy_resnet.load` and `Model.predict`.
    """

    models: list[str]
    batches: list[int]
    precisions: list[str]
    kernels: list[str] | None
    rivals: list[str] | None
    effort: "Effort"
    size: int | None
    engine: str
    commit: str | None
    roofline: bool
    output: str | None
    plot: str | None
    convs: list[str] | None
    folder: str | None
    weights: str | None
    workers: int | None


def bench_rows(request: Request) -> None:
    """Compares networks with the rivals, row by row; what is stored grows with every row."""
    from ..proof.bench.comparison import Plan, rows
    from ..proof.bench.listings import list_report, list_row
    from ..proof.bench.meters import device_ceilings
    from ..proof.bench.plot import plot_report
    from ..proof.bench.report import Report
    from ..proof.machine import describe_machine
    from ..proof.plot_style import save_figure

    plan = wrong_usage(
        lambda: Plan(
            models=request.models,
            batches=request.batches,
            precisions=request.precisions,
            kernels=request.kernels or ["auto"],
            rivals=request.rivals,
            engine=request.engine,
            size=request.size,
            effort=request.effort,
        )
    )
    if request.roofline:
        with working("measuring what this machine can do at best, once"):
            plan = replace(plan, ceilings=device_ceilings(plan.engine))
    report = Report(machine=describe_machine(request.commit, engine=plan.engine), settings=plan.settings(), rows=[])

    def show(doing: str) -> None:
        show_now(doing)

    found = rows(plan, show)
    while True:
        with working("preparing") as show_now:  # anew for each row: what is printed meanwhile would get lost in it
            row = next(found, None)
        if row is None:
            break
        report.rows.append(row)
        _store(request, report.to_dict())
        _print(request, list_row(row))
    if len(report.rows) > 1:
        _print(request, list_report(report))
    if request.output == "-":
        print_json(report.to_dict())
    _tell(request)
    if request.plot is not None:
        save_figure(plot_report(report), Path(request.plot))
        say(f"wrote {request.plot}")
    if any(entry.wrong is not None for row in report.rows for entry in row.ours):
        raise typer.Exit(1)


def bench_ladder(request: Request) -> None:
    """Times every kernel, and torch in every precision, on single convolutions."""
    from ..networks import describe
    from ..proof.bench.ladder import measure
    from ..proof.bench.listings import list_ladder
    from ..proof.ladder import convolutions, parse_problem
    from ..weights_store import split_name

    model, batch = split_name(request.models[0])[0], request.batches[0]
    origin: dict[str, Any] = {}
    if request.convs is None:
        problems = convolutions(model, batch, request.size or describe(model).default_size)
        origin = {"model": model, "batch": batch}
    else:
        convs = request.convs
        problems = wrong_usage(lambda: {parse_problem(text): 1 for text in convs}, "--conv")
    with working("preparing") as show:
        report = measure(
            problems,
            engine=request.engine,
            effort=request.effort,
            precision=request.precisions[0],
            commit=request.commit,
            show=lambda problem: show(f"timing {problem}"),
            **origin,
        )
    _finish(request, report, list_ladder(report))
    if any(layer["wrong"] for layer in report["layers"]):
        raise typer.Exit(1)


def bench_fusion(request: Request) -> None:
    """Times a network with ever more operations in one kernel."""
    from ..proof.bench.fusion import measure_fusion
    from ..proof.bench.listings import list_fusion

    with working("preparing") as show:
        report = measure_fusion(
            request.models[0],
            request.batches[0],
            engine=request.engine,
            size=request.size,
            effort=request.effort,
            commit=request.commit,
            show=show,
        )
    _finish(request, report.to_dict(), list_fusion(report))
    if any(stage.wrong is not None for stage in report.stages):
        raise typer.Exit(1)


def bench_end_to_end(request: Request) -> None:
    """Times whole runs from files on disk to labels."""
    from ..proof.bench.end_to_end import measure_end_to_end
    from ..proof.bench.listings import list_end_to_end

    with working("preparing") as show:
        report = measure_end_to_end(
            request.models[0],
            Path(str(request.folder)).expanduser(),
            weights=request.weights,
            engine=request.engine,
            precision=request.precisions[0],
            batch_size=request.batches[0],
            workers=request.workers,
            effort=request.effort,
            commit=request.commit,
            show=show,
        )
    _finish(request, report.to_dict(), list_end_to_end(report))
    if not report.agrees:
        raise typer.Exit(1)


def wrong_usage(make: Callable[[], Any], option: str | None = None) -> Any:
    """Returns what `make` returns; a ValueError of it becomes a wrong command line, exit status 2."""
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _finish(request: Request, values: Mapping[str, Any], listing: "Listing") -> None:
    _store(request, values)
    _print(request, listing)
    if request.output == "-":
        print_json(values)
    _tell(request)


def _store(request: Request, values: Mapping[str, Any]) -> None:
    from ..proof.bench.report import write_json

    if request.output not in (None, "-"):
        write_json(Path(str(request.output)).expanduser(), values)


def _tell(request: Request) -> None:
    if request.output not in (None, "-"):
        say(f"wrote {request.output}")


def _print(request: Request, listing: "Listing") -> None:
    """Prints a table with its title and notes, unless JSON goes to stdout."""
    if request.output == "-":
        return
    typer.echo(f"{printable(listing.title)}\n")
    table = make_table(listing.header[0])
    table.columns[0].no_wrap = True  # a name in pieces is none; where it is narrow, headers take several lines
    for name in listing.header[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for cells in listing.rows:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    print_table(table)
    for note in ("", *listing.notes, ""):
        typer.echo(printable(note))
