"""Which stems run as one kernel, frozen, and the size of what comes out: no GPU is needed for either."""

from dataclasses import replace

import pytest
import torch

from cupy_resnet.conv2d import H100, PRECISIONS, Device, stem

T4 = replace(H100, name="T4", compute_capability=(7, 5), shared_memory_per_block=64 << 10)
A100 = replace(H100, name="A100", compute_capability=(8, 0), shared_memory_per_block=163 << 10)
A10 = replace(H100, name="A10", compute_capability=(8, 6), shared_memory_per_block=99 << 10)

TENSOR_CORES = [name for name, precision in PRECISIONS.items() if precision.tensor_cores]
STEM_INPUT, STEM_FILTER = (2, 224, 224, 3), (64, 7, 7, 3)


@pytest.mark.parametrize(
    ("precision", "x_shape", "filter_shape", "gpu", "reason"),
    [
        ("fp32", STEM_INPUT, STEM_FILTER, H100, "computes on tensor cores, not in fp32"),
        ("fp16", STEM_INPUT, STEM_FILTER, T4, "needs compute capability 8.0, T4 has 7.5"),
        ("fp16", STEM_INPUT, (64, 3, 3, 3), H100, "convolves with 7×7 filters, not 3×3"),
        ("fp16", STEM_INPUT, (64, 7, 5, 3), H100, "convolves with 7×7 filters, not 7×5"),
        ("fp16", (2, 224, 224, 5), (64, 7, 7, 5), H100, "takes 1 to 4 channels, not 5"),
        ("fp16", STEM_INPUT, (63, 7, 7, 3), H100, "needs a multiple of 64 filters, not 63"),
        ("fp16", (2**20, 224, 224, 3), STEM_FILTER, H100, ""),
        ("fp16", (2**26, 224, 224, 3), STEM_FILTER, H100, "has too many tiles for a grid"),
    ],
)
def test_which_stems_are_computed_by_one_kernel(
    precision: str, x_shape: tuple[int, ...], filter_shape: tuple[int, ...], gpu: Device, reason: str
) -> None:
    assert stem.supports_stem(PRECISIONS[precision], x_shape, filter_shape, gpu) == (not reason, reason)


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_frozen_support_of_the_stem(precision: str) -> None:
    """On every GPU with tensor cores for it: an ImageNet network must not lose its stem for want of shared memory."""
    for gpu in (A100, A10, H100):
        for C in (1, 2, 3, 4):
            for size in (1, 2, 33, 224):
                x_shape = (1, size, size, C)
                assert stem.supports_stem(PRECISIONS[precision], x_shape, (128, 7, 7, C), gpu) == (True, "")


@pytest.mark.parametrize("size", [*range(1, 20), 223, 224, 225])
def test_the_stems_output_has_torchs_size(size: int) -> None:
    x = torch.empty((1, 1, size, size + 3), device="meta")
    y = torch.nn.functional.max_pool2d(torch.nn.functional.conv2d(x, x.new_empty((64, 1, 7, 7)), None, 2, 3), 3, 2, 1)
    assert stem.pooled_shape((1, size, size + 3, 1), 64) == tuple(y.permute(0, 2, 3, 1).shape)
