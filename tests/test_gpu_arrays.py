"""What a repeated call needs to know of torch's and CuPy's arrays. torch's are on the CPU and say otherwise."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cupy_resnet import gpu_arrays
from cupy_resnet.gpu_arrays import library_of


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every torch tensor be on GPU 0."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)


def look_at(x: Any) -> Any:
    library = library_of(x)
    assert library is not None
    return library.look_at(x)


def test_what_is_seen_of_a_tensor(on_gpu: None) -> None:
    x = torch.zeros(2, 3, 5, 7)
    assert look_at(x[:, :, 1:])[1] == x.data_ptr() + 4 * 7
    for alike in (torch.ones(2, 3, 5, 7), x.clone().requires_grad_()):
        assert look_at(x)[0] == look_at(alike)[0]
        assert hash(look_at(x)[0]) == hash(look_at(alike)[0])


def test_tensors_that_are_read_in_other_ways_have_other_signatures(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(2, 4, 8, 8)
    wide = torch.zeros(2, 4, 8, 16)
    others = [
        x,
        x.half(),
        x.bfloat16(),
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[:1],
        wide[..., ::2],
        wide[..., :8],
        torch.zeros(x.numel() + 1)[1:].view(x.shape),  # not aligned to 16 bytes
    ]
    signatures = [look_at(other)[0] for other in others]
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 1)
    signatures.append(look_at(x)[0])
    assert len(set(signatures)) == len(signatures)


def test_tensors_whose_memory_does_not_tell_their_values(on_gpu: None) -> None:
    negated = torch.imag(torch.zeros(2, 3, 8, 8, dtype=torch.complex64).conj())
    assert negated.is_neg()
    assert look_at(negated) is None
    assert look_at(torch.zeros(2, 3, 8, 8).to_sparse()) is None


def test_what_is_on_the_cpu_is_like_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3, 8, 8)
    signature, _ = look_at(x)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    assert look_at(x)[0] != signature


def test_other_arrays_and_subclasses_are_not_seen() -> None:
    assert library_of(torch.nn.Parameter(torch.zeros(2, 3, 8, 8))) is None
    assert library_of(np.zeros((2, 3, 8, 8))) is None
    assert library_of("a path") is None


def test_torchs_memory_for_results() -> None:
    library: Any = library_of(torch.zeros(1))
    like = torch.zeros(2, 3, 8, 8, dtype=torch.float16, requires_grad=True)
    result, address = library.empty((2, 10), like)
    assert (result.dtype, result.shape, result.requires_grad) == (torch.float32, (2, 10), False)
    assert address == result.data_ptr() == library.address_of_out(result, (2, 10), like)


def test_memory_for_a_later_caller_is_of_use_outside_of_inference_mode() -> None:
    for like in (torch.zeros(1, dtype=torch.float16), torch.inference_mode()(torch.zeros)(1)):
        library: Any = library_of(like)
        with torch.inference_mode():
            spare, address = library.spare((2, 10), like)
        assert not spare.is_inference()
        assert (tuple(spare.shape), spare.dtype, address) == ((2, 10), torch.float32, spare.data_ptr())


def test_no_room_on_torchs_side_is_a_memory_error() -> None:
    def new_empty(shape: Any, dtype: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    library: Any = library_of(torch.zeros(1))
    with pytest.raises(MemoryError, match="out of memory"):
        library.empty((2, 10), SimpleNamespace(new_empty=new_empty))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 10, dtype=torch.float16),
        torch.zeros(3, 10),
        torch.zeros(20),
        torch.zeros(10, 2).T,
        torch.zeros(2, 10).to_sparse(),
        torch.zeros(2, 10, device="meta"),
        torch.zeros(2, 10, requires_grad=True),
        torch.imag(torch.zeros(2, 10, dtype=torch.complex64).conj()),
        torch.nn.Parameter(torch.zeros(2, 10)),
        np.zeros((2, 10), np.float32),
    ],
    ids=[
        "float16",
        "batch",
        "flat",
        "not contiguous",
        "sparse",
        "device",
        "needs gradient",
        "negated",
        "class",
        "NumPy",
    ],
)
def test_where_results_cannot_be_written_just_like_that(out: Any) -> None:
    like = torch.zeros(2, 3, 8, 8)
    library: Any = library_of(like)
    assert library.address_of_out(out, (2, 10), like) is None


@pytest.mark.parametrize("raw", [True, False])
def test_torchs_stream_is_asked_for_in_either_way(monkeypatch: pytest.MonkeyPatch, raw: bool) -> None:
    if raw:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x50 + device, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
        current = lambda device: SimpleNamespace(cuda_stream=0x50 + device)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "current_stream", current)
    assert gpu_arrays._Torch(torch).stream(3) == 0x53


class CupyArray:
    """A CuPy array on a GPU, by its place."""

    def __init__(self, array: np.ndarray, address: int = 0x1000, device: int = 0) -> None:
        self.shape, self.strides, self.dtype, self.flags = array.shape, array.strides, array.dtype, array.flags
        self.data = SimpleNamespace(ptr=address, device_id=device)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = SimpleNamespace(
        ndarray=CupyArray,
        empty=lambda shape, dtype: CupyArray(np.empty(shape, dtype), 0x7000),
        cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0x57)),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_what_is_seen_of_cupys_arrays(cupy: Any) -> None:
    x = np.zeros((2, 3, 5, 5), np.float32)
    signature, address = look_at(CupyArray(x, 0x2010))
    assert address == 0x2010
    assert look_at(CupyArray(x + 1, 0x3000))[0] == signature
    others = [
        CupyArray(x.astype(np.float16)),
        CupyArray(x[:1]),
        CupyArray(x[0]),
        CupyArray(x.transpose(0, 1, 3, 2)),
        CupyArray(x, device=1),
        CupyArray(x, 0x1004),
    ]
    assert len({signature, *(look_at(other)[0] for other in others)}) == len(others) + 1
    assert library_of(type("Subclass", (CupyArray,), {})(x)) is None


def test_cupys_stream_and_memory_for_results(cupy: Any) -> None:
    like = CupyArray(np.zeros((2, 3, 8, 8), np.float16))
    library: Any = library_of(like)
    assert library.stream(0) == 0x57
    result, address = library.empty((2, 10), like)
    assert (result.dtype, result.shape, address) == (np.float32, (2, 10), 0x7000)
    assert library.address_of_out(result, (2, 10), like) == 0x7000
    for array in (np.zeros((2, 10)), np.zeros((3, 10), np.float32), np.zeros((10, 2), np.float32).T):
        assert library.address_of_out(CupyArray(array), (2, 10), like) is None
    elsewhere = CupyArray(np.zeros((2, 10), np.float32), device=1)
    assert library.address_of_out(elsewhere, (2, 10), like) is None
    assert library.address_of_out(np.zeros((2, 10), np.float32), (2, 10), like) is None
