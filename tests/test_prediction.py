"""`Prediction` itself."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import cupy_resnet
from cupy_resnet.prediction import Timings, top_classes

GOOD = cupy_resnet.Prediction(
    index=3,
    path="photos/cat.jpg",
    labels=("tabby", "tiger cat"),
    class_indices=(281, 282),
    wnids=("n02123045", "n02123159"),
    probabilities=(0.75, 0.125),
    logits=np.float32([1, 2, 3]),
    features=np.float32([0.5]),
    timings=Timings(decode=0.25, preprocess=0.5, inference=1.0),
)
BAD = cupy_resnet.Prediction(index=4, error="b.jpg: the file is empty (0 bytes)", timings=Timings(decode=0.25))


def test_the_first_of_each_is_the_likeliest() -> None:
    assert (GOOD.label, GOOD.class_index, GOOD.wnid, GOOD.probability) == ("tabby", 281, "n02123045", 0.75)
    assert (BAD.label, BAD.class_index, BAD.wnid, BAD.probability) == (None, None, None, None)


def test_repr_is_readable() -> None:
    assert repr(GOOD) == "Prediction('photos/cat.jpg': tabby 75.0%, tiger cat 12.5%)"
    assert repr(BAD) == "Prediction(image 4, error='b.jpg: the file is empty (0 bytes)')"


def test_dictionaries_survive_json_and_have_the_same_keys() -> None:
    for prediction in (GOOD, BAD):
        values = prediction.to_dict()
        assert json.loads(json.dumps(values, allow_nan=False)) == values
        assert "logits" not in values
    assert GOOD.to_dict().keys() == BAD.to_dict().keys()
    assert GOOD.to_dict() == {
        "index": 3,
        "path": "photos/cat.jpg",
        "label": "tabby",
        "probability": 0.75,
        "labels": ["tabby", "tiger cat"],
        "probabilities": [0.75, 0.125],
        "class_indices": [281, 282],
        "wnids": ["n02123045", "n02123159"],
        "features": [0.5],
        "error": None,
        "timings": {"decode": 0.25, "preprocess": 0.5, "inference": 1.0},
    }
    assert GOOD.to_dict(logits=True)["logits"] == [1.0, 2.0, 3.0]
    assert BAD.to_dict(logits=True)["logits"] is None


def test_it_is_frozen_and_small() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.error = "none"  # type: ignore[misc]
    assert not hasattr(GOOD, "__dict__")


@given(arrays.arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([-2, -1, 0, 1, 2])), st.data())
def test_top_classes_are_a_stable_sort(logits: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(logits)))
    expected = sorted(range(len(logits)), key=lambda index: (-logits[index], index))[:k]
    assert top_classes(logits, k).tolist() == expected
