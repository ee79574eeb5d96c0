"""The command ``cupy-resnet``: parses, calls the library, prints. Results go to stdout, all else to stderr."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from . import __version__, jit
from .errors import CheckpointError, CompileError, EngineUnavailableError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="ResNets on hand-written CUDA kernels.",
)  # fmt: skip

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Runs the command line; an error that a user can act on is one message and exit status 1."""
    try:
        app(prog_name="cupy-resnet")
    except (CheckpointError, CompileError, EngineUnavailableError, FileNotFoundError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cupy-resnet {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the networks that can be loaded."""
    from . import list_models

    names = list(list_models())
    typer.echo(json.dumps(names, indent=2) if as_json else "\n".join(names))


@app.command()
def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As `cupy-resnet models` lists them.")],
    batch: Annotated[int, typer.Option(min=0, metavar="N", help="Images in the batch.")] = 1,
    size: Annotated[
        int | None, typer.Option(min=1, metavar="PIXELS", help="Height and width; by default the network's own.")
    ] = None,
    kernel: Annotated[str, typer.Option(metavar="NAME", help="Convolution kernel wherever it applies.")] = "auto",
    engine: Annotated[str, typer.Option(metavar="cuda|numpy", help="The engine to explain.")] = "cuda",
    as_json: JsonOption = False,
) -> None:
    """Tell which kernel computes each operation of a network, and why. Needs no GPU and no weights."""
    from .explanation import explain as explain_network
    from .networks import describe

    if engine not in ("cuda", "numpy"):
        raise typer.BadParameter(f"must be cuda or numpy, got {engine!r}", param_hint="--engine")
    network = describe(model)
    pixels = network.default_size if size is None else size
    shape = (batch, network.stem.in_channels, pixels, pixels)
    explanation = explain_network(network, shape, engine=engine, kernel=kernel)
    _print_json([asdict(step) for step in explanation]) if as_json else typer.echo(str(explanation))


@app.command()
def kernels(
    compile_all: Annotated[
        bool, typer.Option("--compile", help="Compile every configuration and print what each kernel takes.")
    ] = False,
    arch: Annotated[
        str, typer.Option(metavar="ARCHS", help="Architectures to compile for, separated by commas.")
    ] = "sm_80,sm_90",
    kernel: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this kernel; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Compilations at a time.")] = os.cpu_count() or 1,
    as_json: JsonOption = False,
) -> None:
    """List every kernel with the problem it solves; with --compile, compile all for given architectures.

    Exit status 1 if a kernel does not compile or spills registers.
    """
    chosen = _chosen_kernels(kernel)
    if compile_all:
        archs = [_checked_arch(part) for part in arch.split(",")]
        reports = _compile(chosen, archs, jobs)
        _print_json([report.as_dict() for report in reports]) if as_json else _print_reports(reports)
        if not all(report.good for report in reports):
            raise typer.Exit(1)
    elif as_json:
        _print_json([{"name": k.name, "solves": k.solves, "min_arch": k.min_arch} for k in chosen])
    else:
        table = _table("kernel", "solves", "from")
        for source in chosen:
            table.add_row(source.name, Text(source.solves), source.min_arch)
        _print_table(table)


def _chosen_kernels(names: Sequence[str] | None) -> list[jit.KernelSource]:
    sources = jit.list_kernels()
    unknown = sorted(set(names or ()) - {source.name for source in sources})
    if unknown:
        known = ", ".join(source.name for source in sources)
        raise typer.BadParameter(f"there is no kernel {', '.join(unknown)}; there are: {known}", param_hint="--kernel")
    return [source for source in sources if not names or source.name in names]


def _checked_arch(text: str) -> str:
    try:
        return str(jit.Arch.parse(text.strip()))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from error


def _compile(chosen: Sequence[jit.KernelSource], archs: Sequence[str], jobs: int) -> list[jit.Report]:
    from .kernels import configurations

    console = Console(stderr=True)
    reports = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=sum(len(configurations(k.name)) for k in chosen) * len(archs))
        for report in jit.compile_reports(chosen, archs, configurations, jobs=jobs):
            progress.update(task, advance=1, description=f"compiling {report.kernel} {report.arch}")
            reports.append(report)
    return reports


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_reports(reports: Sequence[jit.Report]) -> None:
    table = _table(
        "kernel", "arch", "configuration", "function", "registers", "shared B", "stack B", "spills B", "status"
    )
    for report in reports:
        configuration = Text(" ".join(f"{name}={value}" for name, value in report.defines.items()) or "—")
        for function, used in report.functions.items():
            status = "spills" if used.spills else "ok"
            numbers = (used.registers, used.shared_memory, used.stack_frame, used.spill_stores + used.spill_loads)
            table.add_row(report.kernel, report.arch, configuration, function, *map(str, numbers), status)
        if not report.functions:
            reason = f"skipped: {report.detail}" if report.status == "skipped" else report.status
            table.add_row(report.kernel, report.arch, configuration, "", "", "", "", "", reason)
    _print_table(table)
    for report in reports:
        if report.status == "failed":
            typer.echo(f"\n{report.kernel} {report.arch}: {report.detail}", err=True)
    counts = {
        status: sum(report.status == status for report in reports) for status in ("ok", "spills", "failed", "skipped")
    }
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()), err=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_table(table: Table) -> None:
    """Prints a table: a terminal that is too narrow folds its cells, a pipe or file gets whole lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    console.print(table)
