"""Finds the folders that travel beside the package: ``kernels_cu/`` and ``weights/``."""

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


@cache
def folder(name: str) -> Path:
    """Returns the folder `name`: the copy packaged in the wheel, else the sibling in a source tree.

    The working directory is never searched: a folder of the same name there is not ours.

    Raises:
        FileNotFoundError: neither place has it; the installation is damaged.
    """
    places = (_PACKAGE / name, _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"cupy_resnet's folder '{name}' is missing: neither {places[0]} nor {places[1]} exists. "
        "Reinstall the package: pip install --force-reinstall cupy-resnet"
    )
