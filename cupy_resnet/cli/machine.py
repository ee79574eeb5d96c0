"""`cupy-resnet doctor` and `demo`: what this machine lacks, and what it can do."""

from typing import Annotated

import typer
from rich.text import Text

from .console import make_table, print_fields, print_json, print_table, working
from .options import JsonOption

_STYLES = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine, and tell a fix for each problem.

    Exit status 1 only if the engine that would be used cannot work.
    """
    from ..doctor import examine

    with working("examining") as show:
        diagnosis = examine(show)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        table = make_table("", "", "", header=False)
        for finding in diagnosis.findings:
            table.add_row(Text(finding.status, _STYLES[finding.status]), finding.name, Text(finding.detail))
            if finding.fix:
                table.add_row("", "", Text(f"→ {finding.fix}", "bold"))
        print_table(table)
        typer.echo()
        typer.echo(diagnosis.verdict)
    if not diagnosis.works:
        raise typer.Exit(1)


def demo(
    as_json: JsonOption = False,
    save: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write the drawings there as .png, to look at them.")
    ] = None,
) -> None:
    """Show what this machine can do, with ten drawings.

    Needs nothing but the package: the network and its weights come with it, and the drawings are made on the spot.
    """
    from ..demo import run_demo

    with working("loading") as show:
        result = run_demo(show, save=save)
    if as_json:
        print_json(result.as_dict())
        return
    typer.echo(
        f"Ten drawings, made by the package itself with simple shapes, and what {result.model} takes them for.\n"
        "It has only ever seen photographs, of ten kinds, at 32 × 32 pixels.\n"
    )
    table = make_table("drawing of", "answer", "prob.", "then", right=("prob.",))
    for answer in result.answers:
        table.add_row(
            answer.drawn,
            Text(answer.label, "green" if answer.label == answer.drawn else "yellow"),
            f"{answer.probability:.1%}",
            Text(", ".join(f"{label} {probability:.1%}" for label, probability in answer.others)),
        )
    print_table(table)
    right = sum(answer.label == answer.drawn for answer in result.answers)
    typer.echo(f"\n{right} of {len(result.answers)} as they were meant.\n")
    kernels = ", ".join(f"{name} × {count}" for name, count in result.kernels.items())
    fields = {
        "engine": result.engine,
        "device": result.device,
        "kernels": kernels,
        "speed": f"{result.images_per_second:,.0f} images/s, from pixels in memory to labels, "
        f"{result.batch_size} at a time, measured for {result.seconds:.1f} s",
    }
    if result.obstacle:
        fields["no GPU"] = result.obstacle
    print_fields(fields)
    typer.echo("\nYour own photographs: cupy-resnet predict PHOTO... --model " + result.model)
