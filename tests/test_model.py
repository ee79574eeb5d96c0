"""`load` and `Model` on the NumPy engine: arrays of every kind, errors, explanations, threads."""

import importlib.util
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close, normal, torch_checkpoints, torch_model

import cupy_resnet
from cupy_resnet import environment
from cupy_resnet.arrays import exchanged
from cupy_resnet.conv2d import H100, variant_names
from cupy_resnet.engines import selection
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.errors import EngineUnavailableError, UnsupportedProblemError
from cupy_resnet.explanation import explain
from cupy_resnet.networks import describe, random_state_dict

STATE = random_state_dict(describe("resnet20"), seed=6)
X = normal((3, 3, 32, 32), 7)


@pytest.fixture(scope="module")
def model() -> cupy_resnet.Model:
    return cupy_resnet.load("resnet20", STATE, engine="numpy")


@pytest.fixture(scope="module")
def expected(model: cupy_resnet.Model) -> np.ndarray:
    return model(X)


def strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape[:3], 2 * x.shape[3]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def read_only(x: np.ndarray) -> np.ndarray:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(strided, id="strided"),
        pytest.param(lambda x: x[:, :, ::-1].copy()[:, :, ::-1], id="negative stride"),
        pytest.param(read_only, id="read-only"),
        pytest.param(lambda x: x.astype(">f4"), id="big-endian"),
        pytest.param(lambda x: x.astype(np.float64), id="float64"),
        pytest.param(np.asfortranarray, id="Fortran order"),
        pytest.param(lambda x: np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), id="NHWC memory"),
        pytest.param(lambda x: x.view(type("Subclass", (np.ndarray,), {})), id="subclass"),
    ],
)
def test_numpy_arrays_of_every_kind(model, expected, variant) -> None:
    x = variant(X)
    before = x.copy()
    y = model(x)
    assert type(y) is np.ndarray
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(x, before)


def test_float16_is_cast(model) -> None:
    half = X.astype(np.float16)
    np.testing.assert_array_equal(model(half), model(half.astype(np.float32)))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(lambda t: t, id="plain"),
        pytest.param(lambda t: t.to(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(lambda t: t.clone().requires_grad_(), id="requires grad"),
        pytest.param(lambda t: torch.nn.Parameter(t.clone()), id="parameter"),
        pytest.param(lambda t: t.double(), id="float64"),
        pytest.param(lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), id="strided"),
    ],
)
def test_torch_tensors_come_back_as_torch_tensors(model, expected, variant) -> None:
    y = model(variant(torch.from_numpy(X)))
    assert isinstance(y, torch.Tensor)
    assert y.dtype == torch.float32
    assert y.device.type == "cpu"
    assert not y.requires_grad
    np.testing.assert_array_equal(y.numpy(), expected)
    logits, features = model.logits_and_features(variant(torch.from_numpy(X)))
    assert isinstance(features, torch.Tensor)
    assert features.shape == (3, 64)
    np.testing.assert_array_equal(logits.numpy(), expected)


def test_a_negation_that_torch_has_put_off_is_seen(model, expected) -> None:
    x = torch.imag(torch.complex(torch.zeros(X.shape), torch.from_numpy(-X)).conj())
    assert x.is_neg()
    np.testing.assert_array_equal(model(x).numpy(), expected)


def test_a_call_that_can_be_repeated_is_not_looked_at_again(model, expected, monkeypatch) -> None:
    calls = []

    def replay(x, out):
        calls.append((x, out))
        return "repeated" if out != "odd" else None

    monkeypatch.setattr(model._runner, "replay", replay)
    assert model("x") == "repeated"
    assert model("x", out="out") == "repeated"
    with pytest.raises(TypeError, match="x must be a NumPy array"):
        model("x", out="odd")
    assert calls == [("x", None), ("x", "out"), ("x", "odd")]


def test_torch_bfloat16_is_cast(model) -> None:
    x = torch.from_numpy(X).bfloat16()
    np.testing.assert_array_equal(model(x).numpy(), model(x.float().numpy()))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_channels_last_memory_is_not_copied(kind) -> None:
    ops = NumpyEngine()
    nhwc = np.ascontiguousarray(X.transpose(0, 2, 3, 1))
    for x, copied in ((nhwc.transpose(0, 3, 1, 2), False), (X, True)):
        with exchanged(kind(x), ops) as exchange:
            activations = ops.pixels(exchange.array.transpose(0, 2, 3, 1))
        assert np.shares_memory(activations, x) is not copied
        assert activations.flags.c_contiguous
        np.testing.assert_array_equal(activations, nhwc)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_logits_go_where_the_caller_wants_them(model, expected, kind) -> None:
    out = kind(np.full((3, 10), np.nan, np.float32))
    assert model(kind(X), out=out) is out
    np.testing.assert_array_equal(np.asarray(out), expected)
    assert model(kind(X[:1]), out=out[:1]).shape == (1, 10)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5)
    empty = kind(np.zeros((0, 10), np.float32))
    assert model(kind(X[:0]), out=empty) is empty


@pytest.mark.parametrize(
    ("x", "out", "error", "message"),
    [
        (X, torch.zeros(3, 10), TypeError, "same kind of array as x, ndarray, got Tensor"),
        (torch.from_numpy(X), np.zeros((3, 10), np.float32), TypeError, "same kind of array as x, Tensor, got ndarray"),
        (X, [[0.0] * 10] * 3, TypeError, "got list"),
        (X, np.zeros((3, 10)), TypeError, "out must be float32, got float64"),
        (torch.from_numpy(X), torch.zeros(3, 10, dtype=torch.float16), TypeError, "float32, got torch.float16"),
        (X, np.zeros((3, 10), ">f4"), TypeError, "out must be float32, got >f4"),
        (X, np.zeros((2, 10), np.float32), ValueError, r"shape \(3, 10\), got \(2, 10\)"),
        (X, np.zeros((3, 10, 1), np.float32), ValueError, r"shape \(3, 10\), got \(3, 10, 1\)"),
        (X, np.zeros((10, 3), np.float32).T, ValueError, "C-contiguous"),
        (torch.from_numpy(X), torch.zeros(10, 3).T, ValueError, "C-contiguous"),
        (torch.from_numpy(X), torch.zeros(3, 10, device="meta"), ValueError, "on the device of x, cpu, got meta"),
        (X, read_only(np.zeros((3, 10), np.float32)), ValueError, "read-only"),
    ],
)
def test_a_wrong_place_for_logits_is_named_before_anything_runs(model, monkeypatch, x, out, error, message) -> None:
    monkeypatch.setattr(NumpyEngine, "conv2d", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(error, match=message):
        model(x, out=out)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (X.astype(np.uint8), TypeError, "x is uint8; the network takes float32 .*scale and normalise"),
        (X > 0, TypeError, "x is bool"),
        (X.astype(np.complex64), TypeError, "x is complex64"),
        (torch.zeros((1, 3, 8, 8), dtype=torch.int32), TypeError, "x is torch.int32"),
        (torch.zeros((1, 3, 8, 8), device="meta"), TypeError, "on the CPU or a CUDA device, got torch.strided on meta"),
        (torch.zeros((1, 3, 8, 8)).to_sparse(), TypeError, "dense torch tensor"),
        (X.tolist(), TypeError, r"NumPy array, CuPy array or torch tensor of shape \(N, C, H, W\), got list"),
        ("cat.jpg", TypeError, "got str"),
        (X[0], ValueError, r"pass x\[None\]"),
        (X[:, :1], ValueError, r"\(3, 1, 32, 32\), expected \(N, 3, H, W\)"),
        (torch.zeros((2, 32, 32, 3)), ValueError, r"looks like \(N, H, W, C\)"),
        (X[:, :, :0], ValueError, "smallest image is 1×1"),
    ],
)
def test_wrong_input_is_named(model, x, error: type[Exception], message: str) -> None:
    for call in (model, model.features, model.logits_and_features, model.checkpoints):
        with pytest.raises(error, match=message):
            call(x)


@pytest.mark.parametrize("shape", [(0, 3, 32, 32), (1, 3, 1, 1), (2, 3, 45, 31)])
def test_empty_batches_and_odd_sizes(model, shape: tuple[int, ...]) -> None:
    logits, features = model.logits_and_features(normal(shape))
    assert logits.shape == (shape[0], 10)
    assert features.shape == (shape[0], 64)
    assert np.isfinite(logits).all()


def test_batch_elements_do_not_mix(model, expected) -> None:
    x = X.copy()
    x[1, 2, 5, 5] = np.nan
    y = model(x)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], expected[[0, 2]])


def test_features_times_classifier_are_the_logits(model, expected) -> None:
    features = model.features(X)
    assert_close(features @ STATE["linear.weight"].T + STATE["linear.bias"], expected)


@pytest.mark.parametrize("fuse", [True, False])
def test_checkpoints_by_name(fuse: bool) -> None:
    model = cupy_resnet.load("resnet20", STATE, engine="numpy", fuse=fuse)
    found = model.checkpoints(X)
    wanted = torch_checkpoints("resnet20", torch_model("resnet20", STATE).double(), torch.from_numpy(X).double())
    assert list(found) == list(wanted) == list(model.checkpoint_names)
    assert list(found)[:2] == ["stem", "layer1.0"]
    assert list(found)[-2:] == ["gap", "logits"]
    for name, value in found.items():
        assert value.dtype == np.float32
        assert value.shape == wanted[name].shape
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(value / scale, wanted[name] / scale, rtol=0, atol=3e-6, err_msg=name)
    some = model.checkpoints(X, ["logits", "layer2.0"])
    assert list(some) == ["layer2.0", "logits"]
    np.testing.assert_array_equal(some["layer2.0"], found["layer2.0"])
    with pytest.raises(ValueError, match=r"unknown checkpoint of resnet20 'layer9.0'.*Valid: stem, layer1.0"):
        model.checkpoints(X, ["layer9.0"])


def test_threads_share_a_model(model, expected) -> None:
    results: list[np.ndarray | None] = [None] * 6

    def work(index: int) -> None:
        results[index] = model(X)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_close_frees_and_says_so() -> None:
    with cupy_resnet.load("resnet20", STATE, engine="numpy") as model:
        model.warmup()
        model.warmup(2, size=(16, 24))
        assert repr(model) == (
            "Model('resnet20', num_classes=10, in_channels=3, engine='numpy', kernel='auto', precision='fp32', "
            "fuse=True)"
        )
    assert repr(model).endswith("closed)")
    model.close()
    for call in (lambda: model(X), model.explain, lambda: model.checkpoints(X), model.warmup):
        with pytest.raises(RuntimeError, match="this resnet20 model is closed; load it again"):
            call()


def test_explain_on_the_numpy_engine() -> None:
    model = cupy_resnet.load("resnet50", random_state_dict(describe("resnet50")), engine="numpy")
    explanation = model.explain()
    convolutions = [step for step in explanation if step.record.op == "conv2d"]
    assert len(convolutions) == 53
    assert {step.kernel for step in convolutions} == {"im2col + BLAS", "BLAS"}
    assert not explanation.fallbacks
    assert explanation.flops == pytest.approx(2 * 4.089e9, rel=0.01)
    lines = str(explanation).splitlines()
    assert lines[0] == "resnet50, input (1, 3, 224, 224), NumPy engine"
    header, stem = lines[1], next(line for line in lines if line.startswith("conv1 "))
    for column, cell in {
        "layer": "conv1",
        "operation": "conv2d + bias + relu",
        "problem": "1×224×224×3 → 64, 7×7, stride 2×2, pad 3×3",
        "kernel": "im2col + BLAS",
    }.items():
        assert stem[header.index(column) :].startswith(cell)
    assert lines[-1] == f"{len(explanation)} operations, {explanation.flops / 1e9:.2f} GFLOP"
    with pytest.raises(ValueError, match="expected"):
        model.explain((1, 4, 10, 10))


@pytest.mark.parametrize("fuse", [True, False])
def test_explain_kernels_without_a_gpu(fuse: bool) -> None:
    model = cupy_resnet.load("resnet20", STATE, engine="numpy", fuse=fuse)
    explanation = model.explain((8, 3, 32, 32), engine="cuda")
    assert "fp16, as for an NVIDIA H100" in str(explanation).splitlines()[0]
    convolutions = [step for step in explanation if step.record.op == "conv2d"]
    assert len(convolutions) == 19
    assert {step.kernel for step in convolutions} <= set(variant_names())
    assert all(step.reason for step in convolutions)


def test_explain_is_in_the_precision_that_is_asked_for() -> None:
    network = describe("resnet18")
    expected = {
        "auto": {"conv2d_wgmma", "conv2d_wgmma_patch"},
        "fp32": {"conv2d_implicit_gemm", "conv2d_winograd"},
    }
    for precision, kernels in expected.items():
        steps = [step for step in explain(network, (256, 3, 224, 224), precision=precision) if "conv2" in step.layer]
        assert len(steps) == 8
        assert {step.kernel for step in steps} <= kernels, precision
    a100 = replace(H100, name="NVIDIA A100", compute_capability=(8, 0))
    assert "conv2d_wgmma" not in str(explain(network, (256, 3, 224, 224), device=a100))
    assert {
        step.record.problem.precision
        for step in explain(network, (1, 3, 64, 64), kernel="conv2d_direct")
        if step.record.problem
    } == {"fp32"}


def test_explain_lists_where_a_demanded_kernel_does_not_apply() -> None:
    network = describe("resnet20")
    explanation = explain(network, (8, 3, 32, 32), kernel="conv2d_winograd")
    assert [step.layer for step in explanation.fallbacks] == ["layer2.0.conv1", "layer3.0.conv1"]
    assert "fallback: conv2d_winograd needs stride 1" in str(explanation)
    assert str(explanation).endswith(", 2 fallbacks")
    with pytest.raises(UnsupportedProblemError, match="conv2d_winograd does not support"):
        explain(network, (8, 3, 32, 32), kernel="conv2d_winograd", strict=True)


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'resnet21'.*Valid: resnet18"):
        cupy_resnet.load("resnet21", STATE)
    with pytest.raises(ValueError, match=r"unknown engine 'cudaa'\. Did you mean 'cuda'\? Valid: auto, cuda, numpy"):
        cupy_resnet.load("resnet20", STATE, engine="cudaa")
    with pytest.raises(ValueError, match=r"unknown precision 'fp64'.*Valid: auto, fp32"):
        cupy_resnet.load("resnet20", STATE, precision="fp64")
    with pytest.raises(ValueError, match=r"resnet32 needs weights: torchvision has none for it; pass a state dict"):
        cupy_resnet.load("resnet32")


def test_unknown_kernels_are_listed() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'conv2d_winogard'\. Did you mean 'conv2d_winograd'"):
        cupy_resnet.load("resnet20", STATE, kernel="conv2d_winogard")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"kernel": "conv2d_direct"}, "kernel"), ({"strict": True}, "strict"), ({"device": 0}, "device")],
)
def test_arguments_of_the_other_engine_are_refused(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} applies to the CUDA engine, but this is the NumPy engine"):
        cupy_resnet.load("resnet20", STATE, engine="numpy", **arguments)


def test_auto_falls_back_to_numpy_and_names_the_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "cuda_obstacle", lambda: "no GPU here")
    assert cupy_resnet.load("resnet20", STATE).engine == "numpy"
    with pytest.raises(ValueError, match=r"kernel applies to the CUDA engine, but .*\(chosen because: no GPU here\)"):
        cupy_resnet.load("resnet20", STATE, kernel="conv2d_direct")
    with pytest.raises(EngineUnavailableError, match="no GPU here"):
        cupy_resnet.load("resnet20", STATE, engine="cuda")
    monkeypatch.setenv(environment.ENGINE.name, "cuda")
    with pytest.raises(EngineUnavailableError, match="no GPU here"):
        cupy_resnet.load("resnet20", STATE)
    monkeypatch.setenv(environment.ENGINE.name, "numpy")
    monkeypatch.setattr(selection, "cuda_obstacle", lambda: pytest.fail("no need to look for a GPU"))
    assert cupy_resnet.load("resnet20", STATE).engine == "numpy"


def test_missing_cupy_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else found(name))
    with pytest.raises(EngineUnavailableError, match=r"not installed: pip install 'cupy-resnet\[cuda12\]'"):
        cupy_resnet.load("resnet20", STATE, engine="cuda")


def test_missing_driver_is_one_clear_sentence() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineUnavailableError, match=r"install or update the driver, or use engine='numpy'|finds none"):
        cupy_resnet.load("resnet20", STATE, engine="cuda")


def test_loading_and_running_imports_neither_torch_nor_cupy(tmp_path: Path) -> None:
    """In a fresh process: NumPy weights in, NumPy array through, and the two libraries stay out."""
    np.savez(tmp_path / "w.npz", **STATE)
    program = (
        "import sys, numpy as np, cupy_resnet\n"
        f"model = cupy_resnet.load('resnet20', {str(tmp_path / 'w.npz')!r}, engine='numpy')\n"
        "assert model(np.zeros((1, 3, 32, 32), np.float32)).shape == (1, 10)\n"
        "assert not {'torch', 'cupy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)
