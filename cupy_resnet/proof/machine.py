"""What a measurement was made on: without it a number says nothing."""

import datetime
import platform
from importlib import metadata
from typing import Any


def describe_machine(commit: str | None = None) -> dict[str, Any]:
    """Returns device, driver, versions and date, as they are stored beside every measurement.

    Args:
        commit: of the source that was measured, where the caller knows it.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    driver = cupy.cuda.runtime.driverGetVersion()
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    versions = {"cupy": cupy.__version__, "nvrtc": nvrtc, "python": platform.python_version()}
    for package in ("numpy", "torch", "torchvision"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": cupy.cuda.runtime.getDeviceProperties(device)["name"].decode(),
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }
