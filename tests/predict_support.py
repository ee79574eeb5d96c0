"""What the tests of `predict` share: a small model, and images that differ."""

import io
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

import cupy_resnet
from cupy_resnet.networks import describe, random_state_dict

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
STATE = random_state_dict(describe("resnet20"), seed=6)
SMALL = {"resize": 16, "crop": 16, "engine": "numpy"}


def small_model(state: Mapping[str, np.ndarray] = STATE, **options: Any) -> cupy_resnet.Model:
    """resnet20 on images of 16 × 16, on the NumPy engine."""
    names = {"categories": CLASSES} if state["linear.weight"].shape[0] == len(CLASSES) else {}
    return cupy_resnet.load("resnet20", state, **(SMALL | names | options))


def pixels(seed: int, height: int = 20, width: int = 24) -> np.ndarray:
    """uint8 (height, width, 3): a random gradient with noise, so that no two images give the same logits."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(rng.uniform(0, 255, 3), rng.uniform(0, 255, 3), width)[None]
    return np.clip(ramp + rng.normal(0, 40, (height, width, 3)), 0, 255).astype(np.uint8)


def encoded(array: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


def decoding_threads() -> list[threading.Thread]:
    """The pool's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("cupy_resnet-decode")]


def counted(values: Iterator[Any], taken: list[int]) -> Iterator[Any]:
    """Yields the values and keeps in ``taken[0]`` how many."""
    for value in values:
        taken[0] += 1
        yield value
