"""How many images make a batch: enough to keep an engine busy, no more than its memory holds."""

from .binding import bind_shapes
from .engines.shape_engine import ShapeArray, ShapeEngine
from .networks import Network

USUAL_IMAGES = {"cuda": 64, "numpy": 8}
"""Images of 224 × 224 in a batch; of smaller ones so many more that the pixels are as many.

A GPU is no faster per image with larger batches, and the first results would come later. NumPy works through an image
at a time anyway: its batches only spread the cost of calls.
"""

MOST_IMAGES = {"cuda": 1024, "numpy": 64}

_USUAL_PIXELS = 224 * 224


def default_batch_size(network: Network, size: int, engine: str, free: int | None, precision: str = "fp32") -> int:
    """Returns the images to run at once.

    That is `USUAL_IMAGES`, scaled to `size` and cut at `MOST_IMAGES`; but no more than fit into half of the free
    memory at `activation_bytes` each. The other half is for kernels' workspaces and for the other users of the GPU.

    Args:
        network: a description or a bound network.
        size: height and width of an image in pixels.
        engine: ``"cuda"`` or ``"numpy"``.
        free: bytes the engine can still allocate, None for no limit.
        precision: the engine's.
    """
    usual = USUAL_IMAGES[engine] * _USUAL_PIXELS // size**2
    images = max(1, min(usual, MOST_IMAGES[engine]))
    return images if free is None else max(1, min(images, free // 2 // activation_bytes(network, size, precision)))


def activation_bytes(network: Network, size: int, precision: str = "fp32") -> int:
    """Returns an upper bound of the bytes that one image's activations take at the same time.

    The most that any operation reads and writes beside weights (input, residual and output), plus twice the largest
    activation: a block keeps its input while it runs, and, where it changes the size, the shortcut's output too.

    Args:
        network: a description or a bound network.
        size: height and width of the image in pixels.
        precision: the engine's.
    """
    walks = []
    for batch in (1, 2):
        ops = ShapeEngine(precision)
        bound = bind_shapes(network, fuse=False)  # what is folded already stays so
        bound(ops, ShapeArray((batch, size, size, network.in_channels)))
        walks.append(ops.records)
    # Weights are the same for one and two images, so that the difference is an image's own.
    moved = max(two.nbytes - one.nbytes for one, two in zip(*walks, strict=True))
    largest = max(_elements(record.output_shape) for record in walks[0]) * ops.arithmetic.element_size
    return moved + 2 * largest


def _elements(shape: tuple[int, ...]) -> int:
    elements = 1
    for length in shape:
        elements *= length
    return elements
