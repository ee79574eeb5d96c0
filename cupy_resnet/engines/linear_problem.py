"""How a fully connected layer runs on a GPU: for few images by a kernel of its own, for many as a 1×1 convolution."""

from ..conv2d.problem import Conv2dProblem

MULTIPLIED_AS = {"fp32": "fp32", "fp32-tc": "fp32-tc", "tf32": "tf32", "fp16": "tf32", "bf16": "tf32"}
"""Precision of an engine → of the convolution. Features and logits are float32 whatever activations are; where those
are rounded to 10 bits of mantissa or fewer, the features may be too."""

FEWEST_IMAGES = {"fp32": 16}
FEWEST_IMAGES_ON_TENSOR_CORES = 9
"""Up to 8 images kernel linear reads every weight once, and memory bounds the layer: a matrix product gains nothing."""


def linear_problem(N: int, C: int, K: int, precision: str) -> Conv2dProblem | None:
    """Returns the convolution that computes ``x (N, C) · weight (K, C) transposed``, None for the kernel ``linear``.

    Args:
        N, C, K: images, features, classes.
        precision: the engine's.
    """
    if FEWEST_IMAGES.get(precision, FEWEST_IMAGES_ON_TENSOR_CORES) > N:
        return None
    return Conv2dProblem(N=N, H=1, W=1, C=C, K=K, R=1, S=1, precision=MULTIPLIED_AS[precision])
