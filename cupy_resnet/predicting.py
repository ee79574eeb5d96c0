"""`predict`: from photographs to answers in one call, with the models it loaded kept for the next one."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, overload

from . import environment
from .loading import load
from .model import Model
from .prediction import Prediction

MOST_MODELS = 2
"""How many models `predict` keeps; the one not used for longest goes first."""

_models: OrderedDict[Any, Future[Model]] = OrderedDict()
_lock = threading.Lock()


@overload
def predict(inputs: Any, *, stream: Literal[False] = False, **options: Any) -> list[Prediction]: ...
@overload
def predict(inputs: Any, *, stream: Literal[True], **options: Any) -> Iterator[Prediction]: ...
@overload
def predict(inputs: Any, *, stream: bool, **options: Any) -> list[Prediction] | Iterator[Prediction]: ...
def predict(
    inputs: Any,
    *,
    model: str = "resnet18",
    weights: str | Path | Mapping[str, Any] | None = None,
    topk: int = 5,
    batch_size: int | None = None,
    stream: bool = False,
    progress: bool = False,
    on_error: str = "raise",
    features: bool = False,
    exif: bool = True,
    channel_order: str = "rgb",
    workers: int | None = None,
    **load_options: Any,
) -> list[Prediction] | Iterator[Prediction]:
    """Classifies images.

    The last `MOST_MODELS` models are kept, so that a second call with the same model does not load it again; a weights
    file that has changed is. `forget_models` lets them go. Weights given as a mapping are loaded anew each time: for
    those, and to warm up, run and close a model yourself, use `cupy_resnet.load` and `cupy_resnet.Model.predict`.

    Args:
        inputs: a path, folder, pattern, URL, bytes, file object, PIL image, array, tensor, or a list or generator of
            those; see `cupy_resnet.images.expand`. A single image gives a list of one prediction, too.
        model: one of `cupy_resnet.list_models`, or with weights that come with the package, ``"resnet20-cifar10"``.
        weights: as for `cupy_resnet.load`; by default torchvision's IMAGENET1K_V1.
        topk, batch_size, stream, progress, on_error, features, exif, channel_order, workers: as for
            `cupy_resnet.Model.predict`.
        load_options: further arguments of `cupy_resnet.load`, such as ``engine``, ``kernel``, ``categories``. Without
            ``device``, a model stays on the GPU that was current when it was loaded.

    Returns:
        One `Prediction` per image, in order: a list, or with ``stream=True`` an iterator.

    Raises:
        Exception: as `cupy_resnet.load` and `cupy_resnet.Model.predict` raise.
    """
    return _loaded(model, weights, load_options, progress).predict(
        inputs,
        topk=topk,
        batch_size=batch_size,
        stream=stream,
        progress=progress,
        on_error=on_error,
        features=features,
        exif=exif,
        channel_order=channel_order,
        workers=workers,
    )


def forget_models() -> None:
    """Lets go of the models that `predict` keeps; a model still in use lives on until that use ends."""
    with _lock:
        _models.clear()


def _loaded(model: str, weights: Any, options: dict[str, Any], progress: bool) -> Model:
    """Returns a model from those kept, or loads it: once, while other threads that want it wait."""
    try:
        key = _key((model, weights, options, environment.engine()))
        hash(key)
    except TypeError:
        key = None
    if key is None or isinstance(weights, Mapping):  # whether arrays have changed costs more to know than it saves
        return load(model, weights, progress=progress, **options)
    with _lock:
        future = _models.get(key)
        mine = future is None
        if future is None:
            future = _models[key] = Future()
        _models.move_to_end(key)
        while len(_models) > MOST_MODELS:
            _models.popitem(last=False)
    if mine:
        try:
            future.set_result(load(model, weights, progress=progress, **options))
        except BaseException as error:
            with _lock:
                if _models.get(key) is future:
                    del _models[key]
            future.set_exception(error)
            raise
    return future.result()


def _key(value: Any) -> Any:
    """Returns something hashable that is equal for equal arguments; a file's size and time are part of it."""
    if isinstance(value, Mapping):
        return "mapping", tuple(sorted((str(name), _key(item)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        if path.is_file():
            status = path.stat()
            return str(path.absolute()), status.st_size, status.st_mtime_ns
        return str(value)
    return value
