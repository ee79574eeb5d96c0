"""A comparison on the NumPy engine: the same network in torch, right results, wrong results, rivals that fail."""

import numpy as np
import pytest
import torch
from helpers import normal
from helpers import torch_model as other_torch_model

import cupy_resnet
from cupy_resnet import conv2d
from cupy_resnet.loading import PRECISIONS
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.bench import comparison, contenders, timing
from cupy_resnet.proof.bench.comparison import (
    CHECKED_IMAGES,
    Plan,
    checked_images,
    relative_error,
    rows,
    verdict,
)
from cupy_resnet.proof.bench.contenders import RIVALS, Buffers, check_rivals, rival_recipes, torch_settings
from cupy_resnet.proof.bench.network import make_weights, torch_network
from cupy_resnet.proof.bench.precisions import RULES, check_precision
from cupy_resnet.proof.bench.timing import Effort
from cupy_resnet.proof.ceilings import Ceilings

QUICK = Effort(samples=5, warmup=1, seconds=0.2)
LIMITS = Ceilings(
    device="Abacus",
    driver="beads",
    copy_bytes_per_s=1e9,
    matmul_flops_per_s={"float32": 1e10},
    method={"copy": "by hand", "float32": "by hand"},
    date="2026-01-02",
)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """These tests look at what is measured, not at how long it takes."""
    monkeypatch.setattr(timing, "STREAM_RUN_S", 0.001)


def plan(**fields):
    known = {"models": ["resnet20-cifar10"], "batches": [2], "engine": "numpy", "effort": QUICK, "rivals": []}
    return Plan(**known | fields)


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "resnext50_32x4d"])
def test_torchs_network_is_the_tests_own(name):
    network = describe(name)
    state = random_state_dict(network)
    x = torch.from_numpy(normal((2, 3, 48, 40)))
    with torch.inference_mode():
        torch.testing.assert_close(torch_network(network, state)(x), other_torch_model(name, state)(x))


def test_embedded_weights_are_taken_where_the_name_asks_for_them():
    network, state = make_weights("resnet20-cifar10")
    assert network.name == "resnet20"
    x = normal((2, 3, 32, 32))
    expected = cupy_resnet.load("resnet20-cifar10", engine="numpy")(x)
    with torch.inference_mode():
        found = torch_network(network, state)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    random = make_weights("resnet20")[1]
    assert random.keys() == describe("resnet20").tensor_table().keys()
    assert not np.array_equal(random["conv1.weight"], state["conv1.weight"])


def test_weights_that_do_not_fit_torchs_network_are_an_error():
    state = random_state_dict(describe("resnet20"))
    del state["bn1.weight"]
    with pytest.raises(ValueError, match=r"bn1\.weight"):
        torch_network(describe("resnet20"), state)
    with pytest.raises(ValueError, match="not 4"):
        torch_network(describe("resnet20", in_channels=4), {})


def test_a_row_of_the_numpy_engine_against_torch_on_the_processor():
    said = []
    (row,) = rows(plan(rivals=["torch-cpu"], batches=[9], ceilings=LIMITS), said.append)
    assert [entry.name for entry in row.entries] == ["ours", *RIVALS["torch-cpu"]]
    assert [entry.ours for entry in row.entries] == [True, False, False, False]
    for entry in row.entries:
        assert entry.wrong is None
        assert entry.error < 1e-5
        assert entry.latency.count == 5
        assert len(entry.stream_ms) == 5
        assert min(entry.latency_ms + entry.stream_ms) > 0
        assert entry.first_call_s > 0
    assert (row.N, row.size, row.engine, row.kind) == (9, 32, "numpy", "stream")
    assert row.fastest_rival("stream") in row.rivals
    assert row.failed == {}
    assert any("resnet20-cifar10, N = 9, fp32: preparing torch-cpu-folded" in doing for doing in said)
    # 41 million multiply-adds an image (He et al., table 6 counts 0.27 million parameters; the authors' own FLOPs)
    assert row.flops / 9 / 2 == pytest.approx(40.8e6, rel=0.01)
    assert row.bound_ms > row.flops / 1e10 * 1e3  # 10 GFLOP/s, and some operations are bound by memory


def test_buffers_differ_and_are_the_same_in_both_layouts():
    buffers = Buffers.make((2, 3, 8, 8), RULES["fp16"], "cpu", seed=1)
    assert len(buffers.nchw) == 3
    for nchw, nhwc in zip(buffers.nchw, buffers.nhwc, strict=True):
        assert nchw.dtype == nhwc.dtype == torch.float16
        assert torch.equal(nchw, nhwc)
        assert nchw.is_contiguous()
        assert nhwc.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(buffers.nchw[0], buffers.nchw[1])
    assert torch.equal(buffers.nchw[2], Buffers.make((2, 3, 8, 8), RULES["fp16"], "cpu", seed=1).nchw[2])
    assert abs(float(torch.cat(buffers.nchw).float().std()) - 1) < 0.1


def test_our_input_is_the_rivals_memory_and_ours_is_loaded_through_the_public_function(monkeypatch):
    seen = []
    load = cupy_resnet.loading.load

    def spy(model, weights, **options):
        loaded = load(model, weights, **options)

        def call(x):
            seen.append((type(x), x.dtype, x.transpose(0, 2, 3, 1).flags.c_contiguous, x.ctypes.data))
            return loaded(x)

        seen.append((model, str(weights).endswith(".npz"), options))
        return call

    monkeypatch.setattr(cupy_resnet.loading, "load", spy)
    list(rows(plan()))
    model, from_file, options = seen.pop(0)
    assert (model, from_file) == ("resnet20", True)
    assert options == {"engine": "numpy", "precision": "fp32", "kernel": "auto"}
    assert {call[:3] for call in seen} == {(np.ndarray, np.dtype(np.float32), True)}
    assert len({call[3] for call in seen}) == 3


BROKEN = {
    "slightly off": (lambda y, call: y * np.float32(1.0001), "relative error against float64 is"),
    "not finite": (lambda y, call: np.where(y == y.max(), np.nan, y), "not finite"),
    "another batch's": (lambda y, call: y[::-1], "relative error"),
    "other shape": (lambda y, call: y[:, :5], "have the shape (2, 5)"),
    "never the same": (
        lambda y, call: np.nextafter(y, np.float32(9e9)) if call > 4 else y,
        "differ from one call",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_wrong_results_get_no_ratio(kind, monkeypatch):
    breaks, reason = BROKEN[kind]
    load = cupy_resnet.loading.load
    calls = []

    def broken(*arguments, **options):
        model = load(*arguments, **options)
        return lambda x: calls.append(1) or breaks(model(x), len(calls))

    monkeypatch.setattr(cupy_resnet.loading, "load", broken)
    (row,) = rows(plan(rivals=["torch-cpu"]))
    (ours,) = row.ours
    assert reason in ours.wrong
    for each in ("latency", "stream"):
        assert row.ratio(ours, each).value is None
        assert reason in row.ratio(ours, each).reason
    assert all(rival.wrong is None for rival in row.rivals)


def test_a_rival_that_is_wrong_is_nobodys_rival(monkeypatch):
    real = contenders.eager_or_folded

    def eager_or_folded(net, rules, device, layout, *, folded):
        module = real(net, rules, device, layout, folded=folded)
        return (lambda x: module(x) * 1.01) if folded else module

    monkeypatch.setattr(contenders, "eager_or_folded", eager_or_folded)
    (row,) = rows(plan(rivals=["torch-cpu"]))
    wrong = {entry.name: entry.wrong for entry in row.rivals}
    assert "relative error" in wrong["torch-cpu-folded"]
    assert wrong["torch-cpu-nchw"] is wrong["torch-cpu-nhwc"] is None
    assert row.fastest_rival("latency").name != "torch-cpu-folded"


def test_a_rival_that_cannot_run_is_left_out_with_the_reason(monkeypatch, caplog):
    def no_compiler(net, mode, inputs):
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(contenders, "_compiled", no_compiler)
    (row,) = rows(plan(rivals=["compile", "torch-cpu"]))
    assert row.failed == {"compile": "no C++ compiler"}
    assert len(row.rivals) == 3
    assert "compile is left out: no C++ compiler" in caplog.text


def test_an_error_of_ours_is_raised(monkeypatch):
    def broken(*arguments, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(cupy_resnet.loading, "load", broken)
    with pytest.raises(MemoryError, match="no room"):
        list(rows(plan()))


def test_the_images_checked_are_spread_from_first_to_last():
    assert checked_images(1) == [0]
    assert checked_images(3) == [0, 1, 2]
    many = checked_images(256)
    assert len(many) == CHECKED_IMAGES
    assert (many[0], many[-1]) == (0, 255)
    assert max(np.diff(many)) - min(np.diff(many)) <= 1


def test_the_verdict_looks_at_every_buffer_and_at_the_first_and_last_image():
    expected = [np.ones((8, 4)), np.ones((8, 4))]
    good = [np.ones((20, 4)), np.ones((20, 4))]
    assert verdict(good, good[0], expected, 1e-6) == (0.0, None)
    for buffer in (0, 1):
        for image in (0, 19):
            bad = [y.copy() for y in good]
            bad[buffer][image, 2] = 1.5
            error, wrong = verdict(bad, bad[0], expected, 1e-2)
            assert error == pytest.approx(0.5 / 8)
            assert "0.062" in wrong
    assert verdict(good, good[0] + 1e-12, expected, 1e-6)[1] is not None


def test_the_relative_error_is_that_of_all_arrays_together():
    assert relative_error([np.array([[3.0]]), np.array([[4.0]])], [np.array([[3.0]]), np.array([[9.0]])]) == (
        pytest.approx(5 / np.hypot(3, 9))
    )


def test_every_precision_that_load_knows_has_rules():
    assert set(PRECISIONS) - {"auto"} <= set(RULES)
    assert RULES["tf32"].tf32
    assert not RULES["fp32"].tf32
    assert RULES["fp32-tc"].error_factor < RULES["fp32"].error_factor
    for name, rules in RULES.items():
        assert getattr(torch, rules.dtype).itemsize == conv2d.PRECISIONS[name].element_size, name
    with pytest.raises(ValueError, match="fp32"):
        check_precision("auto")


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_torchs_switches_are_set_inside_and_restored_after(name):
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)

    def fail_inside():
        with torch_settings(RULES[name]):
            assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == (True, name == "tf32", name == "tf32")
            assert torch.is_inference_mode_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == before
    assert not torch.is_inference_mode_enabled()


def test_rivals_are_told_by_name():
    assert check_rivals(["compile", "torch-cpu", "compile"], "cpu") == ("compile", "torch-cpu")
    assert check_rivals(["graph"], "cuda") == ("graph",)
    with pytest.raises(ValueError, match=r"unknown rival 'egaer'.*'eager'"):
        check_rivals(["egaer"], "cpu")
    with pytest.raises(ValueError, match="needs the CUDA engine"):
        check_rivals(["graph"], "cpu")


def test_a_folded_rival_has_no_batch_norm_left_and_the_network_stays_as_it_was():
    net = torch_network(*make_weights("resnet20"))
    buffers = Buffers.make((1, 3, 32, 32), RULES["fp32"], "cpu")
    made = rival_recipes(net, buffers, RULES["fp32"], ["torch-cpu"], "cpu")["torch-cpu-folded"].make()
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in made.modules())
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in net.modules()) == 19


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"precisions": ["fp64"]}, "unknown precision to measure 'fp64'"),
        ({"rivals": ["tensorrt"]}, "unknown rival"),
        ({"batches": [0]}, "at least one image"),
        ({"engine": "tpu"}, "unknown engine"),
        ({"kernels": ["conv2d_direct"]}, "applies to the CUDA engine"),
        ({"kernels": ["conv2d_fast"]}, "unknown kernel"),
    ],
)
def test_a_plan_that_cannot_be(wrong, words):
    with pytest.raises(ValueError, match=words):
        plan(**wrong)


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy-resnet\[torch\]'"):
        next(rows(plan()))


def test_what_is_compared_is_stored():
    settings = plan(rivals=["torch-cpu"], ceilings=LIMITS).settings()
    assert settings["samples"] == 5
    assert settings["rivals"] == ["torch-cpu"]
    assert settings["torch_threads"] >= 1
    assert settings["ceilings"]["device"] == "Abacus"
    assert comparison.DEFAULT_RIVALS["cpu"] == plan(rivals=None).rivals


def test_results_of_every_library_are_brought_to_the_host() -> None:
    class OnTheGpu:
        """As CuPy's: nothing of NumPy's but `get`."""

        def get(self) -> np.ndarray:
            return np.float32([[1.5]])

    y = np.float32([[1.5]])
    for result in (y, torch.from_numpy(y), OnTheGpu()):
        copied = contenders.to_float64(result)
        assert copied.dtype == np.float64
        assert copied.tolist() == [[1.5]]
        assert not np.shares_memory(copied, y)
