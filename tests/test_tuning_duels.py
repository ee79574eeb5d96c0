"""What does not win in the network, and that nothing stays of what was only tried."""

import logging
import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_network_support import FEW, NOW, SHORTCUT, Pass, favouring, kept, passes, place, tuned_in
from tuning_support import LAYER, entry, fresh_tables

from cupy_resnet.conv2d import H100, choose, tuned
from cupy_resnet.conv2d.configs import WgmmaConfig
from cupy_resnet.errors import CompileError
from cupy_resnet.tuning import (
    Candidate,
    remember,
)
from cupy_resnet.tuning.duels import MARGIN


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


# What does not win ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_noise_changes_nothing(seed: int) -> None:
    noise = random.Random(seed)
    found = tuned_in(passes(lambda pass_: 1000.0 * noise.gauss(1.0, 0.01)), only=FEW)
    assert found.duels > 5
    assert found.margin > MARGIN
    assert not found.changes
    assert found.before == found.after


def test_a_gain_below_the_margin_changes_nothing() -> None:
    made = passes(favouring(LAYER, place(LAYER, 1), gain=2.9))
    found = tuned_in(made, only={LAYER})
    assert found.margin == MARGIN
    assert found.duels > 0
    assert not found.changes
    assert tuned_in(passes(favouring(LAYER, place(LAYER, 1), gain=3.1)), only={LAYER}).changes


def test_what_only_begins_well_does_not_win() -> None:
    """Whoever comes is fast for six samples, more than half of a duel's and of the last one's: not of those that count.

    After those of the first rounds that made it promising there are three such of seven.
    """
    first, seen = NOW(), Counter[int]()

    def time(pass_: Pass) -> float:
        seen[id(pass_)] += 1
        return 900.0 if pass_ != first and seen[id(pass_)] <= 6 else 1000.0

    found = tuned_in(passes(time), only=FEW)
    assert found.duels > 5
    assert not found.changes


def test_what_wins_duels_but_not_in_the_end_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    favourite = place(LAYER, 1)
    met: list[int] = []

    def time(pass_: Pass) -> float:
        if pass_[LAYER].candidate == favourite and id(pass_) not in met:
            met.append(id(pass_))
        return 980.0 if met and id(pass_) == met[0] else 1000.0

    with caplog.at_level(logging.INFO, "cupy_resnet"):
        found = tuned_in(passes(time), only={LAYER})
    assert not found.changes
    assert found.entries == []
    assert "nothing changes" in caplog.text


def test_identical_launches_never_duel() -> None:
    made = passes(lambda pass_: 1000.0)
    found = tuned_in(made, only={LAYER})
    first, *others = made.captured[1:]
    launched = [pass_.launched[LAYER].candidate.launched for pass_ in others]
    assert first.launched[LAYER].candidate.launched not in launched
    assert len(launched) == len(set(launched)) == found.duels > 0
    plain = WgmmaConfig("fp16", 64, 64, 8, split_k_slices=4)
    same, other = replace(plain, buffers=2), replace(plain, split_k_slices=2)
    a, b, c = (Candidate("conv2d_wgmma", config) for config in (plain, same, other))
    assert a != b
    assert a.launched == b.launched != c.launched
    mma = place(replace(LAYER, N=1, H=7, W=7, C=512, K=512), 0)
    for field, value in (("split_k_slices", 13), ("merged_groups", 13)):
        if hasattr(mma.config, field):
            assert replace(mma, config=replace(mma.config, **{field: value})).launched != mma.launched  # type: ignore[type-var]


def test_wrong_logits_lose_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    favourite = place(LAYER, 1)

    def logits(pass_: Pass) -> np.ndarray:
        wrong = pass_[LAYER].candidate == favourite
        return np.array([[1.0, 2.0 + 0.02 * wrong]], np.float32)

    for result in (logits, lambda pass_: logits(pass_) * np.float32(np.nan if logits(pass_).max() > 2 else 1)):
        caplog.clear()
        made = passes(favouring(LAYER, favourite), logits=result)
        assert not tuned_in(made, only={LAYER}).changes
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert f"{LAYER}: {favourite} is not considered: with it the logits differ by" in record.getMessage()
        assert made.open == 0


@pytest.mark.parametrize("error", [MemoryError("no room"), CompileError("refused")])
def test_what_cannot_be_captured_loses(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    favourite = place(LAYER, 1)

    def fail(pass_: Pass) -> None:
        if pass_[LAYER].candidate == favourite:
            raise error

    made = passes(favouring(LAYER, favourite), failure=fail)
    with caplog.at_level(logging.INFO, "cupy_resnet"):
        found = tuned_in(made, only={LAYER})
    assert not found.changes
    assert f"{LAYER}: {favourite} cannot be tried in the network: {error}" in caplog.text
    assert (made.open, kept()) == (0, {})


# Nothing stays behind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["capture", "sample"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_tried_is_forgotten_after_an_error(where: str, error: type[BaseException]) -> None:
    own = entry(place(LAYER, 2), LAYER)
    kept_before = entry(place(SHORTCUT, 0), SHORTCUT)
    remember(H100.name, [own])
    tuned.keep(H100.name, [kept_before])
    before, table = NOW(), tuned.own_path(H100.name).read_bytes()

    def fail(pass_: Pass) -> None:
        if where == "capture" and pass_[LAYER].candidate == place(LAYER, 1):
            raise error

    def time(pass_: Pass) -> float:
        if where == "sample" and pass_[LAYER].candidate == place(LAYER, 1):
            raise error
        return 1000.0 - 20 * (pass_[LAYER].candidate == place(LAYER, 0))  # accepted before

    made = passes(time, failure=fail)
    with pytest.raises(error):
        tuned_in(made, only={LAYER})
    assert made.captured
    assert made.open == 0
    assert kept() == {kept_before.key: kept_before}
    assert NOW() == before
    assert tuned.own_path(H100.name).read_bytes() == table


def test_trying_leaves_alone_what_others_keep_meanwhile() -> None:
    first, second, other = (entry(place(LAYER, n), LAYER) for n in (1, 2, 3))
    tuned.keep(H100.name, [first])
    with tuned.trying(H100.name, [second]):
        assert choose(LAYER, H100, spread_nan=True).config == place(LAYER, 2).config
        with tuned.trying(H100.name, [other]):
            assert choose(LAYER, H100, spread_nan=True).config == place(LAYER, 3).config
        assert choose(LAYER, H100, spread_nan=True).config == place(LAYER, 2).config
        thread = threading.Thread(target=tuned.keep, args=(H100.name, [other]))
        thread.start()
        thread.join()
    assert kept() == {other.key: other}
