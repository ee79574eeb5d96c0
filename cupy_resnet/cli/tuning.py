"""`cupy-resnet tune`: times kernels on this GPU, and remembers which was fastest."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from .. import jit
from ..conv2d import PRECISIONS
from .console import make_table, print_json, print_table, say
from .networks import SizeOption
from .options import JsonOption, ModelArgument, one_of

if TYPE_CHECKING:
    from ..networks import Network
    from ..tuning import Bench, InNetwork, Report, Result, Workload


def _check_batches(text: str) -> str:
    try:
        valid = all(number >= 1 for number in batches(text))
    except ValueError:
        valid = False
    if not valid:
        raise typer.BadParameter(f"must be numbers from 1, separated by commas, as 1,8,32, got {text!r}")
    return text


def batches(text: str) -> list[int]:
    """Returns the numbers of ``"1,8,32"``, each once."""
    return list(dict.fromkeys(int(part) for part in text.split(",")))


def tune(
    model: ModelArgument,
    batch: Annotated[
        str, typer.Option(metavar="N,...", callback=_check_batches, help="Images in the batch, one number or several.")
    ] = "1,8,32",
    size: SizeOption = None,
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME", callback=one_of("precision", ("auto", *PRECISIONS)), help="The arithmetic, as for loading."
        ),
    ] = "auto",
    budget: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time to measure for, in the network included; compiling comes on top."
        ),
    ] = 60.0,
    in_network: Annotated[
        bool,
        typer.Option(
            "--in-network/--no-in-network",
            help="Then capture whole passes too, each with another of the kernels that are about as fast alone, and "
            "keep what makes the pass faster. Takes half of the budget.",
        ),
    ] = True,
    cold_l2: Annotated[
        bool, typer.Option("--cold-l2", help="Let no kernel find its input in the cache, not only its filter.")
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write a table that can be shipped as well.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time the kernels for a network's convolutions on this GPU, alone and in the network, and remember the fastest.

    Later runs on this GPU follow what was found, at batch sizes near those that were timed too, until a kernel's source
    changes. Needs no weights.
    Exit status 1 if nothing could be timed.
    """
    from .. import tuning
    from ..networks import describe
    from ..weights_store import split_name

    network = describe(split_name(model)[0])
    pixels = network.default_size if size is None else size
    bench = tuning.GpuBench(cold_l2=cold_l2)
    gpu = bench.device.name
    precision = tuning.possible_precision(precision, bench.device)
    shapes = [(images, network.in_channels, pixels, pixels) for images in batches(batch)]
    workloads = [w for shape in shapes for w in tuning.network_problems(network, shape, precision, bench.device)]
    table: Path | None = None

    def keep(found: "Result | InNetwork") -> None:  # at once: who interrupts loses nothing
        nonlocal table
        table = tuning.remember(gpu, [found.entry] if isinstance(found, tuning.Result) else found.entries)

    alone = (1 - tuning.in_network.SHARE) * budget if in_network else budget
    report = _tune_with_progress(workloads, bench, alone, keep)
    entries, passes = report.entries, dict[int, "InNetwork"]()
    if in_network and report.results:
        passes = _tune_in_network(network, shapes, precision, bench, report, budget - report.seconds, keep)
        entries = [*entries, *(entry for found in passes.values() for entry in found.entries)]
    if output is not None:
        tuning.write_table(Path(output), gpu, entries)
    if as_json:
        document = {"model": model, "precision": precision, **_as_dict(report), "table": table and str(table)}
        print_json(document | {"in_network": {images: _pass_as_dict(found) for images, found in passes.items()}})
    else:
        _print_report(report)
        for images, found in passes.items():
            _print_pass(images, found)
    for workload, reason in report.skipped.items():
        say(f"skipped {workload.problem}: {reason}")
    for written in (table, output):
        if written is not None:
            say(f"wrote {written}")
    if not report.results:
        raise typer.Exit(1)


def _tune_with_progress(workloads: "list[Workload]", bench: "Bench", budget: float, found: Any) -> "Report":
    from .. import tuning

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("timing", total=len(workloads))
        doing = "timing"

        def show(done: int, total: int, workload: "Workload") -> None:
            nonlocal doing
            doing = f"timing {workload.problem}"
            bar.update(task, completed=done, total=total, description=doing)

        def show_compilation(event: jit.CompileEvent) -> None:
            bar.update(task, description=f"compiling {event.name}" if event.seconds is None else doing)

        with jit.on_compile(show_compilation):
            return tuning.tune(workloads, bench, budget_s=budget, progress=show, found=found)


def _tune_in_network(
    network: "Network",
    shapes: list[tuple[int, int, int, int]],
    precision: str,
    bench: "Bench",
    report: "Report",
    budget: float,
    keep: Callable[["InNetwork"], None],
) -> "dict[int, InNetwork]":
    """Number of images to what whole passes of so many have shown; each has its share of the budget."""
    from .. import tuning

    found: dict[int, InNetwork] = {}
    begin = time.monotonic()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("binding random weights")
        bound, ops = tuning.bind_at_random(network, precision, bench.device_id)
        for place, shape in enumerate(shapes):
            left = budget - (time.monotonic() - begin)

            def show(done: int, total: int, workload: "Workload") -> None:
                bar.update(task, completed=done, total=total, description=f"in the network {workload.problem}")

            try:
                with tuning.GpuPasses(bound, ops, shape) as passes:
                    found[shape[0]] = tuning.tune_in_network(
                        *(network, shape, precision, bench, passes),
                        results=report.results,
                        budget_s=left / (len(shapes) - place),
                        progress=show,
                    )
                if found[shape[0]].changes:
                    keep(found[shape[0]])
            except MemoryError as error:
                say(f"N = {shape[0]} is not tuned in the network: {error}")
    return found


def _print_pass(images: int, found: "InNetwork") -> None:
    for change in found.changes:
        before = "its pieces" if change.before is None else change.before
        typer.echo(f"in the network {change.workload.problem}: {change.after} in place of {before}")
    share = found.after / found.before
    typer.echo(
        f"N = {images}: {found.before:.1f} → {found.after:.1f} µs for a whole pass, {1 / share:.2f}×; "
        f"{len(found.changes)} of {found.duels} duels were won."
    )


def _pass_as_dict(found: "InNetwork") -> dict[str, Any]:
    return {
        "microseconds_before": found.before,
        "microseconds": found.after,
        "duels": found.duels,
        "margin": found.margin,
        "seconds": found.seconds,
        "changes": [
            {
                "problem": str(change.workload.problem),
                "before": change.before and str(change.before),
                "after": str(change.after),
                "ratio": change.ratio,
            }
            for change in found.changes
        ],
    }


def _print_report(report: "Report") -> None:
    changed = [result for result in report.results if result.best != result.model]
    if changed:
        table = make_table(
            *("convolution", "times", "by the cost model", "µs", "fastest", "µs ", "gain"),
            right=("times", "µs", "µs ", "gain"),
        )
        for result in changed:
            before = result.model_microseconds
            table.add_row(
                Text(str(result.workload.problem)),
                str(result.workload.count),
                Text(str(result.model)),
                "wrong" if before is None else f"{before:.1f}",
                Text(str(result.best)),
                f"{result.microseconds:.1f}",
                "" if before is None else f"{before / result.microseconds:.2f}×",
            )
        print_table(table)
        typer.echo()
    typer.echo(
        f"{len(report.results)} convolutions timed on {report.device.name} in {report.seconds:.1f} s; "
        f"for {len(changed)} another configuration than the cost model's is fastest."
    )
    for images, (before, after) in _pass_microseconds(report).items():
        typer.echo(f"N = {images}: {before:.1f} → {after:.1f} µs for those of one forward pass, {before / after:.2f}×")


def _pass_microseconds(report: "Report") -> dict[int, tuple[float, float]]:
    """Batch size to the time of its convolutions in a forward pass, by the cost model's choice and by the fastest.

    What was timed as part of something larger counts with that, and not by itself: there it is no slower.
    """
    from ..tuning.workloads import counted_alone

    counts = counted_alone({result.workload.problem: result.workload.count for result in report.results})
    totals: dict[int, tuple[float, float]] = {}
    for result in report.results:
        problem = result.workload.problem
        count = counts[problem]
        before, after = totals.get(problem.N, (0.0, 0.0))
        before += count * (result.model_microseconds or result.microseconds)
        totals[problem.N] = before, after + count * result.microseconds
    return totals


def _as_dict(report: "Report") -> dict[str, Any]:
    return {
        "gpu": report.device.name,
        "seconds": report.seconds,
        "results": [
            {
                "problem": str(result.workload.problem),
                "count": result.workload.count,
                "residual": result.workload.residual,
                "kernel": result.best.variant,
                "config": str(result.best.config),
                "microseconds": result.microseconds,
                "candidates": len(result.standings),
                "rejected": {str(candidate): reason for candidate, reason in result.rejected.items()},
                "model_kernel": result.model.variant,
                "model_config": str(result.model.config),
                "model_microseconds": result.model_microseconds,
            }
            for result in report.results
        ],
        "skipped": {str(workload.problem): reason for workload, reason in report.skipped.items()},
    }
