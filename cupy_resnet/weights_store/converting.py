"""Writes weights with all that belongs to them: as one safetensors file, or as a JSON manifest with an npz."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._names import unknown_name
from .download import Progress
from .encoding import DTYPES, npz_and_manifest, safetensors_bytes
from .resolving import resolve
from .writing import write_file

logger = logging.getLogger(__name__)

FORMATS = {"safetensors": ".safetensors", "npz+json": ".json"}
"""What `convert` writes, and how the names of such files end."""


def convert(
    model: str,
    weights: str | Path | Mapping[str, Any] | None,
    out: str | Path,
    *,
    format: str | None = None,  # noqa: A002
    dtype: str = "float32",
    categories: str | Path | Iterable[str] | None = None,
    preset: str | None = None,
    resize: int | None = None,
    crop: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    batch_norm_eps: float | Mapping[str, float] | None = None,
    source: str | None = None,
    training: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes the weights of a model with transforms, class names and origin, complete or not at all.

    Equal weights give equal bytes. A process killed in the middle leaves `out` as it was; if it was killed between the
    two files of a manifest that replaces another, the old manifest and the new archive are refused when read.

    Args:
        model, weights, categories, preset, resize, crop, mean, std, progress: as in `resolve`.
        out: the file to write, ``.safetensors`` or ``.json``; one that exists is replaced. A ``.json`` manifest
            keeps its tensors beside it, in an ``.npz`` of the same name. ``weights/README.md`` describes both.
        format: ``"safetensors"`` or ``"npz+json"``; by default what the name of `out` says.
        dtype: ``"float32"`` or ``"float16"``.
        batch_norm_eps: as in `cupy_resnet.load`, kept with the weights.
        source: where the weights come from, by default what is known about it.
        training: a record of how they were trained, of JSON's types.

    Returns:
        `out`.

    Raises:
        CheckpointError: the weights do not fit the model, or have values beyond `dtype`.
        OSError: the file cannot be written.
        ValueError: an unknown format or dtype, or a name of `out` that does not go with the format; besides, all
            that `resolve` raises.
    """
    out = Path(out).expanduser()
    format = _format_of(out, format)  # noqa: A001
    if dtype not in DTYPES:
        raise ValueError(unknown_name("dtype", dtype, DTYPES))
    found = resolve(
        model,
        weights,
        categories=categories,
        preset=preset,
        resize=resize,
        crop=crop,
        mean=mean,
        std=std,
        batch_norm_eps=batch_norm_eps,
        progress=progress,
    )
    if source is not None:
        found = replace(found, source=source)
    if training is not None:
        found = replace(found, training=dict(training))
    if format == "safetensors":
        write_file(out, safetensors_bytes(found, dtype))
    else:
        archive, manifest = npz_and_manifest(found, dtype, out.with_suffix(".npz").name)
        # The manifest last: between the two writes an older one names tensors that are gone, and is refused.
        write_file(out.with_suffix(".npz"), archive)
        write_file(out, manifest)
    logger.info("%s: %s, %d tensors as %s", out, found.model, len(found.state), dtype)
    return out


def _format_of(out: Path, wanted: str | None) -> str:
    if wanted is not None and wanted not in FORMATS:
        raise ValueError(unknown_name("format", wanted, FORMATS))
    by_suffix = {suffix: name for name, suffix in FORMATS.items()}.get(out.suffix.lower())
    if by_suffix is None or wanted not in (None, by_suffix):
        ends = f"in {FORMATS[wanted]} for {wanted}" if wanted else f"in {' or '.join(FORMATS.values())}"
        raise ValueError(f"the file to write must end {ends}, got {out}")
    return by_suffix
