"""`verify`: everything that `cupy-resnet verify` does with a model, in one call."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...batching import default_batch_size
from ...model import Model
from ...preparation import count_images
from ...weights_store import Weights
from .checking import Report, check, check_steps
from .dumps import check_target, read_dump, write_dump
from .labels import Labels, read_labels
from .photographs import PhotoReport, compare_photographs, first_photographs
from .recording import record
from .references import REFERENCES, Reference, make_reference, record_reference

LAYER_IMAGES = 4
"""Images in a comparison layer by layer, unless the caller says otherwise: every checkpoint is kept in memory."""

Progress = Callable[[int | None], AbstractContextManager[Callable[[], None]]]
"""Given the number of photographs, a context whose value is called once for each."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was compared.

    Attributes:
        layers: checkpoint by checkpoint; None if there was no reference.
        photographs: answer by answer; None without photographs.
    """

    layers: Report | None
    photographs: PhotoReport | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is over tolerance."""
        return all(report.passed for report in (self.layers, self.photographs) if report is not None)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold."""
        return {
            "passed": self.passed,
            "layers": None if self.layers is None else self.layers.to_dict(),
            "photographs": None if self.photographs is None else self.photographs.to_dict(),
        }


@contextlib.contextmanager
def _no_progress(total: int | None) -> Iterator[Callable[[], None]]:
    yield lambda: None


def verify(
    model: Model,
    weights: Weights,
    against: str | Path | None,
    *,
    photos: str | os.PathLike[str] | None = None,
    labels: str | Path | None = None,
    step: bool = False,
    batch: int | None = None,
    size: int | None = None,
    seed: int = 0,
    dump: str | Path | None = None,
    show: Callable[[str], None] = lambda doing: None,
    progress: Progress = _no_progress,
) -> Outcome:
    """Compares a model with another implementation, layer by layer and, given photographs, answer by answer.

    Args:
        model: what is verified.
        weights: the model's, for the reference: what `cupy_resnet.weights_store.resolve` finds.
        against: ``"torch"``, ``"numpy"``, or the folder of a dump, whose input is then the model's; None: only dump.
        photos: a folder of photographs; None for normal deviates. `LAYER_IMAGES` of them are compared layer by layer.
        labels: as for `labels.read_labels`.
        step: whether each block starts from the reference's own input.
        batch: images layer by layer, and photographs at a time; by default `LAYER_IMAGES`, and as many as `predict`
            takes.
        size: height and width of normal deviates in pixels, by default those of a photograph's crop.
        seed: of normal deviates.
        dump: a folder to keep the model's input and checkpoints in.
        show: called with what is being done.
        progress: shows how many photographs are done.

    Raises:
        ImportError: torch is the reference and is not installed.
        OSError: the dump cannot be read or written.
        ValueError: the two cannot be compared, or no photograph can be read; the message tells.
    """
    if dump is not None:
        check_target(Path(dump))
    table = read_labels(labels, model)
    if against is not None and against not in REFERENCES:
        recorded = read_dump(Path(against))
        show(f"running {model.name}")
        ours = record(model, recorded.input, input_from=recorded.input_from)
        if dump is not None:
            write_dump(Path(dump), ours)
        return Outcome(layers=check_steps(model, recorded) if step else check(ours, recorded))
    if photos is not None:
        x, names = first_photographs(model, photos, batch or LAYER_IMAGES)
        input_from = f"the first {len(names)} photographs of {os.fspath(photos)}"
    else:
        x = random_input(model, batch or LAYER_IMAGES, size, seed)
        input_from = f"normal deviates, seed {seed}"
    if dump is not None:
        show(f"running {model.name}")
        write_dump(Path(dump), record(model, x, input_from=input_from))
    if against is None:
        return Outcome(layers=None)
    show(f"building the reference in {against}")
    reference = make_reference(str(against), weights, device=_torch_device(model) if against == "torch" else "cpu")
    show(f"running {reference.name}")
    recorded = record_reference(reference, weights, x, input_from=input_from)
    show(f"comparing {model.name} layer by layer")
    layers = check_steps(model, recorded) if step else check(record(model, x, input_from=input_from), recorded)
    if photos is None:
        return Outcome(layers=layers)
    return Outcome(layers=layers, photographs=_photographs(model, reference, photos, table, batch, progress))


def random_input(model: Model, images: int, size: int | None = None, seed: int = 0) -> np.ndarray:
    """Returns normal deviates, float32 (images, in_channels, size, size); `size` is by default the model's crop."""
    pixels = size or model.transforms.crop
    return np.random.default_rng(seed).standard_normal((images, model.in_channels, pixels, pixels), np.float32)


def _photographs(
    model: Model,
    reference: Reference,
    photos: str | os.PathLike[str],
    labels: Labels,
    batch: int | None,
    progress: Progress,
) -> PhotoReport:
    network = model.network
    size = batch or default_batch_size(network, model.transforms.crop, model.engine, None)
    with progress(count_images(photos)) as advance:
        return compare_photographs(
            model, reference, photos, labels=labels, root=os.fspath(photos), batch_size=size, advance=advance
        )


def _torch_device(model: Model) -> str:
    """Returns where torch computes beside this model: on the GPU if the model does and torch can."""
    from .torch_reference import cuda_is_available

    return "cuda" if model.engine == "cuda" and cuda_is_available() else "cpu"
