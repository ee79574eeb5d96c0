"""`cupy-resnet profile`: where the time of a forward pass goes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .console import make_table, print_fields, print_json, print_table, say, stacked, working
from .options import EngineOption, KernelOption, ModelArgument, NoFuseOption, PrecisionOption, WeightsOption

if TYPE_CHECKING:
    from ..model import Model
    from ..proof.profiling import Profile


def profile(
    model: ModelArgument,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Images in the batch.")] = 1,
    size: Annotated[
        int | None, typer.Option(min=1, metavar="PIXELS", help="Height and width; by default the network's own.")
    ] = None,
    weights: WeightsOption = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw weights at random: the times are the same without any file.")
    ] = False,
    precision: PrecisionOption = "auto",
    kernel: KernelOption = "auto",
    no_fuse: NoFuseOption = False,
    engine: EngineOption = "auto",
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="How often each operation is timed.")] = 30,
    measure_ceilings: Annotated[
        bool, typer.Option("--measure-ceilings", help="Measure again what this machine can do at best.")
    ] = False,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the roofline, as .png, .svg or .pdf; needs Matplotlib.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures there; - is stdout, for the table.")
    ] = None,
) -> None:
    """Time every operation, and tell what bounds it.

    Operations are timed one by one on an idle device: launch overlap is off. The whole pass is timed
    beside that, as it is called.
    """
    from ..proof.plot_style import check_plot_path, save_figure
    from ..proof.profiling import ceilings_of, write_trace
    from ..proof.profiling import profile as profile_model
    from ..proof.roofline import plot_profile
    from ..weights_store.writing import write_file

    if plot is not None:
        try:
            check_plot_path(Path(plot))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--plot") from error
    if random_weights and weights is not None:
        raise typer.BadParameter("--weights and --random-weights exclude each other")
    name, given = _random(model) if random_weights else (model, weights)
    with (
        working("loading") as show,
        _load(name, given, engine=engine, kernel=kernel, precision=precision, fuse=not no_fuse) as loaded,
    ):
        show("measuring what this machine can do at best")
        limits = ceilings_of(loaded, refresh=measure_ceilings)
        show(f"timing {loaded.name} operation by operation")
        result = profile_model(loaded, batch, size, samples=samples, limits=limits)
    if trace is not None:
        write_trace(result, Path(trace))
    if plot is not None:
        save_figure(plot_profile(result), Path(plot))
    if output == "-":
        print_json(result.to_dict())
    else:
        if output is not None:
            write_file(Path(output), json.dumps(result.to_dict(), indent=1).encode())
        _print_profile(result)
    for file in (trace, plot, output):
        if file not in (None, "-"):
            say(f"wrote {file}")


def _load(model: str, weights: Any, **options: Any) -> "Model":
    """Loads a model; where there are no weights, the error names the way to do without."""
    from ..loading import load
    from ..weights_store import NoWeightsError, WeightsUnavailableError

    try:
        return load(model, weights, **options)
    except (NoWeightsError, WeightsUnavailableError) as error:
        raise type(error)(
            f"{error}\nTo profile, any weights will do: --random-weights draws them and needs no file."
        ) from error


def _random(model: str) -> tuple[str, Any]:
    """Returns a network's name and weights of its shapes."""
    from ..networks import describe, random_state_dict
    from ..weights_store import split_name

    name = split_name(model)[0]
    return name, random_state_dict(describe(name))


def _print_profile(result: "Profile") -> None:
    unit, scale = ("TFLOP/s", 1.0) if max(op.tflops for op in result.ops) >= 0.5 else ("GFLOP/s", 1e3)
    rates, of_bound = ("µs", unit, "GB/s"), ("of it", "share")
    words = ("layer", "operation", "problem", "kernel", "configuration")
    table = make_table(*words, *rates, "bound", *of_bound, right=rates + of_bound)
    table.columns[0].no_wrap = True  # a name in pieces is none
    for op in result.ops:
        table.add_row(
            stacked(op.layer) or Text(f"({op.block})", "dim"),
            op.op,
            op.problem,
            op.kernel,
            op.config,
            f"{op.median_us:.1f}",
            f"{op.tflops * scale:.1f}" if op.flops else "–",
            f"{op.gb_per_s:.1f}",
            op.bound,
            f"{op.percent_of_bound:.0f}%",
            f"{op.share:.1%}",
        )
    print_table(table)
    typer.echo()
    print_fields(_summary(result))


def _summary(result: "Profile") -> dict[str, str]:
    N, C, H, W = result.input_shape
    ratio = result.median_whole_us / result.sum_us
    waiting = "; the rest is the GPU waiting for launches" if result.engine == "cuda" and ratio > 1.05 else ""
    kernels = [f"{name} × {count}: {time / result.sum_us:.1%}" for name, (count, time) in result.by_kernel().items()]
    limits = result.ceilings
    rates = [f"copy {_rate(limits.copy_bytes_per_s, 'B/s')} ({limits.method['copy']})"]
    rates += [
        f"{name} {_rate(rate, 'FLOP/s')} ({limits.method[name]})" for name, rate in limits.matmul_flops_per_s.items()
    ]
    fields = {
        "network": f"{result.model}, input {N} × {C} × {H} × {W}, {result.precision}, {result.engine} engine, "
        f"{limits.device}",
        "sum": f"{_time(result.sum_us)}: {len(result.ops)} operations, {result.flops / 1e9:.3g} GFLOP, each timed by "
        f"itself on an idle device, launch overlap off, median of {result.samples}",
        "whole pass": f"{_time(result.median_whole_us)}, as it is called: {ratio:.2f} of that sum{waiting}",
        "kernels": ", ".join(kernels),
        "ceilings": f"measured {limits.date}: " + ", ".join(rates),
        "bound": _bound(result),
        "roofline": f"{_time(result.bound_us)}: the sum of all bounds, {result.bound_us / result.median_whole_us:.0%} "
        "of the whole pass",
        "timing itself": f"takes {result.empty_us:.1f} µs, included in the time of every operation",
    }
    if any(op.percent_of_bound > 100 for op in result.ops):
        fields["above 100%"] = (
            "small tensors come from a cache, not from memory; FLOPs are those of the direct convolution, of which "
            "Winograd saves more than half"
        )
    return fields


def _bound(result: "Profile") -> str:
    roof = result.roof
    moved = "the bytes that must be moved at the copy's rate"
    if roof.flops_per_s is None:
        rule = f"{moved}; that of {roof.compute} products is not known here"
    else:
        rule = f"the longer of: {moved}, and the arithmetic at {roof.compute}'s rate"
    return f"{rule}; what one kernel computes is one operation, and what stays within it is not moved"


def _time(us: float) -> str:
    return f"{us / 1e3:.3f} ms"


def _rate(value: float, unit: str) -> str:
    prefix, factor = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / factor:.3g} {prefix}{unit}"
