"""The arrays on which what may be one kernel is timed, whole and in pieces: with NumPy in place of CuPy."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fusion_support import RESIDUAL, RESIDUAL_ON

from cupy_resnet.conv2d import VARIANTS, Conv2dPair, Conv2dProblem, back_to_back
from cupy_resnet.conv2d.configs import NoConfig
from cupy_resnet.conv2d.pieces import halves, steps
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.tuning import Candidate, Workload, bench, operands
from cupy_resnet.tuning.entrants import Apart

PLAIN = Conv2dProblem(N=2, H=6, W=6, C=8, K=8, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
WITH_SHORTCUT = replace(PLAIN, shortcut_channels=8, shortcut_stride=2)
RESIDUAL_PAIR = Conv2dPair(PLAIN, 16)
SHORTCUT_PAIR = Conv2dPair(PLAIN, 16, shortcut_channels=8, shortcut_stride=2)
FOLLOWED = [replace(pair, following=8) for pair in (RESIDUAL_PAIR, SHORTCUT_PAIR)]
FUSED = [WITH_SHORTCUT, RESIDUAL_PAIR, SHORTCUT_PAIR, *FOLLOWED]


def loaded(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def convolved(problem: Conv2dProblem, arrays: Any, config: Any = None) -> None:
    """Stands for a convolution's kernel."""
    ops = NumpyEngine()
    x, weight = loaded(arrays.x), loaded(arrays.filter.weight)
    assert (x.shape, weight.shape, arrays.y.shape) == (problem.input_shape, problem.filter_shape, problem.output_shape)
    y = ops.conv2d(x, weight, arrays.bias, stride=problem.stride_h, padding=problem.pad_h)
    assert (arrays.shortcut is None) == (problem.shortcut_channels == 0)
    if arrays.shortcut is not None:
        shortcut = loaded(arrays.shortcut.x), loaded(arrays.shortcut.filter.weight)
        y = y + ops.conv2d(*shortcut, stride=problem.shortcut_stride)
    if arrays.residual is not None:
        y = y + loaded(arrays.residual)
    arrays.y[...] = np.maximum(y, 0) if arrays.relu else y


def all_at_once(pair: Conv2dPair, arrays: Any, config: Any = None) -> None:
    """Stands for the kernel for convolutions in a row."""

    def one(problem: Conv2dProblem, *values: Any, residual: Any = None, shortcut: Any = None) -> None:
        named = dict(zip(("x", "filter", "bias", "relu", "y"), values, strict=True))
        convolved(problem, SimpleNamespace(**named, residual=residual, shortcut=shortcut))

    assert (arrays.residual is None) == (arrays.shortcut is not None) == (pair.shortcut_channels > 0)
    assert (arrays.following is None) == (pair.third is None)
    (filter1, filter2), (bias1, bias2), (relu1, relu2) = arrays.filters, arrays.biases, arrays.relus
    middle = np.full(pair.first.output_shape, np.nan, np.float16)
    one(pair.first, arrays.x, filter1, bias1, relu1, middle)
    added = {"residual": arrays.residual, "shortcut": arrays.shortcut}
    one(pair.second, middle, filter2, bias2, relu2, arrays.y, **added)
    if pair.third is not None:
        one(pair.third, arrays.y, *arrays.following)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """NumPy in place of CuPy and of the kernels; the names of those that have been launched."""
    log: list[str] = []

    def noting(name: str, compute: Any) -> Any:
        def launch(*arguments: Any) -> None:
            log.append(name)
            compute(*arguments)

        return launch

    variants = {name: SimpleNamespace(launch=noting(name, convolved)) for name in VARIANTS}
    monkeypatch.setattr(operands, "VARIANTS", variants)
    monkeypatch.setattr(operands, "launch_back_to_back", noting(back_to_back.name, all_at_once))
    host = SimpleNamespace(**{name: getattr(np, name) for name in ("asarray", "empty", "float32", "uint16", "uint32")})
    host.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=lambda number: {"l2CacheSize": 1 << 16},
            memGetInfo=lambda: (1 << 30, 1 << 31),
        )
    )
    monkeypatch.setitem(sys.modules, "cupy", host)
    return log


def made(problem: Problem, *, cold_l2: bool = True) -> list[operands.Arrays]:
    normal = np.random.default_rng(0).standard_normal(10_007, np.float32)
    return operands.make_operands(Workload(problem), normal, cold_l2=cold_l2)


def every_way(problem: Problem) -> list[Candidate]:
    """As one kernel, and in all ways in pieces."""
    name = back_to_back.name if isinstance(problem, Conv2dPair) else "conv2d_direct"
    ways: list[Candidate] = [Candidate(name, NoConfig())]
    parts = halves(problem)
    if parts is not None:
        ways += [Apart.of(first, second) for first in every_way(parts[0]) for second in every_way(parts[1])]
    return ways


def kernels(way: Candidate) -> list[str]:
    return [kernel.variant for kernel in way.kernels()] if isinstance(way, Apart) else [way.variant]


@pytest.mark.parametrize("problem", FUSED, ids=str)
def test_however_it_is_computed_the_outputs_are_the_same(problem: Problem, launched: list[str]) -> None:
    ways = every_way(problem)
    assert {len(kernels(way)) for way in ways} == set(range(1, steps(problem) + 1))
    for arrays in made(problem)[:3]:
        found = []
        for way in ways:
            launched.clear()
            for output in arrays.outputs:
                output[...] = np.nan
            operands.launch(problem, way, arrays)
            assert launched == kernels(way)
            found.append([loaded(output) for output in arrays.outputs])
        assert len(found[0]) == 1 + (problem in FOLLOWED)
        for other in found:
            for output, reference in zip(other, found[0], strict=True):
                assert 0.3 < reference.max() < 30
                np.testing.assert_allclose(output, reference, atol=4e-3 * reference.max())


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("problem", [PLAIN, *FUSED], ids=str)
def test_no_two_arrays_of_a_launch_are_one_or_alike(problem: Problem) -> None:
    for arrays in made(problem)[:2]:
        whole: Any = arrays.whole
        filters = list(whole.filters) if isinstance(problem, Conv2dPair) else [whole.filter]
        inputs = [whole.x, *(filter.weight for filter in filters)]
        if whole.shortcut is not None:
            inputs += [whole.shortcut.x, whole.shortcut.filter.weight]
        if len(arrays.outputs) > 1:
            inputs.append(whole.following.filter.weight)
        every = [*inputs, *arrays.outputs, *([] if arrays.between is None else [arrays.between])]
        for n, array in enumerate(every):
            assert not any(np.shares_memory(array, other) for other in every[:n])
        assert len({tuple(array.reshape(-1)[:4]) for array in inputs}) == len(inputs)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("cold_l2", [False, True])
def test_launches_take_turns(cold_l2: bool) -> None:
    launches = made(FOLLOWED[1], cold_l2=cold_l2)
    assert len(launches) == operands.LAUNCHES
    wholes: list[Any] = [arrays.whole for arrays in launches]
    for filters in ([whole.filters[1] for whole in wholes], [whole.shortcut.filter for whole in wholes]):
        assert len(set(map(id, filters))) > 1
    for given in ([whole.shortcut.x for whole in wholes], [arrays.outputs[1] for arrays in launches]):
        assert (len(set(map(id, given))) > 1) == cold_l2
    assert len({id(arrays.between) for arrays in launches}) == 1


@pytest.mark.usefixtures("launched")
def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(MemoryError, match=r"GB, and 1\.1 GB are free"):
        made(replace(RESIDUAL_ON, first=replace(RESIDUAL.first, N=4096)))


def test_both_outputs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    race = bench.GpuRace(SimpleNamespace(normal=None, cold_l2=False), Workload(FOLLOWED[0]), None)  # type: ignore[arg-type]
    reference, wrong_y, wrong_z, right = (Candidate(name, NoConfig()) for name in ("reference", "y", "z", "right"))

    def run(candidate: Candidate) -> list[np.ndarray]:
        outputs = {"y": np.ones((4, 4), np.float16), "z": np.ones((4, 2), np.float16)}
        if candidate.variant in outputs:
            outputs[candidate.variant][1, 1] = np.nan
        return list(outputs.values())

    monkeypatch.setattr(bench, "make_operands", lambda workload, normal, cold_l2: [])
    monkeypatch.setattr(race, "_run", run)
    monkeypatch.setattr(race, "_capture", lambda candidate: candidate)
    monkeypatch.setattr(race, "_suitable_launches", lambda candidate: 2)
    monkeypatch.setitem(sys.modules, "cupy", np)
    race.prepare([reference, wrong_y, wrong_z, right])
    assert set(race.rejected) == {wrong_y, wrong_z}
