"""State dicts: read, unwrapped to torchvision's keys, verified against a network, BatchNorm folded. Imports no CuPy."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint_files import read_file
from .errors import CheckpointError

logger = logging.getLogger(__name__)

CONTAINERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module")
"""Where training scripts keep the weights inside a checkpoint, the first that exists being taken."""

EMA_CONTAINERS = (
    "state_dict_ema",
    "model_ema",
    "ema_state_dict",
    "ema_model_state_dict",
    "ema_model",
    "model_ema_state_dict",
    "ema",
)
"""Where they keep an exponential moving average; taken when there is nothing else."""

PREFIXES = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "state_dict.",
    "model.",
    "model_ema.",
    "ema_model.",
    "ema.",
)
"""What wrappers (data parallel, torch.compile, FSDP, Lightning, averaging) put before a parameter's name."""

_LISTED = 8


def read_state_dict(weights: str | Path | Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads weights and brings them to torchvision's keys.

    Containers (`CONTAINERS`, `EMA_CONTAINERS`) are opened and `PREFIXES` stripped as often as they occur;
    ``num_batches_tracked`` and ``n_averaged`` are dropped.

    Args:
        weights: a ``.safetensors``, ``.npz``, ``.pth`` or ``.pt`` file, or a mapping from keys to NumPy, CuPy or
            torch arrays, possibly nested as training scripts save it.

    Returns:
        Key to NumPy array: float16, float32 and float64 as stored, bfloat16 widened to float32.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file cannot be read, holds no tensors, or two keys become one.
        ImportError: a torch file without torch installed.
        TypeError: `weights` is neither a path nor a mapping.
    """
    if isinstance(weights, str | Path):
        source, content = str(weights), read_file(Path(weights).expanduser())
    elif isinstance(weights, Mapping):
        source, content = "the mapping", weights
    else:
        advice = "; pass its state_dict()" if hasattr(weights, "state_dict") else ""
        raise TypeError(f"weights must be a path or a mapping of arrays, got {type(weights).__name__}{advice}")
    state: dict[str, np.ndarray] = {}
    origin: dict[str, str] = {}
    for key, value in _unwrap(content, source).items():
        name = strip_prefixes(str(key))
        if name.rpartition(".")[2] in ("num_batches_tracked", "n_averaged"):
            continue
        if name in state:
            raise CheckpointError(f"{source}: {origin[name]!r} and {key!r} are both {name!r} once prefixes are gone")
        state[name], origin[name] = _to_numpy(value, f"{source}: {key}"), str(key)
    return state


def strip_prefixes(key: str) -> str:
    """Removes `PREFIXES` from the front of `key`, repeatedly and in any order."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if key.startswith(prefix):
                key, stripped = key.removeprefix(prefix), True
    return key


def infer_sizes(state: Mapping[str, np.ndarray]) -> tuple[int | None, int | None]:
    """Returns (num_classes, in_channels) from the classifier and the stem, None for one that is not there."""
    head = next((state[key] for key in ("fc.weight", "linear.weight") if key in state), None)
    stem = state.get("conv1.weight")
    num_classes = head.shape[0] if head is not None and head.ndim == 2 else None
    in_channels = stem.shape[1] if stem is not None and stem.ndim == 4 else None
    return num_classes or None, in_channels or None


def verify(state: Mapping[str, np.ndarray], table: Mapping[str, tuple[int, ...]], network: str) -> None:
    """Checks that `state` holds exactly the tensors of `table`, with their shapes and finite values.

    Raises:
        CheckpointError: the message lists what is missing, left over, of another shape, not a floating-point tensor
            or not finite, and negative running variances.
    """
    faults: dict[str, list[str]] = {
        "missing": [key for key in table if key not in state],
        "left over": [key for key in state if key not in table],
        "of another shape": [
            f"{key} {state[key].shape} instead of {shape}"
            for key, shape in table.items()
            if key in state and state[key].shape != shape
        ],
    }
    present = {key: state[key] for key in table if key in state}
    floating = {key: array for key, array in present.items() if array.dtype.kind == "f"}
    faults["not floating point"] = [f"{key} ({present[key].dtype})" for key in present if key not in floating]
    faults["not finite"] = [
        f"{key} ({bad} of {array.size} values)"
        for key, array in floating.items()
        if (bad := array.size - int(np.isfinite(array).sum()))
    ]
    faults["negative variances"] = [
        f"{key} (lowest {array.min():.3g})"
        for key, array in floating.items()
        if key.endswith(".running_var") and array.size and array.min() < 0
    ]
    lines = [f"  {fault}: {_listing(keys)}" for fault, keys in faults.items() if keys]
    if lines:
        raise CheckpointError("\n".join([f"the state dict does not fit {network}:", *lines]))


def fold_batch_norm(
    weight: np.ndarray,
    bias: np.ndarray | None,
    gamma: np.ndarray,
    beta: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    eps: float = 1e-5,
) -> tuple[np.ndarray, np.ndarray]:
    """Folds an inference BatchNorm into the convolution before it, in float64.

    ``gamma · (conv(x, weight) + bias − mean) / sqrt(var + eps) + beta`` is again a convolution.

    Args:
        weight: (K, ...), output channels first; OIHW and KRSC both qualify.
        bias: (K,) or None for zero.
        gamma, beta, mean, var: (K,), BatchNorm's weight, bias, running mean and running variance.
        eps: added to the variance.

    Returns:
        The filter, of `weight`'s shape, and the bias (K,), both float64.

    Raises:
        ValueError: vectors that are not (K,).
    """
    K = weight.shape[0]
    for name, vector in {"bias": bias, "gamma": gamma, "beta": beta, "mean": mean, "var": var}.items():
        if vector is not None and vector.shape != (K,):
            raise ValueError(f"fold_batch_norm: {name} has shape {vector.shape}, expected ({K},)")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = gamma.astype(np.float64) / np.sqrt(var.astype(np.float64) + eps)
        shift = -mean.astype(np.float64) if bias is None else bias.astype(np.float64) - mean
        folded = weight.astype(np.float64) * scale.reshape(K, *[1] * (weight.ndim - 1))
        return folded, beta.astype(np.float64) + shift * scale


def oihw_to_krsc(weight: np.ndarray) -> np.ndarray:
    """(K, C/groups, R, S), as checkpoints hold filters, to C-contiguous (K, R, S, C/groups)."""
    return np.ascontiguousarray(weight.transpose(0, 2, 3, 1))


def _unwrap(content: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Opens containers until the mapping holds arrays itself."""
    path: list[str] = []
    while True:
        nested = {key: value for key, value in content.items() if isinstance(value, Mapping) and value}
        key = next((name for name in (*CONTAINERS, *EMA_CONTAINERS) if name in nested), None)
        if key is None and len(nested) == 1 and not any(map(_is_array, content.values())):
            key = next(iter(nested))
        if key is None:
            break
        averages = [name for name in EMA_CONTAINERS if name in nested and name != key]
        if averages:
            logger.warning(
                "%s: the weights under %r are used; it also holds averaged ones under %r", source, key, averages[0]
            )
        path.append(str(key))
        content = nested[key]
    if not any(map(_is_array, content.values())):
        place = f" under {'/'.join(path)}" if path else ""
        keys = _listing([f"{key} ({type(value).__name__})" for key, value in content.items()]) or "none"
        raise CheckpointError(f"{source} holds no tensors{place}; its keys are: {keys}")
    return content


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _to_numpy(value: Any, what: str) -> np.ndarray:
    """Brings a NumPy, torch or CuPy array to NumPy; none of the two libraries is imported for it."""
    if isinstance(value, np.ndarray):
        return value
    if not _is_array(value):
        raise CheckpointError(f"{what} is a {type(value).__name__}, not a tensor; remove it from the state dict")
    if type(value).__module__.startswith("cupy"):
        return value.get()
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        return tensor.numpy()
    return np.asarray(value)


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
