"""What a measurement was made on: without it a number says nothing."""

import datetime
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engines.cuda_engine import cuda_obstacle

_SOURCE = Path(__file__).resolve().parents[2]
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


def describe_machine(commit: str | None = None, *, engine: str | None = None) -> dict[str, Any]:
    """Returns device, driver, versions, date and commit, as they are stored beside every measurement.

    Args:
        commit: of the source that was measured; where it is not given, git is asked.
        engine: that was measured, ``"cuda"`` or ``"numpy"``; by default CUDA where a GPU can be used.

    Returns:
        ``device`` (the GPU's name, or ``"CPU"``), ``processor``, ``processors`` (how many may be used),
        ``driver_cuda`` (the CUDA version the driver speaks) and ``driver`` (its own version), both None without a
        GPU, ``versions``, ``date`` (ISO 8601) and ``commit``.
    """
    gpu = (cuda_obstacle() is None) if engine is None else engine == "cuda"
    versions: dict[str, Any] = _gpu_versions() if gpu else {}
    versions["python"] = platform.python_version()
    for package in ("numpy", "torch", "torchvision"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": _gpu_name() if gpu else "CPU",
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "driver_cuda": _driver_cuda() if gpu else None,
        "driver": _driver() if gpu else None,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": commit or source_commit(),
    }


def processor_name() -> str:
    """Returns what the system calls its processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(encoding="utf-8", errors="replace"), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def source_commit(folder: Path = _SOURCE) -> str | None:
    """Returns the commit that a source tree is at, with ``-dirty`` behind it if files differ; None if it is none."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _gpu_name() -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode())


def _gpu_versions() -> dict[str, Any]:
    import cupy

    versions = {"cupy": cupy.__version__, "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion()))}
    torch = sys.modules.get("torch")
    if torch is not None and torch.backends.cudnn.is_available():
        versions["cudnn"] = torch.backends.cudnn.version()
    return versions


def _driver_cuda() -> str:
    import cupy

    version = cupy.cuda.runtime.driverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver() -> str | None:
    try:
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[0] if found else None
