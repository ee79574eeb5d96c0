"""Options and arguments that several commands share, and the checks that make a wrong one exit status 2."""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from .._names import unknown_name

Callback = Callable[[str | None], str | None]


def one_of(kind: str, valid: Iterable[str]) -> Callback:
    """Returns a callback for an option whose value is one of a few words, or None."""
    names = list(valid)

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(unknown_name(kind, value, names))
        return value

    return check


def _check_model(value: str | None) -> str | None:
    from ..weights_store import split_name

    try:
        if value is not None:
            split_name(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


def _check_kernel(value: str | None) -> str | None:
    if value not in (None, "auto"):
        from ..conv2d import check_kernel

        try:
            check_kernel(str(value))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return value


def _check_precision(value: str | None) -> str | None:
    if value is not None:
        from ..loading import PRECISIONS

        if value not in PRECISIONS:
            raise typer.BadParameter(unknown_name("precision", value, PRECISIONS))
    return value


def _check_preset(value: str | None) -> str | None:
    if value is not None:
        from ..images import Transforms

        try:
            Transforms.preset(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return value


def _check_three_numbers(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3:
        raise typer.BadParameter(f"must be three numbers separated by commas, for red, green and blue, got {text!r}")
    return text


def numbers(text: str | None) -> tuple[float, ...] | None:
    """Returns the numbers of `MeanOption` or `StdOption`: ``"0.485,0.456,0.406"``, checked already; None for None."""
    return None if text is None else tuple(float(part) for part in text.split(","))


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", callback=_check_model, help="As `cupy-resnet models` lists them.")
]
ModelOption = Annotated[
    str,
    typer.Option(metavar="NAME", callback=_check_model, help="As `cupy-resnet models` lists them."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="torchvision's name, as IMAGENET1K_V2, or a .safetensors, .npz, .pth, .pt or .json file; by default "
        "IMAGENET1K_V1, or what comes with the package.",
    ),
]
KernelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        callback=_check_kernel,
        help="Convolution kernel wherever it applies, as `cupy-resnet kernels` lists them.",
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        metavar="auto|cuda|numpy",
        callback=one_of("engine", ("auto", "cuda", "numpy")),
        help="auto is cuda where a GPU can be used, else numpy.",
    ),
]
PrecisionOption = Annotated[
    str, typer.Option(metavar="NAME", callback=_check_precision, help="What is computed in, as `load` takes it.")
]
NoFuseOption = Annotated[
    bool, typer.Option("--no-fuse", help="BatchNorm, residual and ReLU as operations of their own.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]

CategoriesOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Names of the classes, a .txt (one a line), .json or .csv file, or the word imagenet."
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=_check_preset,
        help="How images are prepared: IMAGENET1K_V1, IMAGENET1K_V2 or CIFAR10; by default as kept with the weights.",
    ),
]
ResizeOption = Annotated[
    int | None, typer.Option(min=1, metavar="PIXELS", help="Resize the shorter side to this, instead of the preset's.")
]
CropOption = Annotated[
    int | None, typer.Option(min=1, metavar="PIXELS", help="Side of the square cut from the centre.")
]
MeanOption = Annotated[
    str | None,
    typer.Option(metavar="R,G,B", callback=_check_three_numbers, help="Subtracted from pixels in 0–1."),
]
StdOption = Annotated[
    str | None,
    typer.Option(metavar="R,G,B", callback=_check_three_numbers, help="What they are then divided by."),
]
