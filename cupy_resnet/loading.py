"""`load`: from a network's name and weights to a model that runs."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import conv2d
from ._names import unknown_name
from .binding import DEFAULT_EPS, bind
from .checkpoints import infer_sizes, verify
from .engines.selection import make_engine
from .errors import CheckpointError
from .model import Model
from .networks import describe, matching_models
from .weights_store import resolve, split_name

if TYPE_CHECKING:
    from .engines.cuda_engine import CudaEngine

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", *conv2d.PRECISIONS)


def load(
    model: str,
    weights: str | Path | Mapping[str, Any] | None = None,
    *,
    engine: str = "auto",
    kernel: str = "auto",
    precision: str = "auto",
    fuse: bool = True,
    plan: bool = True,
    tune: bool = False,
    strict: bool = False,
    num_classes: int | None = None,
    in_channels: int | None = None,
    batch_norm_eps: float | Mapping[str, float] | None = None,
    device: int | None = None,
    categories: str | Path | Iterable[str] | None = None,
    preset: str | None = None,
    resize: int | None = None,
    crop: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    progress: bool = False,
) -> Model:
    """Loads a network with its weights.

    Args:
        model: one of `cupy_resnet.list_models`, as ``"resnet18"``, or of `cupy_resnet.weights_store.embedded`, as
            ``"resnet20-cifar10"``: a network with weights that come with the package.
        weights: torchvision's name of weights, as ``"IMAGENET1K_V2"``; a ``.safetensors``, ``.npz``, ``.pth``,
            ``.pt`` or manifest ``.json`` file; or a mapping from torchvision's keys to arrays. Wrappers' prefixes and
            containers are undone, see `cupy_resnet.checkpoints.read_state_dict`. By default IMAGENET1K_V1 for the
            ImageNet family, for the others what comes with the package; see `cupy_resnet.weights_store.resolve`.
        engine: ``"cuda"``, ``"numpy"``, or ``"auto"``: CUDA where a GPU can be used, else NumPy.
        kernel: the convolution kernel to use wherever it applies, or ``"auto"`` for the fastest; `Model.explain`
            lists where it does not apply.
        precision: the arithmetic: ``"fp32"`` on CUDA cores; on tensor cores ``"fp32-tc"`` (as accurate as fp32),
            ``"tf32"``, ``"fp16"`` or ``"bf16"``, with sums, biases, features and logits in fp32 everywhere. ``"auto"``
            is fp16 on a GPU, which has tensor cores, and fp32 on the NumPy engine, which knows no other.
        fuse: whether BatchNorm is folded into the convolutions, and residual and ReLU are computed with them.
        plan: whether a forward pass on the GPU is captured as a CUDA graph at the first call of each shape, and
            replayed afterwards; see `cupy_resnet.plan`.
        tune: whether convolutions not yet timed on this GPU are timed at the first call of each shape, once, alone and
            then within the captured pass; the results are kept for later processes. Without effect on the NumPy engine
            or with a kernel asked for by name.
        strict: whether a convolution that `kernel` does not support is an error.
        num_classes: by default what the classifier in `weights` has.
        in_channels: by default what the first filter in `weights` has.
        batch_norm_eps: one value, or a mapping from BatchNorm names such as ``"layer1.0.bn1"``, 1e-5 for the rest; by
            default what is kept with the weights, else 1e-5.
        device: index of the GPU, by default CuPy's current one.
        categories: the classes' names: a list, a file, or ``"imagenet"``; by default those kept with the weights.
        preset: how `Model.predict` prepares images, ``"IMAGENET1K_V1"``, ``"IMAGENET1K_V2"`` or ``"CIFAR10"``; by
            default as kept with the weights, else as the first.
        resize, crop, mean, std: single values in place of the preset's, see `cupy_resnet.images.Transforms`.
        progress: show downloads on stderr.

    Raises:
        CheckpointError: the weights cannot be read or do not fit; the message lists how.
        EngineUnavailableError: the CUDA engine was asked for and cannot run here.
        FileNotFoundError: there is no such file.
        ValueError: an unknown model, engine, kernel, precision, preset or name of weights, or no weights.
        TypeError: `weights` is neither a name, a path nor a mapping.
        WeightsUnavailableError: torchvision's weights can neither be found nor be downloaded.
    """
    name, _ = split_name(model)
    describe(name, num_classes=num_classes, in_channels=in_channels)
    if precision not in PRECISIONS:
        raise ValueError(unknown_name("precision", precision, PRECISIONS))
    ops = make_engine(engine, kernel=kernel, strict=strict, device=device, precision=precision)
    precision = getattr(ops, "precision", "fp32")
    with _download_progress(name) if progress else contextlib.nullcontext() as downloaded:
        found = resolve(
            model,
            weights,
            categories=categories,
            preset=preset,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            batch_norm_eps=batch_norm_eps,
            progress=downloaded,
        )
    state = found.state
    found_classes, found_channels = infer_sizes(state)
    network = describe(name, num_classes=num_classes or found_classes, in_channels=in_channels or found_channels)
    try:
        verify(state, network.tensor_table(), name)
    except CheckpointError as error:
        others = [other for other in matching_models({key: a.shape for key, a in state.items()}) if other != name]
        if others:
            raise CheckpointError(f"{error}\nIts tensors are those of {' or '.join(others)}.") from error
        raise
    eps = DEFAULT_EPS if found.batch_norm_eps is None else found.batch_norm_eps
    bound = bind(network, state, ops, fuse=fuse, batch_norm_eps=eps)
    tuner = None
    if tune and ops.name == "cuda" and kernel == "auto":
        from .tuning import Tuner

        cuda = cast("CudaEngine", ops)
        tuner = Tuner(bound, cuda.precision, cuda.device, ops=cuda if plan else None)
    logger.info("%s: %d tensors of %s on the %s engine", name, len(state), found.name, ops.name)
    return Model(
        bound,
        ops,
        weights=found,
        kernel=kernel,
        strict=strict,
        fuse=fuse,
        precision=precision,
        plan=plan,
        tuner=tuner,
    )


def _download_progress(name: str) -> contextlib.AbstractContextManager[Any]:
    from .progress import download_progress

    return download_progress(f"weights of {name}")
