"""What the tests of verification share: a small network, and mistakes that can be made in an engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import normal

import cupy_resnet
from cupy_resnet import weights_store
from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.engines import numpy_engine
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.verification import Report

STATE = random_state_dict(describe("resnet20"), seed=6)
WEIGHTS = weights_store.resolve("resnet20", STATE)
X = normal((3, 3, 32, 32), 7)


def model(name: str = "resnet20", state: Any = STATE, **options: Any) -> cupy_resnet.Model:
    return cupy_resnet.load(name, state, **({"engine": "numpy"} | options))


def over(report: Report) -> list[str]:
    """The checkpoints over tolerance."""
    return [comparison.name for comparison in report.comparisons if not comparison.passed]


def one_tap_dropped(monkeypatch: pytest.MonkeyPatch, applies: Callable[[Conv2dProblem], bool]) -> None:
    """Makes the NumPy engine forget the filter's last position in some convolutions."""
    correct = numpy_engine.im2col

    def broken(x: np.ndarray, problem: Conv2dProblem, rows: slice) -> np.ndarray:
        columns = correct(x, problem, rows)
        if applies(problem):
            columns[..., -1, -1, :] = 0
        return columns

    monkeypatch.setattr(numpy_engine, "im2col", broken)


def padding_off_by_one(monkeypatch: pytest.MonkeyPatch, applies: Callable[[Conv2dProblem], bool]) -> None:
    """Makes the NumPy engine pad some convolutions by one column more on the left and one less on the right."""
    correct = numpy_engine.im2col

    class Shifted:
        """The problem, with its output's size, but another padding."""

        is_pointwise = False

        def __init__(self, problem: Conv2dProblem) -> None:
            self._problem = problem
            self.pad_w = problem.pad_w + 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._problem, name)

    def broken(x: np.ndarray, problem: Conv2dProblem, rows: slice) -> np.ndarray:
        return correct(x, Shifted(problem) if applies(problem) else problem, rows)

    monkeypatch.setattr(numpy_engine, "im2col", broken)


def wrong_epsilon(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    """Makes the NumPy engine's BatchNorm add 1e-3 to variances of so many channels, TensorFlow's default."""
    correct = numpy_engine.NumpyEngine.batch_norm2d

    def broken(self: Any, x: np.ndarray, *parameters: np.ndarray, eps: float) -> np.ndarray:
        return correct(self, x, *parameters, eps=1e-3 if x.shape[-1] == channels else eps)

    monkeypatch.setattr(numpy_engine.NumpyEngine, "batch_norm2d", broken)
