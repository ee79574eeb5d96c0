"""`cupy-resnet verify`: a network beside another implementation of it, layer by layer and photograph by photograph."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from .._names import unknown_name
from .console import make_table, print_fields, print_json, print_table, printable, say, working
from .options import EngineOption, KernelOption, NoFuseOption, PrecisionOption, WeightsOption

if TYPE_CHECKING:
    from ..proof.verification import Outcome, PhotoReport, Report

_ROWS = 20
"""Photographs listed on the terminal, of each kind."""


def _check_model(value: str) -> str:
    from ..weights_store import split_name

    try:
        split_name(value)
    except ValueError as error:
        if not _is_folder(value):
            raise typer.BadParameter(f"{error}. There is no folder of this name either") from error
    return value


def _check_against(value: str | None) -> str | None:
    from ..proof.verification import REFERENCES

    if value is not None and value not in REFERENCES and not _is_folder(value):
        raise typer.BadParameter(f"{unknown_name('reference', value, REFERENCES)}, or the folder of a dump")
    return value


def _is_folder(value: str) -> bool:
    return Path(value).expanduser().is_dir()


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DUMP",
            callback=_check_model,
            help="As `cupy-resnet models` lists them; or a folder that --dump wrote, to compare it with another.",
        ),
    ],
    weights: WeightsOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="torch|numpy|DUMP",
            callback=_check_against,
            help="What counts as right: torch in float32, with torchvision's network where it has one; the NumPy "
            "engine in float64; or a folder that --dump or another program wrote, with the input it was made of.",
        ),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Show it normal deviates, which is the default.")] = False,
    photos: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Show it photographs: the first ones layer by layer, then all of them for their answers.",
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What the photographs show, .csv: file and class (index, WordNet id or name); by default what their "
            "subfolders are called.",
        ),
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", help="Give each block the reference's own input, so that errors do not add up.")
    ] = False,
    engine: EngineOption = "auto",
    kernel: KernelOption = "auto",
    precision: PrecisionOption = "auto",
    no_fuse: NoFuseOption = False,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Images layer by layer, 4 by default; photographs at a time, by default as predict.",
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, metavar="PIXELS", help="Height and width of random input; by default a photograph's."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Of random input, by default 0.")] = None,
    dump: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Keep input and checkpoints there, to compare them elsewhere.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report there; - is stdout, for the table.")
    ] = None,
) -> None:
    """Compare a network with another implementation of it.

    The first checkpoint over tolerance (the stem, a block, the pooled features, the logits) is named. Exit
    status 1 if there is one, or if a photograph's logits are over tolerance.
    """
    from ..proof.verification import REFERENCES, Outcome, check, read_dump
    from ..proof.verification import verify as verify_model
    from ..weights_store.writing import write_file

    inputs = {"--photos": photos, "--labels": labels, "--random": random, "--size": size, "--seed": seed}
    dumped = against is not None and against not in REFERENCES
    two_dumps = _is_folder(model) and not _is_model(model)
    if against is None and (dump is None or two_dumps):
        raise typer.BadParameter("say what counts as right: torch, numpy or a dump's folder", param_hint="--against")
    if against is None:
        _refuse({"--step": step, "--json": output, "--labels": labels}, "nothing is compared without --against")
    if two_dumps:
        ours = {
            "--weights": weights, "--engine": engine != "auto", "--kernel": kernel != "auto", "--no-fuse": no_fuse,
            "--precision": precision != "auto", "--batch": batch, "--step": step, "--dump": dump,
        }  # fmt: skip
        _refuse(inputs | ours, f"{model} is a dump, which holds all that is compared")
        _refuse({f"--against {against}": not dumped}, f"{model} is a dump, which is compared with another dump")
    if dumped:
        _refuse(inputs | {"--batch": batch}, f"the input is that of the dump {against}")
    _refuse({"--labels": labels if photos is None else None}, "it describes --photos")
    if photos is not None:
        _refuse({"--random": random, "--size": size, "--seed": seed}, "the input is --photos")
    if step:
        _refuse({"--dump": dump}, "with --step there is no pass to keep")

    if two_dumps:
        outcome = Outcome(layers=check(*(read_dump(Path(folder).expanduser()) for folder in (model, str(against)))))
    else:
        from ..loading import load
        from ..weights_store import resolve

        with (
            load(
                model, weights, engine=engine, kernel=kernel, precision=precision, fuse=not no_fuse,
                progress=sys.stderr.isatty(),
            ) as loaded,
            contextlib.ExitStack() as spinner,
        ):  # fmt: skip
            outcome = verify_model(
                loaded, resolve(model, weights), Path(against).expanduser() if against and dumped else against,
                photos=None if photos is None else Path(photos).expanduser(), labels=labels, step=step, batch=batch,
                size=size, seed=seed or 0, dump=None if dump is None else Path(dump).expanduser(),
                show=spinner.enter_context(working("verifying")), progress=partial(_progress, spinner),
            )  # fmt: skip
    if output == "-":
        print_json(outcome.to_dict())
    else:
        if output is not None:
            write_file(Path(output).expanduser(), json.dumps(outcome.to_dict(), indent=1).encode())
        _print_outcome(outcome, can_step=not two_dumps, labels=labels)
    for name in (dump, output):
        if name not in (None, "-"):
            say(f"wrote {name}")
    if not outcome.passed:
        raise typer.Exit(1)


def _is_model(value: str) -> bool:
    from ..networks import list_models
    from ..weights_store import embedded

    return value in (*list_models(), *embedded())


def _refuse(options: Mapping[str, object], reason: str) -> None:
    """Raises a usage error if one of these options was given."""
    for name, value in options.items():
        if not (value is None or value is False):  # zero is a value
            raise typer.BadParameter(f"{name} cannot be used here: {reason}")


@contextlib.contextmanager
def _progress(spinner: contextlib.ExitStack, total: int | None) -> Iterator[Callable[[], None]]:
    """Shows a bar on a terminal's stderr, in the spinner's place."""
    spinner.close()
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from ..progress import image_progress

    with image_progress(total) as advance:
        yield advance


def _print_outcome(outcome: "Outcome", *, can_step: bool, labels: str | None) -> None:
    if outcome.layers is not None:
        _print_layers(outcome.layers)
        if can_step and not (outcome.layers.passed or outcome.layers.step):
            typer.echo("--step tells which blocks are wrong themselves, and which only pass an error on.")
    if outcome.photographs is not None:
        typer.echo()
        _print_photographs(outcome.photographs)
        if labels is not None and not outcome.photographs.labelled:
            typer.echo(printable(f"{labels} names none of these photographs."))


def _print_layers(report: "Report") -> None:
    from ..proof.verification import sentence

    tolerance = report.tolerance
    fields = {
        "network": (report.model or "unknown") + (f", weights {report.weights}" if report.weights else ""),
        "verified": report.ours,
        "against": report.reference,
        "input": " × ".join(map(str, report.input_shape)) + (f", {report.input_from}" if report.input_from else ""),
        "tolerance": f"‖a − b‖/‖b‖ ≤ √depth · {tolerance.rtol:g}; each value |a − b| ≤ depth · ({tolerance.atol:g} + "
        f"{tolerance.rtol:g} · (|b| + max |b|)); {tolerance.source}",
        "mode": "each block from the reference's input" if report.step else "",
    }
    print_fields({name: printable(value) for name, value in fields.items() if value})
    typer.echo()
    not_finite = any(c.not_finite_ours or c.not_finite_reference for c in report.comparisons)
    numbers = (
        *("depth", "max |a − b|", "‖a − b‖/‖b‖", "1 − cosine"),
        *(["NaN, Inf"] if not_finite else []),
        "of tolerance",
    )
    table = make_table("checkpoint", "shape", *numbers, right=numbers)
    for c in report.comparisons:
        values = {
            "depth": str(c.depth),
            "max |a − b|": f"{c.max_abs:.1e}",
            "‖a − b‖/‖b‖": f"{c.relative_l2:.1e}",
            "1 − cosine": f"{1 - c.cosine:.1e}",
            "NaN, Inf": f"{c.not_finite_ours} | {c.not_finite_reference}",
            "of tolerance": _share(c.share),
        }
        cells = [printable(c.name), "×".join(map(str, c.shape)), *(values[name] for name in numbers)]
        table.add_row(*(Text(cell, "" if c.passed else "red") for cell in cells))
    print_table(table)
    for line in (*report.missing, *report.notes):
        typer.echo(printable(f"note: {line}"))
    typer.echo()
    typer.secho(printable(sentence(report)), fg="green" if report.passed else "red")


def _share(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return "∞"
    return f"{share:.0%}" if share < 10 else f"{share:,.0f} ×"


def _print_photographs(report: "PhotoReport") -> None:
    count = report.compared

    def part(number: int, whole: int) -> str:
        return f"{number} of {whole}" + (f" ({number / whole:.2%})" if whole else "")

    fields = {
        "photographs": f"{report.photographs}" + (f", {report.unreadable} unreadable" if report.unreadable else ""),
        "same top 1": part(report.top1_agree, count),
        "same top 5": part(report.top5_agree, count),
        "over tolerance": part(report.over_tolerance, count)
        + f"; the largest share of it that one uses is {_share(report.largest_share)}",
    }
    if report.labelled:
        for name, top1, top5 in (
            ("right, verified", report.ours_top1, report.ours_top5),
            ("right, reference", report.reference_top1, report.reference_top5),
        ):
            fields[name] = f"top 1 {part(top1, report.labelled)}, top 5 {part(top5, report.labelled)}"
    print_fields(fields)
    if report.differing:
        numbers = ("margin", "their margin", "max |a − b|", "of tolerance")
        shows = ["shows"] if report.labelled else []
        columns = ("photograph", "verified", "margin", "reference", *numbers[1:], *shows)
        table = make_table(*columns, right=numbers)
        for d in report.differing[:_ROWS]:
            cells = [
                *(d.path or "–", d.ours_name or "not finite", _margin(d.ours_margin)),
                *(d.reference_name or "not finite", _margin(d.reference_margin)),
                *(f"{d.max_abs:.1e}", _share(d.share), d.label_name or ""),
            ]
            style = "" if d.top1_agrees else "red"
            table.add_row(*(Text(printable(cell), style) for cell in cells[: len(columns)]))
        typer.echo()
        print_table(table)
        _say_more(len(report.differing))
    if report.errors:
        table = make_table("unreadable", "reason")
        for path, reason in report.errors[:_ROWS]:
            table.add_row(Text(printable(path or "–")), Text(printable(reason)))
        typer.echo()
        print_table(table)
        _say_more(len(report.errors))
    typer.echo()
    verdict = "The logits of every photograph are within tolerance."
    if report.over_tolerance:
        verdict = f"The logits of {report.over_tolerance} photographs are over tolerance."
    typer.secho(verdict, fg="green" if report.passed else "red")


def _margin(margin: float | None) -> str:
    return "–" if margin is None else f"{margin:.3g}"


def _say_more(count: int) -> None:
    if count > _ROWS:
        typer.echo(f"and {count - _ROWS} more, see --json")
