"""`cupy-resnet predict`: from photographs to answers."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .console import say
from .options import (
    CategoriesOption,
    CropOption,
    EngineOption,
    KernelOption,
    MeanOption,
    ModelOption,
    PrecisionOption,
    PresetOption,
    ResizeOption,
    StdOption,
    WeightsOption,
    numbers,
    one_of,
)

if TYPE_CHECKING:
    from ..prediction import Prediction
    from .results import Writer

_IMAGES = (b"\xff\xd8\xff", b"\x89PNG")  # what the commonest image files begin with
_FORMATS = ("table", "json", "jsonl", "csv")


def predict(
    photos: Annotated[
        list[str],
        typer.Argument(
            metavar="PHOTO...",
            help="Image files, folders, patterns or URLs; - reads such names from stdin, one a line.",
            show_default=False,
        ),
    ],
    model: ModelOption = "resnet18",
    weights: WeightsOption = None,
    topk: Annotated[int, typer.Option(min=1, metavar="K", help="Classes to name for each image.")] = 5,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Images at once; by default what the free memory holds.")
    ] = None,
    format: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            metavar="table|json|jsonl|csv",
            callback=one_of("format", _FORMATS),
            help="jsonl and csv are written as results come; by default what the name of --output says, else table.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write results there, as a whole or not at all; - is stdout."
        ),
    ] = None,
    engine: EngineOption = "auto",
    kernel: KernelOption = "auto",
    precision: PrecisionOption = "auto",
    on_error: Annotated[
        str,
        typer.Option(
            metavar="raise|record",
            callback=one_of("word", ("raise", "record")),
            help="What a bad image does: end the run, or appear among the results while the others go on. Exit status "
            "1 either way.",
        ),
    ] = "raise",
    no_exif: Annotated[
        bool, typer.Option("--no-exif", help="Leave images as stored, not upright by their EXIF orientation.")
    ] = False,
    channel_order: Annotated[
        str,
        typer.Option(
            metavar="rgb|bgr", callback=one_of("channel order", ("rgb", "bgr")), help="Of arrays; files are rgb."
        ),
    ] = "rgb",
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Decoding threads; by default one per processor.")
    ] = None,
    categories: CategoriesOption = None,
    preset: PresetOption = None,
    resize: ResizeOption = None,
    crop: CropOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no summary, only warnings and errors.")
    ] = False,
) -> None:
    """Tell what is in photographs.

    Exit status 1 if any image failed. A failed run leaves FILE of --output as it was.
    """
    from ..loading import load
    from .results import FORMATS, STREAMING, format_of, is_stdout, on_terminal, opened

    name = format or format_of(output)
    stderr_is_terminal = sys.stderr.isatty() and not quiet
    with opened(output) as file:
        loaded = load(
            model,
            weights,
            engine=engine,
            kernel=kernel,
            precision=precision,
            categories=categories,
            preset=preset,
            resize=resize,
            crop=crop,
            mean=numbers(mean),
            std=numbers(std),
            progress=stderr_is_terminal,
        )
        begin = time.perf_counter()
        results = loaded.predict(
            _from_stdin(photos) if "-" in photos else photos,
            stream=True,
            topk=topk,
            batch_size=batch_size,
            on_error=on_error,
            exif=not no_exif,
            channel_order=channel_order,
            workers=workers,
            # Results that appear on the same terminal show how far it is, and a bar would break them up.
            progress=stderr_is_terminal and not (name in STREAMING and on_terminal(output)),
        )
        writer = FORMATS[name](file)
        done, failed = _write(results, writer, keep_part=is_stdout(output))
        seconds = time.perf_counter() - begin
    if not quiet:
        say(
            f"{done} {'image' if done == 1 else 'images'} in {seconds:.1f} s ({done / seconds:.1f}/s): {loaded.name}, "
            f"{loaded.weights_name}, {loaded.engine} engine" + (f"; {failed} failed" if failed else "")
        )
    if failed:
        raise typer.Exit(1)


def _write(results: Iterator["Prediction"], writer: "Writer", *, keep_part: bool) -> tuple[int, int]:
    """Writes all results; returns how many there were, and how many with an error.

    With `keep_part`, what came before a bad image is written too, before its error is raised.
    """
    done = failed = 0
    with contextlib.closing(results):  # type: ignore[type-var]
        try:
            for prediction in results:
                writer.add(prediction)
                done += 1
                failed += prediction.error is not None
        except (ValueError, MemoryError):
            if keep_part and done:
                writer.finish()
            raise
    writer.finish()
    return done, failed


def _from_stdin(photos: list[str]) -> Iterator[str]:
    """Yields the names given, those of stdin's lines in place of ``-``."""
    for photo in photos:
        if photo != "-":
            yield photo
            continue
        for line in sys.stdin.buffer:
            if b"\0" in line or line.startswith(_IMAGES):
                raise ValueError("stdin holds no names of images, one a line; pass an image by the name of its file")
            if name := os.fsdecode(line.rstrip(b"\r\n")):
                yield name
