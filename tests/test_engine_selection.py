"""Which engine and which precision a request gets, without a GPU: the device is described by hand."""

from collections.abc import Callable

import pytest

from cupy_resnet.conv2d import H100, PRECISIONS, Device
from cupy_resnet.engines import selection
from cupy_resnet.engines.cuda.device import precision_obstacle
from cupy_resnet.engines.selection import make_engine


def gpu(major: int, minor: int) -> Device:
    return Device(name="a GPU", compute_capability=(major, minor), sm_count=80, shared_memory_per_block=98304)


@pytest.mark.parametrize(
    ("capability", "possible"),
    [
        ((6, 1), {"fp32"}),
        ((7, 0), {"fp32", "fp16"}),
        ((7, 5), {"fp32", "fp16"}),
        ((8, 0), set(PRECISIONS)),
        ((9, 0), set(PRECISIONS)),
        ((12, 0), set(PRECISIONS)),
    ],
)
def test_precisions_by_compute_capability(capability: tuple[int, int], possible: set[str]) -> None:
    obstacles = {precision: precision_obstacle(precision, gpu(*capability)) for precision in PRECISIONS}
    assert {precision for precision, obstacle in obstacles.items() if obstacle is None} == possible


def test_the_obstacle_says_what_is_possible() -> None:
    assert precision_obstacle("bf16", gpu(7, 5)) == (
        "precision bf16 needs a GPU of compute capability 8.0 or newer, and a GPU has 7.5; it can run in fp32 and fp16"
    )


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    """Has `selection` believe in one GPU, and return a CUDA engine's arguments in its place."""

    def believe(device: Device) -> None:
        monkeypatch.setattr(selection, "cuda_obstacle", lambda: None)
        monkeypatch.setattr(selection, "find_device", lambda _: 0)
        monkeypatch.setattr(selection, "describe_device", lambda _: device)
        monkeypatch.setattr(selection, "CudaEngine", lambda _, **arguments: arguments)

    return believe


@pytest.mark.parametrize(
    ("device", "kernel", "precision"),
    [
        (H100, "auto", "fp16"),
        (gpu(7, 0), "auto", "fp16"),
        (gpu(6, 1), "auto", "fp32"),
        (H100, "conv2d_winograd", "fp32"),
        (H100, "conv2d_direct", "fp32"),
        (H100, "conv2d_mma", "fp16"),
        (H100, "conv2d_wmma", "fp16"),
        (H100, "conv2d_wgmma", "fp16"),
        (H100, "conv2d_wgmma_patch", "fp16"),
        (H100, "conv2d_wgmma_3xtf32", "fp32-tc"),
    ],
)
def test_auto_is_fp16_where_tensor_cores_and_the_kernel_allow_it(
    described, device: Device, kernel: str, precision: str
) -> None:
    described(device)
    arguments = make_engine("cuda", kernel=kernel, precision="auto")
    assert arguments == {"precision": precision, "kernel": kernel, "strict": False, "spread_nan": True}


def test_a_named_precision_is_taken_as_it_is(described) -> None:
    described(H100)
    for precision in PRECISIONS:
        assert make_engine("cuda", precision=precision)["precision"] == precision


def test_the_numpy_engine_computes_in_fp32() -> None:
    for precision in ("auto", "fp32"):
        assert make_engine("numpy", precision=precision).precision == "fp32"
    with pytest.raises(ValueError, match="precision='fp16' applies to the CUDA engine, but this is the NumPy engine"):
        make_engine("numpy", precision="fp16")


def test_unknown_precisions_are_listed() -> None:
    with pytest.raises(
        ValueError, match=r"unknown precision 'fp_16'\. Did you mean 'fp16'\? Valid: auto, fp32, fp32-tc,"
    ):
        make_engine("numpy", precision="fp_16")
