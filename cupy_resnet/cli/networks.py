"""`cupy-resnet models`, `info`, `explain`: the networks, what they are made of, what computes them."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .. import environment
from .console import downloading, make_table, print_fields, print_json, print_table, printable, say
from .options import JsonOption, KernelOption, ModelArgument, PrecisionOption, WeightsOption, one_of

if TYPE_CHECKING:
    from ..summary import Summary
    from ..weights_store import Weights

FAMILIES = {"imagenet": "ImageNet (torchvision)", "cifar": "CIFAR (He et al. §4.2)"}

SizeOption = Annotated[
    int | None, typer.Option(min=1, metavar="PIXELS", help="Height and width; by default the network's own.")
]
BatchOption = Annotated[int, typer.Option(min=0, metavar="N", help="Images in the batch.")]


def models(as_json: JsonOption = False) -> None:
    """List the networks and the weights there are for each."""
    from ..networks import describe, list_models
    from ..summary import count_parameters
    from ..weights_store import embedded, split_name
    from ..weights_store.pretrained import NAMES

    entries: list[dict[str, Any]] = []
    for name in list_models():
        network = describe(name)
        entries.append(
            {
                "name": name,
                "family": "imagenet" if name in NAMES else "cifar",
                "parameters": count_parameters(network),
                "default_size": network.default_size,
                "torchvision_weights": list(NAMES.get(name, ())),
                "embedded": [weights for weights in embedded() if split_name(weights)[0] == name],
            }
        )
    if as_json:
        print_json(entries)
        return
    table = make_table("name", "parameters", "pixels", "weights", right=("parameters", "pixels"))
    for entry in entries:
        weights = [*entry["torchvision_weights"], *(f"{name} (comes with the package)" for name in entry["embedded"])]
        table.add_row(
            entry["name"],
            f"{entry['parameters'] / 1e6:.2f} M",
            str(entry["default_size"]),
            Text(", ".join(weights) or "your own"),
        )
    print_table(table)


def explain(
    model: ModelArgument,
    batch: BatchOption = 1,
    size: SizeOption = None,
    kernel: KernelOption = "auto",
    engine: Annotated[
        str,
        typer.Option(metavar="cuda|numpy", callback=one_of("engine", ("cuda", "numpy")), help="The engine to explain."),
    ] = "cuda",
    precision: PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Tell which kernel computes each operation of a network, and why. Needs no GPU and no weights."""
    from ..explanation import explain as explain_network
    from ..networks import describe
    from ..weights_store import split_name

    network = describe(split_name(model)[0])
    pixels = network.default_size if size is None else size
    shape = (batch, network.stem.in_channels, pixels, pixels)
    explanation = explain_network(network, shape, engine=engine, kernel=kernel, precision=precision)
    print_json([asdict(step) for step in explanation]) if as_json else typer.echo(str(explanation))


def info(
    model: ModelArgument,
    weights: WeightsOption = None,
    size: SizeOption = None,
    batch: BatchOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Tell layers, shapes, parameters, FLOPs and transforms.

    And what is known of the weights, if they are on this machine or given. Downloads nothing unless
    weights of torchvision are asked for by name.
    """
    from ..checkpoints import infer_sizes, verify
    from ..networks import describe
    from ..summary import summarize
    from ..weights_store import split_name
    from ..weights_store.resolving import default_transforms

    name = split_name(model)[0]
    found = _find_weights(model, weights)
    classes, channels = (None, None) if found is None else infer_sizes(found.state)
    network = describe(name, num_classes=classes, in_channels=channels)
    if found is not None:
        verify(found.state, network.tensor_table(), name)
    transforms = default_transforms(name) if found is None else found.transforms
    pixels = size or transforms["crop"]
    summary = summarize(network, (batch, network.in_channels, pixels, pixels))
    family = "imagenet" if network.stem_max_pool else "cifar"
    facts = {
        "name": name,
        "family": family,
        "input_shape": summary.input_shape,
        "num_classes": network.num_classes,
        "num_features": network.num_features,
        "parameters": summary.parameters,
        "tensors": summary.tensors,
        "flops": summary.flops,
        "transforms": transforms,
        "categories": _categories(network.num_classes, family, found),
        "weights": _describe_weights(found),
        "layers": [asdict(layer) for layer in summary.layers],
    }
    if as_json:
        print_json(facts)
    else:
        _print_info(facts, summary, found)


def _find_weights(model: str, weights: str | None) -> "Weights | None":
    """Returns the weights that were asked for, or, if none were, those that are on this machine; None without any."""
    from ..weights_store import WeightsUnavailableError, embedded, resolve, split_name

    name, asked = split_name(model)
    kept = environment.cache_dir() / "weights" / f"{name}-IMAGENET1K_V1.safetensors"
    here = kept.is_file() or name in [split_name(own)[0] for own in embedded()]
    if weights is None and asked is None and not here:
        return None
    with downloading(f"weights of {name}") as progress:
        try:
            return resolve(model, weights, progress=progress)
        except WeightsUnavailableError as error:  # what is kept is damaged, and cannot be fetched again
            if weights is not None:
                raise
            say(f"weights: {error}")
            return None


def _categories(num_classes: int, family: str, found: "Weights | None") -> list[str] | None:
    from ..weights_store import imagenet_classes

    if found is not None:
        return found.categories
    return [name for _, _, name in imagenet_classes()] if family == "imagenet" and num_classes == 1000 else None


def _describe_weights(found: "Weights | None") -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "name": found.name,
        "source": found.source,
        "sha256": found.sha256,
        "source_sha256": found.source_sha256,
        "path": None if found.path is None else str(found.path),
        "training": found.training,
    }


def _print_info(facts: dict[str, Any], summary: "Summary", found: "Weights | None") -> None:
    N, C, H, W = summary.input_shape
    categories, transforms = facts["categories"], facts["transforms"]
    named = f": {', '.join(categories[:3])}, … {categories[-1]}" if categories else ", without names"
    fields = {
        "network": f"{facts['name']}, family {FAMILIES[facts['family']]}",
        "input": f"{N} × {C} × {H} × {W} (N, C, H, W)",
        "parameters": f"{facts['parameters']:,} in {facts['tensors']} tensors with BatchNorm's statistics, "
        f"{facts['parameters'] * 4 / 1e6:.1f} MB as float32",
        "FLOPs": f"{facts['flops'] / 1e9:.3f} GFLOP for the batch (a multiply-add counts as two)",
        "classes": printable(f"{facts['num_classes']}{named}"),
        "features": str(facts["num_features"]),
        "transforms": _described(transforms),
    }
    if found is None:
        default = "IMAGENET1K_V1, not on this machine yet" if facts["family"] == "imagenet" else "your own"
        fields["weights"] = f"{default}; transforms are the defaults"
    else:
        fields["weights"] = printable(found.name)
        fields["source"] = printable(found.source)
        fields["sha256"] = found.sha256
        if found.path is not None:
            fields["file"] = printable(str(found.path))
    print_fields(fields)
    typer.echo()
    table = make_table("layer", "operation", "output", "parameters", "MFLOP", right=("parameters", "MFLOP"))
    for layer in summary.layers:
        table.add_row(
            layer.name,
            Text(layer.op),
            "×".join(map(str, layer.output_shape)),
            f"{layer.parameters:,}" if layer.parameters else "",
            f"{layer.flops / 1e6:.1f}",
        )
    print_table(table)


def _described(transforms: dict[str, Any]) -> str:
    resize, crop = transforms["resize"], transforms["crop"]
    return (
        f"shorter side to {resize} ({transforms['interpolation']}), centre {crop} × {crop}, minus mean "
        f"{_listed(transforms['mean'])}, by std {_listed(transforms['std'])}"
    )


def _listed(values: list[float]) -> str:
    return "/".join(f"{value:g}" for value in values)
