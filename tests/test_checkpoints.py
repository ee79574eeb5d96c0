"""Reading, unwrapping, verifying and folding state dicts."""

import copy
import io
import logging
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers import normal, torch_model
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cupy_resnet import load
from cupy_resnet.binding import bind
from cupy_resnet.checkpoints import fold_batch_norm, infer_sizes, oihw_to_krsc, read_state_dict, strip_prefixes, verify
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.errors import CheckpointError
from cupy_resnet.networks import describe, random_state_dict

NETWORK = describe("resnet20")
STATE = random_state_dict(NETWORK, seed=5)
TABLE = NETWORK.tensor_table()


def tensors() -> dict[str, torch.Tensor]:
    """The state dict as torch saves it, with its counters."""
    state = {key: torch.from_numpy(array.copy()) for key, array in STATE.items()}
    counters = [key.replace("running_mean", "num_batches_tracked") for key in state if "running_mean" in key]
    return state | {key: torch.tensor(7) for key in counters}


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in tensors().items()}


def check(state: dict[str, np.ndarray]) -> None:
    verify(state, TABLE, "resnet20")
    for key, array in STATE.items():
        np.testing.assert_array_equal(state[key], array)


def save_npz(path: Path, content: dict) -> None:
    np.savez(path, **{key: value.numpy() for key, value in content.items()})


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("a.npz", save_npz),
        ("a.pth", lambda path, content: torch.save(content, path)),
        ("a.pt", lambda path, content: torch.save({"epoch": 3, "state_dict": content}, path)),
        ("old.pth", lambda path, content: torch.save(content, path, _use_new_zipfile_serialization=False)),
        ("a.safetensors", lambda path, content: safetensors.torch.save_file(content, path)),
    ],
)
def test_every_format(tmp_path: Path, name: str, save) -> None:
    save(tmp_path / name, tensors())
    check(read_state_dict(tmp_path / name))
    check(read_state_dict(str(tmp_path / name)))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(STATE, id="numpy"),
        pytest.param(tensors(), id="torch"),
        pytest.param(prefixed("module."), id="DataParallel"),
        pytest.param(prefixed("_orig_mod."), id="compile"),
        pytest.param(prefixed("module._orig_mod.module.model."), id="several"),
        pytest.param({"n_averaged": torch.tensor(3), **prefixed("module.")}, id="AveragedModel"),
        pytest.param({"state_dict": prefixed("model."), "epoch": 9, "optimizer": {"lr": 1}}, id="Lightning"),
        pytest.param({"model": {"state_dict": {"model": tensors()}}}, id="nested"),
        pytest.param({"state_dict_ema": tensors(), "args": {"a": torch.ones(1)}}, id="timm-EMA"),
        pytest.param({"ema": {"module": prefixed("_orig_mod.")}}, id="EMA-module"),
        pytest.param({"best": tensors(), "accuracy": 0.9}, id="unknown-container"),
        pytest.param({"model": tensors(), "step": torch.tensor(5)}, id="tensor-beside-container"),
    ],
)
def test_wrappers_and_containers_are_undone(content: dict) -> None:
    check(read_state_dict(content))


def test_plain_weights_come_before_averaged_ones_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    average = {key: value + 1 for key, value in tensors().items()}
    with caplog.at_level(logging.WARNING):
        check(read_state_dict({"model_ema": average, "model": tensors()}))
    assert "'model' are used; it also holds averaged ones under 'model_ema'" in caplog.text


def test_strip_prefixes_leaves_layers_alone() -> None:
    assert strip_prefixes("module.model._orig_mod.layer1.0.conv1.weight") == "layer1.0.conv1.weight"
    assert strip_prefixes("layer1.module.weight") == "layer1.module.weight"


def test_two_keys_that_become_one_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'conv1.weight' and 'module.conv1.weight' are both 'conv1.weight'"):
        read_state_dict({**tensors(), "module.conv1.weight": torch.zeros(16, 3, 3, 3)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", None])
def test_other_precisions(tmp_path: Path, dtype: torch.dtype, suffix: str | None) -> None:
    """Loading a rounded checkpoint equals loading what it was rounded to, in float32."""
    content = {key: value.to(dtype) for key, value in tensors().items() if value.is_floating_point()}
    rounded = {key: value.float().numpy() for key, value in content.items()}
    source: object = content
    if suffix:
        source = tmp_path / f"weights{suffix}"
        torch.save(content, source) if suffix == ".pth" else safetensors.torch.save_file(content, source)
    x = normal((2, 3, 32, 32))
    y = load("resnet20", source, engine="numpy")(x)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, load("resnet20", rounded, engine="numpy")(x))


def test_missing_left_over_and_misshapen_are_all_listed() -> None:
    state = {key: value for key, value in STATE.items() if key not in ("bn1.bias", "layer3.2.conv2.weight")}
    state |= {"extra.weight": np.zeros(3, np.float32), "layer2.0.bn1.weight": np.zeros(31, np.float32)}
    with pytest.raises(CheckpointError) as caught:
        verify(state, TABLE, "resnet20")
    assert str(caught.value).splitlines() == [
        "the state dict does not fit resnet20:",
        "  missing: bn1.bias, layer3.2.conv2.weight",
        "  left over: extra.weight",
        "  of another shape: layer2.0.bn1.weight (31,) instead of (32,)",
    ]


def test_long_lists_are_cut_and_counted() -> None:
    with pytest.raises(CheckpointError, match=f"missing: conv1.weight, bn1.weight, .* and {len(TABLE) - 8} more"):
        verify({}, TABLE, "resnet20")


def test_values_that_cannot_be_weights_are_named() -> None:
    state = copy.deepcopy(STATE)
    state["layer1.0.conv1.weight"][0, 0, 0, :2] = np.nan, np.inf
    state["bn1.running_var"][3] = -0.5
    state["linear.bias"] = np.zeros(10, np.int64)
    with pytest.raises(CheckpointError) as caught:
        load("resnet20", state, engine="numpy")
    assert "not finite: layer1.0.conv1.weight (2 of 2304 values)" in str(caught.value)
    assert "negative variances: bn1.running_var (lowest -0.5)" in str(caught.value)
    assert "not floating point: linear.bias (int64)" in str(caught.value)


def test_folding_beyond_float32_names_the_layer() -> None:
    state = copy.deepcopy(STATE)
    state["layer2.1.bn2.weight"][0], state["layer2.1.bn2.running_var"][0] = 1e37, 0
    with pytest.raises(CheckpointError, match=r"layer2.1.conv2: folding layer2.1.bn2 into it gives values beyond"):
        load("resnet20", state, engine="numpy")


def test_entries_that_are_no_tensors_are_named() -> None:
    with pytest.raises(CheckpointError, match="epoch is a int, not a tensor"):
        read_state_dict({**tensors(), "epoch": 3})
    with pytest.raises(CheckpointError, match=r"holds no tensors; its keys are: epoch \(int\)"):
        read_state_dict({"epoch": 3})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        read_state_dict({})
    with pytest.raises(TypeError, match=r"got CifarResNet; pass its state_dict\(\)"):
        read_state_dict(torch_model("resnet20"))  # type: ignore[arg-type]


def test_sizes_are_inferred_and_other_models_recognised() -> None:
    network = describe("resnet20", num_classes=7, in_channels=1)
    state = random_state_dict(network)
    assert infer_sizes(state) == (7, 1)
    assert infer_sizes({}) == (None, None)
    model = load("resnet20", state, engine="numpy")
    assert (model.num_classes, model.in_channels) == (7, 1)
    with pytest.raises(CheckpointError, match=r"linear.weight \(7, 64\) instead of \(10, 64\)"):
        load("resnet20", state, engine="numpy", num_classes=10)
    with pytest.raises(CheckpointError, match=r"Its tensors are those of resnet20\."):
        load("resnet32", state, engine="numpy")


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("pwned"),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickles_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": tensors(), "x": Evil()}, "evil.pth")
    Path("raw.pth").write_bytes(pickle.dumps(Evil()))
    np.savez("evil.npz", x=np.array([Evil()], dtype=object))
    torch.save(torch_model("resnet20"), "module.pth")
    for name in ("evil.pth", "raw.pth", "evil.npz", "module.pth"):
        with pytest.raises(CheckpointError, match=name):
            read_state_dict(name)
    with pytest.raises(CheckpointError, match=r"Python object \(helpers\.CifarResNet\).* save model\.state_dict\(\)"):
        read_state_dict("module.pth")
    assert not Path("pwned").exists()


def damaged_files() -> dict[str, tuple[bytes, str]]:
    content = {"w": np.arange(64, dtype=np.float32)}
    buffer = io.BytesIO()
    np.savez(buffer, **content)
    npz, tensor_file = buffer.getvalue(), safetensors.numpy.save(content)
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(64.0)}, buffer)
    pth = buffer.getvalue()
    array = io.BytesIO()
    np.save(array, content["w"])
    return {
        "empty.npz": (b"", "is empty"),
        "empty.safetensors": (b"", "is empty"),
        "cut.npz": (npz[:200], "truncated archive"),
        "cut.pth": (pth[:300], "truncated archive"),
        "cut.safetensors": (tensor_file[:-8], "damaged or truncated"),
        "header.safetensors": (tensor_file[:20], "truncated safetensors"),
        "short.safetensors": (b"\x01", "cannot be read as a safetensors file"),
        "huge.safetensors": (struct.pack("<Q", 2**62) + b"{}", "cannot be read as a safetensors file"),
        "lfs.pth": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        "other.npz": (b"garbage", r"cannot be read as an npz file of plain arrays: it is no complete zip archive$"),
        "page.npz": (b"<!DOCTYPE html><html></html>", "web page"),
        "torch.npz": (pth, "looks like a torch file"),
        "npz.safetensors": (npz, "looks like an npz file"),
        "tensors.pth": (tensor_file, "looks like a safetensors file"),
        "single.npz": (array.getvalue(), "one array, not an archive"),
        "noise.pt": (bytes(range(256)), "cannot be read as a torch file"),
        "weights.bin": (npz, "has the suffix '.bin'; checkpoints end in .safetensors, .npz, .pth, .pt"),
    }


@pytest.mark.parametrize("name", damaged_files())
def test_damaged_and_foreign_files_are_explained(tmp_path: Path, name: str) -> None:
    content, message = damaged_files()[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_state_dict(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_flipped_bytes_never_pass_for_weights(tmp_path: Path) -> None:
    save_npz(tmp_path / "a.npz", tensors())
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state_dict(tmp_path / "a.npz")


def test_places_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint file"):
        read_state_dict(tmp_path / "none.npz")
    with pytest.raises(CheckpointError, match="is not a file"):
        read_state_dict(tmp_path)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match="holds a list, not a state dict"):
        read_state_dict(tmp_path / "list.pth")


def test_torch_files_without_torch_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(tensors(), tmp_path / "a.pth")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy-resnet\[torch\]'"):
        read_state_dict(tmp_path / "a.pth")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_fold_batch_norm_equals_torchs(bias: bool, groups: int) -> None:
    conv = torch.nn.Conv2d(8, 12, 3, groups=groups, bias=bias).double().eval()
    bn = torch.nn.BatchNorm2d(12, eps=1e-3).double().eval()
    for tensor in (bn.weight, bn.bias, bn.running_mean):
        torch.nn.init.normal_(tensor)
    torch.nn.init.uniform_(bn.running_var, 1e-4, 3)
    fused = fuse_conv_bn_eval(conv, bn)
    arrays = [t.detach().numpy() for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var)]
    conv_bias = conv.bias.detach().numpy() if bias else None
    weight, folded_bias = fold_batch_norm(conv.weight.detach().numpy(), conv_bias, *arrays, bn.eps)
    np.testing.assert_allclose(weight, fused.weight.detach().numpy(), rtol=1e-14)
    np.testing.assert_allclose(folded_bias, fused.bias.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_fold_batch_norm_computes_in_float64() -> None:
    rng = np.random.default_rng(0)
    single = [rng.uniform(0.5, 2, 16).astype(np.float32) for _ in range(4)]
    weight = rng.standard_normal((16, 4, 3, 3), dtype=np.float32)
    double = fold_batch_norm(weight.astype(np.float64), None, *(a.astype(np.float64) for a in single))
    folded = fold_batch_norm(weight, None, *single)
    for mine, exact in zip(folded, double, strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_array_equal(mine, exact)
    with pytest.raises(ValueError, match=r"mean has shape \(3,\), expected \(16,\)"):
        fold_batch_norm(weight, None, single[0], single[1], single[2][:3], single[3])


def test_oihw_to_krsc() -> None:
    weight = normal((4, 3, 2, 5))
    krsc = oihw_to_krsc(weight)
    assert krsc.flags.c_contiguous
    assert krsc.shape == (4, 2, 5, 3)
    assert krsc[1, 0, 4, 2] == weight[1, 2, 0, 4]


@pytest.mark.parametrize("fuse", [True, False])
def test_eps_per_layer(fuse: bool) -> None:
    model = torch_model("resnet20", STATE).double()
    model.bn1.eps, model.layer2[1].bn2.eps = 1e-2, 0.3
    x = normal((2, 3, 32, 32)).astype(np.float64)
    with torch.inference_mode():
        expected = model(torch.from_numpy(x)).numpy()
    ops = NumpyEngine("float64")
    network = bind(NETWORK, STATE, ops, fuse=fuse, batch_norm_eps={"bn1": 1e-2, "layer2.1.bn2": 0.3})
    np.testing.assert_allclose(network(ops, ops.nchw_to_nhwc(x))[0], expected, rtol=1e-10, atol=1e-10)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = 1e-3
    with torch.inference_mode():
        expected = model(torch.from_numpy(x)).numpy()
    network = bind(NETWORK, STATE, ops, fuse=fuse, batch_norm_eps=1e-3)
    np.testing.assert_allclose(network(ops, ops.nchw_to_nhwc(x))[0], expected, rtol=1e-10, atol=1e-10)


def test_eps_for_unknown_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no BatchNorm named layer9\.bn1; its names are like bn1, layer1\.0\.bn1"):
        load("resnet20", STATE, engine="numpy", batch_norm_eps={"layer9.bn1": 1e-3})
    with pytest.raises(ValueError, match="must be finite and not negative"):
        load("resnet20", STATE, engine="numpy", batch_norm_eps=-1.0)
