"""`cupy-resnet kernels`: the CUDA kernels, and what compiling them takes."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from .. import jit
from .console import make_table, print_json, print_table, say
from .options import JsonOption


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
    """List every kernel with the problem it solves.

    With --compile, compile all for given architectures, without a GPU. Exit status 1 if a kernel does not
    compile or spills registers.
    """
    chosen = _chosen_kernels(kernel)
    if compile_all:
        archs = [_checked_arch(part) for part in arch.split(",")]
        reports = _compile(chosen, archs, jobs)
        print_json([report.as_dict() for report in reports]) if as_json else _print_reports(reports)
        if not all(report.good for report in reports):
            raise typer.Exit(1)
    elif as_json:
        print_json([{"name": k.name, "solves": k.solves, "min_arch": k.min_arch} for k in chosen])
    else:
        table = make_table("kernel", "solves", "from")
        for source in chosen:
            table.add_row(source.name, Text(source.solves), source.min_arch)
        print_table(table)


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
    from ..kernels import configurations

    console = Console(stderr=True)
    reports = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=sum(len(configurations(k.name)) for k in chosen) * len(archs))
        for report in jit.compile_reports(chosen, archs, configurations, jobs=jobs):
            progress.update(task, advance=1, description=f"compiling {report.kernel} {report.arch}")
            reports.append(report)
    return reports


def _print_reports(reports: Sequence[jit.Report]) -> None:
    table = make_table(
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
    print_table(table)
    for report in reports:
        if report.status == "failed":
            say(f"\n{report.kernel} {report.arch}: {report.detail}")
    counts = {
        status: sum(report.status == status for report in reports) for status in ("ok", "spills", "failed", "skipped")
    }
    say(", ".join(f"{count} {status}" for status, count in counts.items()))
