"""`cupy-resnet convert`: weights into one file with all that belongs to them."""

from typing import Annotated

import typer

from .console import downloading, say
from .options import (
    CategoriesOption,
    CropOption,
    MeanOption,
    ModelArgument,
    PresetOption,
    ResizeOption,
    StdOption,
    WeightsOption,
    numbers,
    one_of,
)


def convert(
    model: ModelArgument,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file to write, .safetensors or .json.")
    ],
    weights: WeightsOption = None,
    format: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            "--format",
            "--to",
            metavar="NAME",
            callback=one_of("format", ("safetensors", "npz+json")),
            help="safetensors, or npz+json: a manifest of the architecture with the tensors as .npz beside it; by "
            "default what the name of FILE says.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", callback=one_of("dtype", ("float32", "float16")), help="float32 or float16.")
    ] = "float32",
    categories: CategoriesOption = None,
    preset: PresetOption = None,
    resize: ResizeOption = None,
    crop: CropOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
) -> None:
    """Write weights to a file that needs no torch.

    With their transforms, class names and origin. FILE appears as a whole or not at all.
    """
    from ..weights_store import convert as convert_weights

    with downloading(f"weights of {model}") as progress:
        path = convert_weights(
            model,
            weights,
            output,
            format=format,
            dtype=dtype,
            categories=categories,
            preset=preset,
            resize=resize,
            crop=crop,
            mean=numbers(mean),
            std=numbers(std),
            progress=progress,
        )
    beside = path.with_suffix(".npz")
    written = [path, beside] if path.suffix.lower() == ".json" else [path]
    say("wrote " + " and ".join(f"{file} ({file.stat().st_size / 1e6:.1f} MB)" for file in written))
