"""The ends of blocks in one kernel, in whole networks: the same logits, planned or not, and tuned."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from back_to_back_support import FIRST, PAIR, always, everything, never, nothing
from helpers import normal
from tuning_support import fresh_tables

import cupy_resnet
from cupy_resnet import networks
from cupy_resnet.arena import foresee, lay_out
from cupy_resnet.conv2d import Conv2dPair, back_to_back
from cupy_resnet.conv2d.back_to_back import supports_back_to_back
from cupy_resnet.conv2d.back_to_back_choice import choose_back_to_back
from cupy_resnet.engines.cuda import convolution
from cupy_resnet.engines.cuda_engine import CudaEngine, describe_device
from cupy_resnet.proof.profiling import profile
from cupy_resnet.tuning import GpuBench, Workload, candidates, remember, tune
from cupy_resnet.tuning.entrants import Apart
from gpu.half import relative_error

pytestmark = pytest.mark.gpu

HALF = ("fp16", "bf16")
APART = {"fp16": 1e-2, "bf16": 5e-2, "tf32": 1e-2}
"""By how much results of whole networks may differ, relative to their norm: sums are in another order."""

ROUNDING = {"fp16": 1e-3, "bf16": 1e-2}
"""The same for a pair by itself, what is between being rounded alike."""


@pytest.fixture(autouse=True)
def supported() -> None:
    supports, why_not = supports_back_to_back(PAIR, describe_device(0))
    if not supports:
        pytest.skip(f"{back_to_back.name} {why_not}")


@lru_cache
def weights(name: str) -> dict[str, np.ndarray]:
    return networks.random_state_dict(networks.describe(name), seed=4)


def load(name: str = "resnet50", **options: Any) -> cupy_resnet.Model:
    return cupy_resnet.load(name, weights=weights(name), **{"engine": "cuda", "precision": "fp16", **options})


def images(N: int, size: int, seed: int = 0) -> Any:
    import cupy

    return cupy.asarray(normal((N, 3, size, size), seed))


def results(x: Any, **options: Any) -> list[np.ndarray]:
    """Logits and features of a pass, and of a second one, whose plan is replayed."""
    with load(**options) as model:
        passes = [model.logits_and_features(x) for _ in range(2)]
        return [array.get() for arrays in passes for array in arrays]


def joint_of(model: cupy_resnet.Model, N: int, size: int) -> list[str]:
    """The layers that are computed together with a downsample."""
    return [step.layer for step in model.explain((N, 3, size, size)) if "shortcut" in step.op]


def pairs_of(model: cupy_resnet.Model, N: int, size: int) -> list[str]:
    return [step.layer for step in model.explain((N, 3, size, size)) if step.kernel == back_to_back.name]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("precision", [*HALF, "tf32"])
@pytest.mark.parametrize(("N", "size"), [(1, 224), (3, 64), (8, 224), (2, 97), (33, 224)])
def test_logits_are_those_of_two_kernels(
    N: int, size: int, precision: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images(N, size)
    never(monkeypatch)
    expected = results(x, precision=precision)
    always(monkeypatch, place)
    for plan in (True, False):
        for found, wanted in zip(results(x, precision=precision, plan=plan), expected, strict=True):
            assert np.isfinite(found).all()
            assert relative_error(found, wanted) < APART[precision]


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("N", [1, 3, 33])
@pytest.mark.parametrize("precision", [*HALF, "tf32"])
@pytest.mark.parametrize(("name", "downsamples"), [("resnet18", 3), ("resnet50", 4)])
def test_blocks_may_end_in_a_kernel_or_in_several(
    name: str, downsamples: int, precision: str, N: int, plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images(N, 224)
    options = {"name": name, "precision": precision, "plan": plan}
    nothing(monkeypatch)
    expected = results(x, **options)
    with load(**options) as model:
        assert joint_of(model, N, 224) == pairs_of(model, N, 224) == []
    everything(monkeypatch)
    for found, wanted in zip(results(x, **options), expected, strict=True):
        assert np.isfinite(found).all()
        assert relative_error(found, wanted) < APART[precision]
    with load(**options) as model:
        assert len(joint_of(model, N, 224)) == downsamples
        assert bool(pairs_of(model, N, 224)) is (name == "resnet50")


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_plan_foresees_every_array(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(16, 224)
    for choose in (nothing, everything):
        choose(monkeypatch)
        with load(name) as model:
            model(x)
            (plan,) = model._alive()._plans.values()
            _, lifetimes = foresee(model.network, (16, 224, 224, 3), "fp16", model.ops.fusions())
            arena = max(offset + array.nbytes for offset, array in zip(lay_out(lifetimes), lifetimes, strict=True))
            assert arena <= plan.nbytes < 1.05 * arena + (8 << 20)
            assert not plan._arena.occupied


@pytest.mark.parametrize("precision", [*HALF, "tf32"])
def test_plans_and_single_launches_give_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    with load(precision=precision) as planned, load(precision=precision, plan=False) as plain:
        for seed in range(3):
            x = images(4, 224, seed)
            np.testing.assert_array_equal(planned(x).get(), plain(x).get())


def test_an_images_logits_do_not_depend_on_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    x = images(7, 64)
    x[3] = x[6] = x[0]
    with load() as model:
        first = model(x).get()
        np.testing.assert_array_equal(first[3], first[0])
        np.testing.assert_array_equal(first[6], first[0])
        for _ in range(5):
            np.testing.assert_array_equal(model(x).get(), first)


@pytest.mark.parametrize("name", ["resnet101", "wide_resnet50_2", "resnext50_32x4d"])
def test_other_networks_of_bottlenecks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of whose pairs the kernel does not compute."""
    x = images(4, 96)
    never(monkeypatch)
    expected = results(x, name=name)
    always(monkeypatch)
    for found, wanted in zip(results(x, name=name), expected, strict=True):
        assert relative_error(found, wanted) < APART["fp16"]


def test_nothing_that_is_needed_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpoints every block's output stays; without, each lies in its shortcut's memory."""
    everything(monkeypatch)
    x = images(2, 224)
    with load() as model:
        kept = model.checkpoints(x)
        np.testing.assert_array_equal(kept["logits"], model(x).get())
        nothing(monkeypatch)
        expected = model.checkpoints(x)
    for name, value in kept.items():
        assert relative_error(value, expected[name]) < APART["fp16"], name


@pytest.mark.parametrize("following", [False, True])
@pytest.mark.parametrize("added", ["residual", "overwritten residual", "shortcut"])
@pytest.mark.parametrize("precision", HALF)
def test_the_operation_by_itself(precision: str, added: str, following: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against its parts, on maps that no tile divides."""
    ops = CudaEngine(precision=precision)
    filters = ops.filter(normal((64, 3, 3, 64), 1) / 24), ops.filter(normal((256, 1, 1, 64), 2) / 8)
    biases = ops.asarray(normal((64,), 3)), ops.asarray(normal((256,), 4))
    filter0 = ops.filter(normal((256, 1, 1, 128), 6) / 11)
    third = ops.filter(normal((64, 1, 1, 256), 7) / 16), ops.asarray(normal((64,), 8))
    overwrite = added == "overwritten residual"
    for N, H, W, stride in ((1, 7, 9, 1), (3, 57, 55, 1), (2, 56, 56, 2)):
        P, Q = -(-H // stride), -(-W // stride)
        found = []
        for choose in (everything, nothing):
            choose(monkeypatch)
            x, residual, x0 = (
                ops.pixels(ops.asarray(normal(shape, 5)))
                for shape in ((N, H, W, 64), (N, P, Q, 256), (N, 2 * P - 1, 2 * Q, 128))
            )
            given = residual.copy()
            y, z = ops.conv2d_back_to_back(
                x,
                filters,
                biases,
                stride=stride,
                padding=1,
                relu=True,
                residual=None if added == "shortcut" else residual,
                shortcut=(x0, filter0, 2) if added == "shortcut" else None,
                overwrite_residual=overwrite,
                following=third if following else None,
            )
            assert (y is residual) is overwrite
            assert overwrite or bool((residual == given).all())
            assert z is None or following
            if z is not None:
                alone = ops.to_numpy(ops.conv2d(y, *third, relu=True))
                assert relative_error(ops.to_numpy(z), alone) < ROUNDING[precision]
            found.append(ops.to_numpy(y))
        assert relative_error(*found) < ROUNDING[precision]


def test_explain_and_profile_name_the_kernel_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    everything(monkeypatch)
    with load(plan=False) as model:
        pairs = pairs_of(model, 4, 224)
        assert any(layer.startswith("layer1.1.conv2 + layer1.1.conv3") for layer in pairs)
        launched: list[Any] = []
        launch = convolution.launch_back_to_back

        def noting(*arguments: Any) -> None:
            launched.append(arguments)
            launch(*arguments)

        monkeypatch.setattr(convolution, "launch_back_to_back", noting)
        model(images(4, 224))
        assert len(launched) == len(pairs)
        rows = [op for op in profile(model, 4, samples=2).ops if op.kernel == back_to_back.name]
    assert [row.layer for row in rows] == pairs
    assert all(row.median_us > 0 for row in rows)


def test_without_folding_and_with_other_kernels_there_are_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    for options in ({"fuse": False}, {"kernel": "conv2d_mma"}, {"precision": "fp32-tc"}):
        with load(**options) as model:
            assert pairs_of(model, 4, 64) == [], options
            model(images(4, 64))


@pytest.mark.parametrize("cold_l2", [False, True])
@pytest.mark.parametrize("precision", HALF)
def test_all_candidates_agree_and_what_is_found_is_followed(
    precision: str, cold_l2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_tables(tmp_path, monkeypatch)
    bench = GpuBench(cold_l2=cold_l2)
    pair = Conv2dPair(replace(FIRST, N=8, precision=precision), 256)
    with bench.race(Workload(pair, residual=True), candidates(pair, bench.device, spread_nan=True)) as race:
        assert race.rejected == {}
    report = tune([Workload(part) for part in pair.parts] + [Workload(pair, residual=True)], bench, budget_s=3.0)
    assert not report.skipped
    result = report.results[-1]
    remember(bench.device.name, report.entries)
    choice = choose_back_to_back(pair, bench.device, spread_nan=True)
    assert choice.config == (None if isinstance(result.best, Apart) else result.best.config)
    assert "timed on this GPU" in choice.reason
