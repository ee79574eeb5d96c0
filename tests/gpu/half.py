"""What fp16 may cost: torch's own network in it, on the same images, is the measure."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from helpers import photographs, torch_model

from cupy_resnet.checkpoints import read_state_dict
from cupy_resnet.conv2d import VARIANTS
from cupy_resnet.engines.cuda_engine import PREFERRED

TIMES_TORCHS_ERROR = 2.0
"""How far our logits may be from the reference, in multiples of what torch's eager network in fp16 is."""

OTHER_ANSWERS = 1 / 200
"""Share of the images whose top-1 may be another than in fp32: two classes may be that close."""

KERNELS = [("auto", "fp32")] + [
    (kernel, next(p for p in PREFERRED if kernel == "auto" or p in VARIANTS[kernel].precisions))
    for kernel in ("auto", *VARIANTS)
]
"""(kernel, precision): each kernel in what a model computes in that is told nothing else, and what fp32 chooses."""


@lru_cache(maxsize=1)
def all_photographs(data_folder: Path) -> np.ndarray:
    """The 200 photographs as torchvision prepares them."""
    return photographs(data_folder, range(200))


def relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    """‖y − expected‖ / ‖expected‖."""
    return float(np.linalg.norm(y.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def eager_error(name: str, state: Mapping[str, np.ndarray], x: np.ndarray, expected: np.ndarray) -> float:
    """The relative error of torch's network in fp16 on the GPU.

    Args:
        name: of the network.
        state: its weights.
        x: (N, C, H, W), normalised.
        expected: logits in fp32 or better, whose own error does not matter beside that of fp16.
    """
    import torch

    network = torch_model(name, state).cuda().half()
    with torch.inference_mode():
        batches = [network(torch.from_numpy(x[i : i + 50]).cuda().half()).float().cpu() for i in range(0, len(x), 50)]
    return relative_error(torch.cat(batches).numpy(), expected)


@lru_cache(maxsize=1)  # tests come network by network
def error_on_photographs(name: str, data_folder: Path) -> float:
    """`eager_error` on the photographs, with the weights and against the logits of the test data."""
    folder = data_folder / "imagenet"
    expected = np.load(folder / f"{name}_torch_logits.npy")
    state = read_state_dict(folder / f"{name}_state_dict.npz")
    return eager_error(name, state, all_photographs(data_folder), expected)


def assert_half(logits: np.ndarray, expected: np.ndarray, torchs_error: float) -> None:
    """Logits in fp16 name the same classes as `expected`, and are about as near as torch's."""
    same = int((logits.argmax(1) == expected.argmax(1)).sum())
    allowed = int(OTHER_ANSWERS * len(expected))
    assert same >= len(expected) - allowed, f"{same} of {len(expected)} agree"
    error = relative_error(logits, expected)
    assert error <= TIMES_TORCHS_ERROR * torchs_error, f"relative error {error:.2e}, torch's is {torchs_error:.2e}"
