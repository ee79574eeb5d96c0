"""What the tests of two convolutions in one kernel share."""

import pytest

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem, Device, back_to_back_choice, tuned
from cupy_resnet.conv2d.back_to_back import back_to_back_candidates, supports_back_to_back
from cupy_resnet.conv2d.back_to_back_choice import BackToBackChoice

FIRST = Conv2dProblem(N=32, H=56, W=56, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
PAIR = Conv2dPair(FIRST, 256)
"""What ends the bottlenecks of ResNet-50's first stage."""


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
