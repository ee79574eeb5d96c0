"""ResNets on hand-written CUDA kernels, driven entirely from Python.

Importing this package does no GPU work and imports neither CuPy nor torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Model", "Prediction", "__version__", "list_models", "load", "predict"]

if TYPE_CHECKING:
    from .loading import load
    from .model import Model
    from .networks import list_models
    from .predicting import predict
    from .prediction import Prediction

_LAZY = {
    "Model": "model",
    "Prediction": "prediction",
    "list_models": "networks",
    "load": "loading",
    "predict": "predicting",
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that ``import cupy_resnet`` stays quick."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
