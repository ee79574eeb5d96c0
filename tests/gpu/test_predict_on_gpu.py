"""`predict` on the CUDA engine: torch's answers on the photographs themselves, and batches that overlap."""

import csv
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from PIL import Image
from predict_support import STATE, pixels
from predict_support import small_model as small_numpy_model

import cupy_resnet
from cupy_resnet import networks, pipeline
from cupy_resnet.engines.transfers import CudaTransfers, make_transfers
from cupy_resnet.images import normalize, prepare
from cupy_resnet.prediction import NotFiniteError
from gpu.half import KERNELS, assert_half, eager_error, error_on_photographs

pytestmark = pytest.mark.gpu

Check = Callable[[np.ndarray], None]


def small_model(**options: Any) -> cupy_resnet.Model:
    """resnet20 on images of 16 × 16, on the CUDA engine."""
    return small_numpy_model(**{"engine": "cuda", **options})


def logits_of(predictions: Any) -> np.ndarray:
    return np.stack([prediction.logits for prediction in predictions])


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def model(request: pytest.FixtureRequest) -> cupy_resnet.Model:
    return small_model(precision=request.param)


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    return [pixels(seed) for seed in range(150)]


@pytest.fixture(scope="module")
def check(model: cupy_resnet.Model, images: list[np.ndarray]) -> Check:
    """Compares logits with the NumPy engine's; one image in another's place would be far off in fp16, too."""
    reference = small_numpy_model()
    expected = logits_of(reference.predict(images))
    if model.precision == "fp32":
        return lambda logits: assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    transforms = reference.transforms
    x = normalize(np.stack([prepare(Image.fromarray(image), transforms) for image in images]), transforms)
    torchs_error = eager_error("resnet20", STATE, np.ascontiguousarray(x.transpose(0, 3, 1, 2)), expected)
    return lambda logits: assert_half(logits, expected, torchs_error)


@pytest.mark.parametrize(("kernel", "precision"), KERNELS)
def test_torchs_top_1_on_200_photographs(kernel: str, precision: str, data_folder: Path) -> None:
    folder = data_folder / "imagenet"
    expected = np.load(folder / "resnet18_torch_logits.npy")
    with (folder / "labels.csv").open(newline="") as file:
        photos = [folder / "photos" / row["file"] for row in csv.DictReader(file)]
    weights = folder / "resnet18_state_dict.npz"
    with cupy_resnet.load(
        "resnet18", weights=weights, precision=precision, engine="cuda", kernel=kernel, categories="imagenet"
    ) as model:
        predictions = model.predict(photos, exif=False)  # as torchvision read them for the stored logits
    assert [p.path for p in predictions] == [str(photo) for photo in photos]
    logits = logits_of(predictions)
    assert [p.class_index for p in predictions] == logits.argmax(1).tolist()
    if precision == "fp16":
        assert_half(logits, expected, error_on_photographs("resnet18", data_folder))
    else:
        assert np.abs(logits - expected).max() < 1e-3
        assert (logits.argmax(1) == expected.argmax(1)).sum() == 200


@pytest.mark.parametrize("batch_size", [1, 7, 64, None])
def test_overlapping_batches_keep_their_answers(model, images, check, batch_size: int | None) -> None:
    """Many short batches, twice: a slot that is reused too early would show another batch's images."""
    for _ in range(2):
        predictions = model.predict(images, batch_size=batch_size, features=True)
        assert [p.index for p in predictions] == list(range(150))
        check(logits_of(predictions))
        assert all(p.features.shape == (64,) for p in predictions)
        assert all(sum(p.probabilities) <= 1 + 1e-5 for p in predictions)
        assert min(p.timings.inference for p in predictions) > 0


def test_pageable_memory_gives_the_same_bits(model, images, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = logits_of(model.predict(images, batch_size=16))
    monkeypatch.setattr(pipeline, "make_transfers", lambda ops: make_transfers(ops, pinned=False))
    np.testing.assert_array_equal(logits_of(model.predict(images, batch_size=16)), pinned)


def test_refused_pinned_memory_is_a_warning(model, images, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    import cupy

    def refused(nbytes: int) -> Any:
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    pinned = logits_of(model.predict(images, batch_size=16))
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refused)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(logits_of(model.predict(images, batch_size=16)), pinned)
    (record,) = caplog.records
    assert "of pinned memory cannot be had" in record.message


@pytest.mark.alone
def test_uploads_overlap_with_work_on_the_current_stream() -> None:
    """Pixels arrive in order although they travel on another stream, whichever stream is current."""
    import cupy

    from cupy_resnet.engines.cuda_engine import CudaEngine

    engine = CudaEngine()
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        transfers = CudaTransfers(engine)
        with stream:
            busy = cupy.ones(1 << 24, cupy.float32)
            downloads = []
            for number in range(40):
                arrays = [np.full((64, 64, 3), number + index, np.uint8) for index in range(8)]
                x = transfers.upload(arrays)
                for _ in range(10):  # keeps the stream behind the host
                    busy = cupy.sin(busy)
                downloads.append((arrays, transfers.download(x.astype(cupy.float32))))
                if len(downloads) == 2:
                    sent, download = downloads.pop(0)
                    (received,), seconds = download.wait()
                    np.testing.assert_array_equal(received, np.stack(sent))
                    assert seconds > 0
        transfers.release()


def test_a_side_stream_is_used_if_it_is_current(model, images, check) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        predictions = model.predict(images, batch_size=8)
        assert stream.done  # every answer is there, so nothing is left to do
    check(logits_of(predictions))


def test_threads_share_a_model(model, images, check) -> None:
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        results[index] = logits_of(model.predict(images, batch_size=5 + index, workers=2))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in results:
        check(logits)


def test_case_19_arrays_on_the_gpu(model) -> None:
    import cupy
    import torch

    image = pixels(4)
    (expected,) = model.predict(image)
    for value in (cupy.asarray(image), torch.from_numpy(image).cuda(), torch.from_numpy(image).cuda().permute(2, 0, 1)):
        np.testing.assert_array_equal(model.predict(value)[0].logits, expected.logits)


def test_case_25_values_that_are_not_finite_name_the_layer() -> None:
    state = networks.random_state_dict(networks.describe("resnet20"), seed=6)
    for key in ("layer2.0.bn1.weight", "layer2.0.bn2.weight"):
        state[key] = np.full_like(state[key], 1e25)
    with pytest.raises(NotFiniteError, match=r"image 0: .* in the output of layer2\.0\."):
        small_model(state=state, precision="fp32").predict([pixels(seed) for seed in range(40)], batch_size=4)


def test_case_30_a_batch_that_does_not_fit_is_halved(model, images, check, monkeypatch, caplog) -> None:
    import cupy

    ops = model.ops
    softmax, sizes = ops.softmax, []

    def short(logits: Any) -> Any:
        sizes.append(len(logits))
        if len(sizes) == 3:
            raise cupy.cuda.memory.OutOfMemoryError(1 << 30, 1 << 29, 1 << 30)
        return softmax(logits)

    monkeypatch.setattr(ops, "softmax", short)
    with caplog.at_level(logging.WARNING):
        predictions = model.predict(images, batch_size=32)
    assert sizes == [32, 32, 32, *[16] * 5, 6]
    assert [record.message for record in caplog.records] == [
        "not enough GPU memory for 32 images at once; going on with at most 16"
    ]
    assert [p.index for p in predictions] == list(range(150))
    check(logits_of(predictions))


@pytest.mark.alone
def test_case_30_a_limited_pool_is_lived_with(images, caplog) -> None:
    """A real shortage: a pool of its own, since other tests leave room in the default one, may hold little more."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    few = images[:24]
    with cupy.cuda.using_allocator(pool.malloc):
        state = networks.random_state_dict(networks.describe("resnet18"), seed=0)
        # This kernel keeps nothing beside the weights, which would hold parts of larger blocks; and a plan would take
        # its memory from a pool of its own.
        model = cupy_resnet.load("resnet18", state, engine="cuda", kernel="conv2d_implicit_gemm", plan=False)
        whole = logits_of(model.predict(few, batch_size=24))
        pool.free_all_blocks()
        pool.set_limit(size=pool.total_bytes() + (64 << 20))  # 24 images need 77 MB for one activation alone
        with caplog.at_level(logging.WARNING):
            assert_close(logits_of(model.predict(few, batch_size=24)), whole, rtol=1e-3, atol=1e-3)
        (record,) = caplog.records
        assert "not enough GPU memory for 24 images at once" in record.message
        pool.free_all_blocks()
        pool.set_limit(size=pool.total_bytes() + (1 << 20))
        with pytest.raises(MemoryError, match=r"single image of 224 × 224 pixels.*MiB \(\d+ bytes\) are free"):
            model.predict(few)
        model.close()


def test_an_early_end_leaves_nothing_running(model, images, check) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    list(model.predict(images, batch_size=8, stream=True))
    used = pool.used_bytes()
    for consumed in (1, 9, 30):
        results = model.predict(images, batch_size=8, stream=True)
        for _ in range(consumed):
            next(results)
        results.close()
        assert pool.used_bytes() == used
    check(logits_of(model.predict(images, batch_size=8)))


@pytest.mark.alone
def test_gpu_memory_does_not_grow_with_the_number_of_images(model) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    image = pixels(0)
    sizes = [
        pool.total_bytes()
        for prediction in model.predict((image for _ in range(3000)), stream=True, batch_size=16)
        if prediction.index >= 500 and prediction.index % 100 == 0
    ]
    assert len(set(sizes)) == 1


def test_the_cached_function_runs_on_the_gpu(images, data_folder: Path) -> None:
    weights = data_folder / "imagenet" / "resnet18_state_dict.npz"
    first = cupy_resnet.predict(images[:3], weights=weights, engine="cuda", categories="imagenet")
    second = cupy_resnet.predict(images[:3], weights=weights, engine="cuda", categories="imagenet")
    np.testing.assert_array_equal(logits_of(first), logits_of(second))
    assert all(p.wnid.startswith("n") for p in first)
