"""A demonstration that needs nothing but the package: its own drawings, its own weights, whatever engine is there."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from . import drawings, environment
from .loading import load
from .model import Model
from .weights_store import WeightsUnavailableError, embedded

MODEL = "resnet20-cifar10"

_BATCH = {"cuda": 1000, "numpy": 50}
_MEASURED_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the network takes a drawing for.

    Args:
        drawn: what was meant, one of CIFAR-10's classes.
        label, probability: the likeliest class.
        others: the next two classes and their probabilities.
    """

    drawn: str
    label: str
    probability: float
    others: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What the demonstration showed.

    Args:
        model: the network and its weights.
        answers: one per drawing.
        engine: ``"cuda"`` or ``"numpy"``.
        device: the GPU's name, or the number of processors.
        obstacle: why no GPU is used; None if one is, or if the NumPy engine was asked for.
        kernels: what computes the operations of a pass, and how many of them each.
        images_per_second: from uint8 pixels in memory to labels, resizing included.
        batch_size: images at once in that measurement.
        seconds: how long was measured.
    """

    model: str
    answers: tuple[Answer, ...]
    engine: str
    device: str
    obstacle: str | None
    kernels: dict[str, int]
    images_per_second: float
    batch_size: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns what ``--json`` prints."""
        return asdict(self)


def run_demo(show: Callable[[str], None] = lambda doing: None, *, save: str | Path | None = None) -> Demo:
    """Classifies the drawings and measures for about a second.

    Args:
        show: told what is being done.
        save: a folder to write the drawings to, as ``cat.png``; made if need be.

    Raises:
        OSError: `save` cannot be written.
        WeightsUnavailableError: the package was installed without its weights.
    """
    if MODEL not in embedded():
        raise WeightsUnavailableError(
            f"the weights {MODEL}, which should come with the package, are not in this installation; "
            "reinstall it: pip install --force-reinstall --no-deps cupy-resnet"
        )
    images = {name: drawings.draw(name) for name in drawings.NAMES}
    if save is not None:
        folder = Path(save).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in images.items():
            image.save(folder / f"{name}.png")
    with load(MODEL) as model:
        show("classifying")
        predictions = model.predict(list(images.values()), topk=3)
        answers = tuple(
            Answer(
                drawn=name,
                label=p.labels[0],
                probability=p.probabilities[0],
                others=tuple(zip(p.labels[1:], p.probabilities[1:], strict=True)),
            )
            for name, p in zip(images, predictions, strict=True)
        )
        batch_size = _BATCH[model.engine]
        steps = model.explain((batch_size, 3, model.default_size, model.default_size))
        show("measuring")
        rate, seconds = _measure(model, list(images.values()), batch_size)
        return Demo(
            model=MODEL,
            answers=answers,
            engine=model.engine,
            device=_describe_device(model),
            obstacle=_obstacle(model),
            kernels=dict(Counter(step.kernel for step in steps).most_common()),
            images_per_second=rate,
            batch_size=batch_size,
            seconds=seconds,
        )


def _measure(model: Model, images: Sequence[Image.Image], batch_size: int) -> tuple[float, float]:
    """Returns images per second, and the seconds that were measured."""
    small = [image.resize((model.default_size, model.default_size)) for image in images]
    end = 0.0

    def until_the_end() -> Iterator[Image.Image]:
        while time.perf_counter() < end:
            for _ in range(0, batch_size, len(small)):
                yield from small

    for _ in model.predict(small * (batch_size // len(small)), stream=True, batch_size=batch_size):
        pass  # kernels are compiled, memory is there
    begin = time.perf_counter()
    end = begin + _MEASURED_SECONDS
    count = sum(1 for _ in model.predict(until_the_end(), stream=True, batch_size=batch_size))
    seconds = time.perf_counter() - begin
    return count / seconds, seconds


def _describe_device(model: Model) -> str:
    if model.engine == "cuda":
        from .engines.cuda_engine import describe_device

        return describe_device(0).name
    from .preparation import default_workers

    return f"{default_workers()} processors"


def _obstacle(model: Model) -> str | None:
    if model.engine == "cuda" or environment.engine() == "numpy":
        return None
    from .engines.cuda_engine import cuda_obstacle

    return cuda_obstacle()
