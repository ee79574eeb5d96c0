"""What lies on the disk: the cache, torch, weights."""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import environment
from .finding import Finding, version_of


def examine_cache() -> Iterator[Finding]:
    folder = environment.cache_dir()
    fix = f"export {environment.CACHE_DIR.name}=/a/folder/you/can/write"
    if not folder.is_absolute():
        yield Finding(name="cache", status="warning", detail="this system knows no home folder", fix=fix)
        return
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        detail = f"{folder} cannot be written ({error.strerror}): everything is compiled and fetched anew every time"
        yield Finding(name="cache", status="warning", detail=detail, fix=fix)
        return
    kernels = _size(folder / "kernels", "*.cubin")
    weights = _size(folder / "weights", "*.safetensors")
    detail = f"{folder}: {kernels} of compiled kernels, {weights} of weights"
    if not environment.disk_cache():
        detail += f"; kernels are kept in memory only, since {environment.DISK_CACHE.name}=0"
    yield Finding(name="cache", status="ok", detail=detail)


def _size(folder: Path, pattern: str) -> str:
    sizes = [path.stat().st_size for path in folder.glob(pattern) if path.is_file()]
    return f"{len(sizes)} files ({sum(sizes) / 1e6:.1f} MB)"


def examine_torch() -> Iterator[Finding]:
    absent = [name for name in ("torch", "torchvision") if importlib.util.find_spec(name) is None]
    if absent:
        yield Finding(
            name="torch",
            status="missing",
            detail=f"no {' and no '.join(absent)}: needed only to fetch torchvision's weights, once, and for .pth",
            fix="pip install 'cupy-resnet[torch]'",
        )
    else:
        detail = f"torch {version_of('torch')}, torchvision {version_of('torchvision')}, for torchvision's weights"
        yield Finding(name="torch", status="ok", detail=detail)


def examine_weights() -> Iterator[Finding]:
    folder = environment.cache_dir() / "weights"
    names = sorted(path.stem for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    half = [name for name in names if not (folder / f"{name}.json").is_file()]
    if half:
        yield Finding(
            name="weights",
            status="warning",
            detail=f"{', '.join(half)} in {folder}: the record beside it is missing, so it is not used",
            fix="rm " + " ".join(f"'{folder / name}.safetensors'" for name in half),
        )
    whole = [name for name in names if name not in half]
    yield Finding(name="weights", status="ok", detail=f"of torchvision, kept here: {', '.join(whole) or 'none yet'}")


def examine_embedded() -> Iterator[Finding]:
    from ..weights_store import embedded, resolve

    fix = "pip install --force-reinstall --no-deps cupy-resnet"
    names = embedded()
    if not names:
        yield Finding(name="embedded", status="missing", detail="no weights come with this installation", fix=fix)
    for name in names:
        try:
            size = Path(str(resolve(name).path)).stat().st_size
        except (OSError, ValueError) as error:
            yield Finding(name="embedded", status="missing", detail=f"{name} cannot be read: {error}", fix=fix)
        else:
            yield Finding(name="embedded", status="ok", detail=f"{name} ({size / 1e6:.2f} MB), works without network")
