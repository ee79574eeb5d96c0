"""Where weights come from: torchvision by name, files, mappings, and what travels with the package.

`resolve` finds them with the transforms and the class names that belong to them; `convert` writes them with all of it.
"""

from .categories import imagenet_classes
from .converting import convert
from .resolving import embedded, resolve, split_name
from .unavailable import NoWeightsError, WeightsUnavailableError
from .weights import Weights

__all__ = [
    "NoWeightsError",
    "Weights",
    "WeightsUnavailableError",
    "convert",
    "embedded",
    "imagenet_classes",
    "resolve",
    "split_name",
]
