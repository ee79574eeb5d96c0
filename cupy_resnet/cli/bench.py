"""`cupy-resnet bench`: how fast, beside PyTorch; single convolutions, fusion, and whole runs from files."""

from pathlib import Path
from typing import Annotated

import typer

from .benchmarks import Request, bench_end_to_end, bench_fusion, bench_ladder, bench_rows, wrong_usage
from .options import EngineOption, WeightsOption

MODES = {"rows": bench_rows, "ladder": bench_ladder, "fusion": bench_fusion, "end-to-end": bench_end_to_end}
SAMPLES = {"rows": 1000, "ladder": 30, "fusion": 100, "end-to-end": 5}
BATCHES = {"rows": "1,32", "ladder": "32", "fusion": "64", "end-to-end": "32"}
"""By mode, unless told otherwise."""

MANY = ("--models", "--batch", "--precision")
"""Options whose lists only the mode "rows" goes through."""


def bench(
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Networks, separated by commas, as `cupy-resnet models` lists them.")
    ] = "resnet18",
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Batch sizes, separated by commas; by default 1,32, with --fusion 64, with the others 32.",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAMES", help="What is computed in, separated by commas, as `load` takes it.")
    ] = "fp32",
    kernels: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Convolution kernels, each a contender; auto, the default, is the choice."),
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of eager, graph, compile, max-autotune, torch-cpu; by default the first three on a GPU, else the "
            "last.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of each contender; by default 1000 single calls, 30 with --ladder, 100 "
            "with --fusion, 5 runs with --end-to-end.",
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Calls before them.")] = 50,
    seconds: Annotated[
        float,
        typer.Option(min=0.001, metavar="S", help="After this long, for each kind of call, fewer samples have to do."),
    ] = 60.0,
    size: Annotated[
        int | None, typer.Option(min=1, metavar="PIXELS", help="Height and width; by default the network's own.")
    ] = None,
    engine: EngineOption = "auto",
    no_roofline: Annotated[
        bool, typer.Option("--no-roofline", help="Do not tell how near this machine's best it is, nor measure that.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all samples there; - is stdout, in place of the tables."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw it, as .png, .svg or .pdf; needs Matplotlib.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="ID", help="The source's commit, to be stored; by default what git says.")
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Time every kernel on the network's convolutions, or on --conv.")
    ] = False,
    conv: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="A convolution for --ladder, as N=32,H=56,C=64,K=64,R=3,pad=1; repeatable."),
    ] = None,
    fusion: Annotated[
        bool, typer.Option("--fusion", help="Time the network with ever more operations in one kernel.")
    ] = False,
    end_to_end: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Time whole runs over the image files in a folder.")
    ] = None,
    weights: WeightsOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Decoding threads; by default one per processor.")
    ] = None,
) -> None:
    """Compare speed with PyTorch on this machine, in one run.

    Contenders take turns call by call, with the same weights on the same data, and results are checked. A
    ratio is given only where medians differ by more than samples spread (p10 to p90). The roofline is the
    least time that this machine's memory and arithmetic allow what ours launches, as `profile` lists it. Exit
    status 1 if results of ours are wrong.
    """
    from ..proof.bench.timing import Effort
    from ..proof.plot_style import check_plot_path
    from ..weights_store import split_name

    mode = _mode({"ladder": ladder, "fusion": fusion, "end-to-end": end_to_end is not None})
    _check_given(mode, "rows", {"--kernels": kernels, "--rivals": rivals, "--plot": plot})
    _check_given(mode, "ladder", {"--conv": conv})
    _check_given(mode, "end-to-end", {"--weights": weights, "--workers": workers})
    if size and mode == "end-to-end":
        raise typer.BadParameter("does not go with --end-to-end: the weights' transforms say it", param_hint="--size")
    lists = dict(zip(MANY, (_words(text) for text in (models, batch or BATCHES[mode], precision)), strict=True))
    for option, words in lists.items():
        if not words or (len(words) > 1 and mode != "rows"):
            raise typer.BadParameter("needs exactly one value" if words else "names nothing", param_hint=option)
    if mode == "fusion" and lists["--precision"] != ["fp32"]:
        raise typer.BadParameter("fusion is measured in fp32", param_hint="--precision")
    for name in lists["--models"]:
        wrong_usage(lambda name=name: split_name(name), "--models")  # type: ignore[misc]
    if output not in (None, "-") and Path(str(output)).expanduser().is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file in it", param_hint="--json")
    if plot is not None:
        path = Path(plot)
        wrong_usage(lambda: check_plot_path(path), "--plot")
    request = Request(
        models=lists["--models"],
        batches=[_batch_size(word) for word in lists["--batch"]],
        precisions=lists["--precision"],
        kernels=None if kernels is None else _words(kernels),
        rivals=None if rivals is None else _words(rivals),
        effort=Effort(samples=samples or SAMPLES[mode], warmup=warmup, seconds=seconds),
        size=size,
        engine=engine,
        commit=commit,
        roofline=not no_roofline,
        output=output,
        plot=plot,
        convs=conv or None,
        folder=end_to_end,
        weights=weights,
        workers=workers,
    )
    MODES[mode](request)


def _mode(asked: dict[str, bool]) -> str:
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(f'--{name}' for name in chosen)} exclude each other")
    return chosen[0] if chosen else "rows"


def _check_given(mode: str, belongs_to: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value and mode != belongs_to:
            reason = f"does not go with --{mode}" if belongs_to == "rows" else f"goes with --{belongs_to} only"
            raise typer.BadParameter(reason, param_hint=option)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))


def _batch_size(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise typer.BadParameter(f"must be whole numbers of at least 1, got {word!r}", param_hint="--batch")
    return int(word)
