"""What the tests of the ends of blocks share: in one kernel or in several, and who says so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_resnet.conv2d import (
    H100,
    VARIANTS,
    Conv2dPair,
    Conv2dProblem,
    Device,
    back_to_back_choice,
    configs,
    shortcut_choice,
    tuned,
)
from cupy_resnet.conv2d.back_to_back import back_to_back_candidates, supports_back_to_back
from cupy_resnet.conv2d.back_to_back_choice import BackToBackChoice
from cupy_resnet.engines import checks
from cupy_resnet.engines.base import NONE_FUSED, Fusions
from cupy_resnet.engines.numpy_engine import NumpyEngine

FIRST = Conv2dProblem(N=32, H=56, W=56, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
PAIR = Conv2dPair(FIRST, 256)
"""What ends the bottlenecks of ResNet-50's first stage."""

PLAIN = NumpyEngine()


def always(monkeypatch: pytest.MonkeyPatch, place: int = 0) -> None:
    """Pairs are one kernel wherever it applies, in the candidate at a place of the list."""

    def choose(pair: Conv2dPair, device: Device, spread_nan: bool, known: tuned.Lookup | None) -> BackToBackChoice:
        supported, why_not = supports_back_to_back(pair, device)
        if not supported or pair.N == 0:
            return BackToBackChoice(None, why_not)
        candidates = back_to_back_candidates(pair, device)
        return BackToBackChoice(candidates[place % len(candidates)], "always")

    monkeypatch.setattr(back_to_back_choice, "_choose", choose)


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are two kernels."""
    monkeypatch.setattr(back_to_back_choice, "_choose", lambda *arguments: BackToBackChoice(None, "never"))


def shortcuts(monkeypatch: pytest.MonkeyPatch, fuses: Callable[[Conv2dProblem], bool]) -> None:
    """Says of convolutions with a shortcut which are one kernel; where another was asked for, none."""

    def choose(problem: Conv2dProblem, device: Device, kernel: str, *_: Any) -> tuple[bool, str]:
        return kernel == "auto" and fuses(problem), "so it was said"

    monkeypatch.setattr(shortcut_choice, "_choose", choose)


def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel for compute capability 9.0 can do in one is done in one."""
    always(monkeypatch)
    shortcuts(monkeypatch, lambda problem: VARIANTS["conv2d_wgmma"].supports(problem, H100)[0])


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution is a kernel of its own."""
    never(monkeypatch)
    shortcuts(monkeypatch, lambda problem: False)


def choose_by(monkeypatch: pytest.MonkeyPatch, fusions: Fusions) -> None:
    """Has the CUDA engine and `explain` fuse just that, whether there is a kernel for it or not."""

    def choose(pair: Conv2dPair, *_: Any) -> BackToBackChoice:
        fused = pair.N > 0 and fusions.back_to_back(pair)
        return BackToBackChoice(configs.BACK_TO_BACK[0] if fused else None, "so it was said")

    monkeypatch.setattr(back_to_back_choice, "_choose", choose)
    shortcuts(monkeypatch, fusions.shortcut)


LEVELS = {
    "nothing": NONE_FUSED,
    "shortcuts": Fusions(shortcut=lambda problem: True),
    "pairs": Fusions(back_to_back=lambda pair: not pair.following and not pair.shortcut_channels),
    "pairs, shortcuts apart": Fusions(
        back_to_back=lambda pair: not pair.following and not pair.shortcut_channels, shortcut=lambda problem: True
    ),
    "pairs with shortcuts": Fusions(back_to_back=lambda pair: not pair.following),
    "some": Fusions(
        back_to_back=lambda pair: pair.K == 512 or (pair.K == 1024 and not pair.following),
        shortcut=lambda problem: problem.K != 256,
    ),
    "all": Fusions(back_to_back=lambda pair: True, shortcut=lambda problem: True),
}
"""What an engine may compute in one kernel, of bottlenecks and blocks."""


class Fusing(NumpyEngine):
    """Says that it computes in one what `fusions` says, and notes in `log` what it is asked to compute."""

    def __init__(self, fusions: Fusions = NONE_FUSED) -> None:
        super().__init__()
        self._fusions = fusions
        self.log: list[str] = []

    def fusions(self) -> Fusions:
        return self._fusions

    def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> np.ndarray:
        name = f"conv {weight.shape[1]}×{weight.shape[1]}"
        if options.get("shortcut") is None:
            self.log.append(name)
            return super().conv2d(x, weight, bias, **options)
        if not self._fusions.shortcut(checks.conv2d(x, weight, bias, **geometry_of(options))):
            return super().conv2d(x, weight, bias, **options)
        self.log.append(f"{name} + shortcut")
        return PLAIN.conv2d(x, weight, bias, **options)

    def conv2d_back_to_back(self, x: Any, weights: Any, biases: Any = (None, None), **options: Any) -> Any:
        pair = fused_pair(self._fusions, x, weights, biases, **options)
        if pair is None:
            return super().conv2d_back_to_back(x, weights, biases, **options)
        self.log.append("pair" + " + shortcut" * (pair.shortcut_channels > 0) + " + following" * (pair.following > 0))
        y, _ = PLAIN.conv2d_back_to_back(x, weights, biases, **options)
        return y, PLAIN.conv2d(y, *options["following"], relu=True) if pair.following else None


def fused_pair(fusions: Fusions, x: Any, weights: Any, biases: Any, **options: Any) -> Conv2dPair | None:
    """As much of what `Ops.conv2d_back_to_back` is asked for as is one operation, if any is."""
    asked = checks.conv2d_back_to_back(x, weights, biases, **geometry_of(options))
    return next((pair for pair in (asked, asked.without_following()) if fusions.back_to_back(pair)), None)


def geometry_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("relu", "overwrite_residual")}
