"""Case 9: an error that ends CUDA's context says that the process must restart; every other error stays itself."""

from typing import Any

import numpy as np
import pytest
from predict_support import pixels, small_model

from cupy_resnet.cuda_errors import lost_context_explained


class CUDARuntimeError(RuntimeError):
    """What CuPy raises, as far as it is looked at."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cuda error {status}")
        self.status = status


CUDARuntimeError.__module__ = "cupy_backends.cuda.api.runtime"


@pytest.mark.parametrize("status", [700, 716, 719])
def test_an_error_that_ends_the_context_says_restart(status: int) -> None:
    with pytest.raises(RuntimeError, match=f"cuda error {status}.*restart it") as caught, lost_context_explained():
        raise CUDARuntimeError(status)
    assert isinstance(caught.value.__cause__, CUDARuntimeError)


@pytest.mark.parametrize("error", [CUDARuntimeError(2), ValueError("no"), MemoryError("full")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, lost_context_explained():
        raise error
    assert caught.value is error


def test_the_model_and_predict_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()

    def fail(*_: Any, **__: Any) -> Any:
        raise CUDARuntimeError(700)

    monkeypatch.setattr("cupy_resnet.engines.numpy_engine.NumpyEngine.conv2d", fail)
    with pytest.raises(RuntimeError, match="restart it"):
        model(np.zeros((1, 3, 16, 16), np.float32))
    with pytest.raises(RuntimeError, match="restart it"):
        model.predict([pixels(0)])
