"""`resolve`: from what a caller names to weights with their transforms and class names."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from .._names import unknown_name
from ..checkpoint_files import SUFFIXES, file_sha256, read_metadata
from ..checkpoints import read_state_dict
from ..errors import CheckpointError
from ..images.transforms import Transforms
from ..networks import describe, list_models
from ..resources import folder
from . import pretrained
from .categories import read_categories
from .download import Progress
from .unavailable import NoWeightsError, advice, unavailable
from .weights import Weights, check_counts, described

logger = logging.getLogger(__name__)

DEFAULT_PRESET = "IMAGENET1K_V1"
"""The transforms of weights that come without any."""


def resolve(
    model: str,
    weights: str | Path | Mapping[str, Any] | None = None,
    *,
    categories: str | Path | Iterable[str] | None = None,
    preset: str | None = None,
    resize: int | None = None,
    crop: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    batch_norm_eps: float | Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Finds weights, and what belongs to them. Whether the tensors fit the network is `verify`'s to say.

    Args:
        model: one of `cupy_resnet.list_models`, or of `embedded`, as ``"resnet20-cifar10"``: that network with those
            weights.
        weights: one of

            - torchvision's name: ``"IMAGENET1K_V1"``, ``"DEFAULT"``, ``"ResNet50_Weights.IMAGENET1K_V2"``, or the
              member of the enumeration itself. Fetched and converted once, then read from the cache folder.
            - a ``.safetensors``, ``.npz``, ``.pth``, ``.pt`` or manifest ``.json`` file.
            - a mapping, as `cupy_resnet.checkpoints.read_state_dict` takes it.
            - one of `embedded`.
            - None: ``"IMAGENET1K_V1"`` for the ImageNet family, for others the embedded ones.
        categories: the classes' names, in place of those kept with the weights: a list, a file, or ``"imagenet"``;
            see `cupy_resnet.weights_store.categories.read_categories`.
        preset: transforms by name, as `Transforms.preset` knows them, in place of those kept with the weights.
            Without either, those of torchvision's IMAGENET1K_V1, at the network's own image size.
        resize, crop, mean, std: single values, in place of those of the transforms.
        batch_norm_eps: in place of what is kept with the weights.
        progress: called with the bytes downloaded and their number, while torchvision's weights are fetched.

    Raises:
        CheckpointError: a file cannot be read, belongs to another model, or the number of names is not that of classes.
        FileNotFoundError: there is no such file.
        ImportError: a torch file without torch installed.
        TypeError: something else than the above.
        NoWeightsError: a model without weights of its own, and none given; it is a ValueError.
        ValueError: an unknown model, name of weights or preset.
        WeightsUnavailableError: torchvision's weights are neither in the cache nor to be had.
    """
    found = _find(model, str(weights) if isinstance(weights, Enum) else weights, progress)
    place = found.name if found.path is None else str(found.path)
    transforms = Transforms.from_dict(found.transforms) if preset is None else Transforms.preset(preset)
    transforms = transforms.replace(resize=resize, crop=crop, mean=mean, std=std)
    found = replace(found, transforms=transforms.to_dict())
    if categories is not None:
        names, wnids = read_categories(categories)
        found = replace(found, categories=names, wnids=wnids)
    if batch_norm_eps is not None:
        eps = dict(batch_norm_eps) if isinstance(batch_norm_eps, Mapping) else batch_norm_eps
        found = replace(found, batch_norm_eps=eps)
    check_counts(found, f"{found.model} from {place}")
    return found


def embedded() -> list[str]:
    """Returns the names of the weights that travel with the package, as ``"resnet20-cifar10"``: network, data."""
    names = sorted(path.stem for path in folder("weights").glob("*.safetensors"))
    return [name for name in names if name.partition("-")[0] in list_models()]


def split_name(model: str) -> tuple[str, str | None]:
    """Returns (network, embedded weights) of a model's name, the weights None unless the name says them.

    Raises:
        ValueError: there is neither a network nor embedded weights of this name.
    """
    if model in list_models():
        return model, None
    if model not in embedded():
        raise ValueError(unknown_name("model", model, [*list_models(), *embedded()]))
    return model.partition("-")[0], model


def _find(model: str, weights: Any, progress: Progress | None) -> Weights:
    network, name = split_name(model)
    if name is not None:
        if weights is not None and weights != name:
            raise ValueError(f'model="{name}" has its own weights; with others use model="{network}"')
        return _embedded(network, name)
    own = [name for name in embedded() if split_name(name)[0] == network]
    if weights is None:
        if network in pretrained.NAMES:
            return _torchvision(network, DEFAULT_PRESET, progress)
        if own:
            return _embedded(network, own[0])
        raise NoWeightsError(
            f"{network} needs weights: torchvision has none for it; pass a state dict or a file that ends in "
            f"{', '.join(SUFFIXES)}{advice(embedded())}"
        )
    if isinstance(weights, str):
        if weights in embedded():
            if weights not in own:
                raise ValueError(f'weights="{weights}" belong to {split_name(weights)[0]}, not to {network}')
            return _embedded(network, weights)
        name = pretrained.parse(network, weights)
        if name is not None:
            return _torchvision(network, name, progress)
        if re.fullmatch(r"\w+", weights) and not Path(weights).exists():
            valid = [*pretrained.NAMES.get(network, ()), *own, f"a file that ends in {', '.join(SUFFIXES)}"]
            raise ValueError(unknown_name(f"weights of {network}", weights, valid))
    if isinstance(weights, str | Path):
        return _from_file(network, Path(weights).expanduser())
    state = read_state_dict(weights)
    return Weights(
        model=network, name="state dict", state=state, source="a state dict", transforms=default_transforms(network)
    )


def _torchvision(network: str, name: str, progress: Progress | None) -> Weights:
    try:
        return pretrained.obtain(network, name, progress)
    except pretrained.UnobtainableError as error:
        raise unavailable(network, name, str(error), embedded()) from error


def _embedded(network: str, name: str) -> Weights:
    return replace(_from_file(network, folder("weights") / f"{name}.safetensors"), name=name)


def _from_file(network: str, path: Path) -> Weights:
    state = read_state_dict(path)
    metadata = read_metadata(path)
    written_for = metadata.get("model", network)
    if written_for != network:
        raise CheckpointError(f"{path} holds weights of {written_for}, not of {network}")
    sha256 = file_sha256(path)
    # A folder's name is nobody else's business: metadata made from this travels with the weights.
    known: dict[str, Any] = {"source": path.name, "source_sha256": sha256, "transforms": default_transforms(network)}
    known |= described(metadata, str(path))
    return Weights(model=network, name=path.name, state=state, sha256=sha256, path=path, **known)


def default_transforms(network: str) -> dict[str, Any]:
    """Returns the transforms of weights that come without any: `DEFAULT_PRESET` at the network's own image size."""
    transforms, size = Transforms.preset(DEFAULT_PRESET), describe(network).default_size
    return (transforms if transforms.crop == size else transforms.replace(resize=size, crop=size)).to_dict()
