"""Which stems run as one kernel, frozen, the size of what comes out, and how it is launched, without a GPU."""

from dataclasses import replace

import pytest
import torch

from cupy_resnet.conv2d import H100, PRECISIONS, Device, stem
from cupy_resnet.jit import Arch
from cupy_resnet.jit.compiler import compile_source
from cupy_resnet.jit.sources import find_kernel, load_program

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
        ("fp16", (2**26, 224, 224, 3), STEM_FILTER, H100, "has more tiles than an int counts"),
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


@pytest.mark.parametrize(
    ("precision", "y_shape", "grid"),
    [
        ("fp16", (1, 56, 56, 64), (56, 1)),  # a block per tile
        ("fp16", (256, 56, 56, 64), (264, 1)),  # two per multiprocessor
        ("tf32", (256, 56, 56, 64), (264, 1)),
        ("fp32-tc", (256, 56, 56, 64), (132, 1)),
        ("fp16", (256, 56, 56, 192), (88, 3)),  # of all groups of filters together
        ("fp16", (1, 1, 1, 64), (1, 1)),
        ("fp16", (1, 8, 9, 64), (4, 1)),
        ("fp16", (2, 56, 56, 64 * 1000), (1, 1000)),
    ],
)
def test_no_more_blocks_than_are_resident(precision: str, y_shape: tuple[int, ...], grid: tuple[int, int]) -> None:
    assert stem.launch_grid(y_shape, PRECISIONS[precision], H100.sm_count) == grid


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_the_launch_agrees_with_the_kernels_constants(precision: str, channels: int) -> None:
    """By NVRTC, which is given the kernel's declarations with an assertion in place of the kernel."""
    pytest.importorskip("cupy")
    chosen = PRECISIONS[precision]
    expected = {
        "SHARED_BYTES": stem._shared_memory(chosen, channels),
        "MIN_BLOCKS": stem.BLOCKS_PER_MULTIPROCESSOR[chosen.products],
        "THREADS": stem.THREADS,
        "TILE_FILTERS": stem.TILE_FILTERS,
        "POOLED_ROWS": stem.POOLED_ROWS,
        "POOLED_COLUMNS": stem.POOLED_COLUMNS,
    }
    program = load_program(find_kernel(stem.SOURCE))
    declarations, kernel, _ = program.text.partition('extern "C" __global__')
    assert kernel
    assertions = [f'static_assert({name} == {value}, "{name}");' for name, value in expected.items()]
    text = "\n".join([declarations, *assertions, 'extern "C" __global__ void nothing() {}'])
    options = [f"-D{name}={value}" for name, value in stem._defines(chosen, "float", channels).items()]
    compile_source(replace(program, text=text), options, Arch(80))


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_as_many_blocks_are_resident_on_an_h100_as_are_launched(precision: str) -> None:
    chosen = PRECISIONS[precision]
    for channels in (1, 2, 3, 4):
        with_reserved = stem._shared_memory(chosen, channels) + (1 << 10)
        assert with_reserved * stem.BLOCKS_PER_MULTIPROCESSOR[chosen.products] <= 228 << 10
