"""Weights as bytes: a safetensors file, or an npz file and its manifest. Equal weights give equal bytes."""

import hashlib
import io
import json

import numpy as np

from ..checkpoint_files import MANIFEST_FORMAT, METADATA_KEY, tensor_sha256
from ..checkpoints import infer_sizes, verify
from ..errors import CheckpointError
from ..networks import Network, describe
from .manifest import layers, with_batch_norm_eps
from .weights import Weights

DTYPES = ("float32", "float16")


def safetensors_bytes(weights: Weights, dtype: str = "float32") -> bytes:
    """Returns a safetensors file with the tensors of `weights` and, as one JSON text in its header, its metadata.

    Raises:
        CheckpointError: the weights do not fit their model, or have values beyond `dtype`.
    """
    from safetensors.numpy import save

    _, tensors = _checked(weights, dtype)
    # One entry, because the order of several is not kept and equal weights shall give equal files.
    return save(tensors, metadata={METADATA_KEY: json.dumps(weights.metadata(), ensure_ascii=False)})


def npz_and_manifest(weights: Weights, dtype: str, archive_name: str) -> tuple[bytes, bytes]:
    """Returns an npz file with the tensors of `weights`, and the JSON manifest that describes it and the network.

    Raises:
        CheckpointError: the weights do not fit their model, or have values beyond `dtype`.
    """
    network, tensors = _checked(weights, dtype)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **tensors)
    archive = buffer.getvalue()
    manifest = {
        "format": MANIFEST_FORMAT,
        **weights.metadata(),
        "num_classes": network.num_classes,
        "in_channels": network.in_channels,
        "layers": layers(network),
        "tensors_file": archive_name,
        "sha256": hashlib.sha256(archive).hexdigest(),
        "tensors": {
            key: {"shape": array.shape, "dtype": array.dtype.name, "sha256": tensor_sha256(array)}
            for key, array in tensors.items()
        },
    }
    return archive, json.dumps(manifest, ensure_ascii=False, indent=1).encode()


def _checked(weights: Weights, dtype: str) -> tuple[Network, dict[str, np.ndarray]]:
    """Returns the network that the weights fit, and its tensors in its order."""
    num_classes, in_channels = infer_sizes(weights.state)
    network = describe(weights.model, num_classes=num_classes, in_channels=in_channels)
    network = with_batch_norm_eps(network, weights.batch_norm_eps)
    table = network.tensor_table()
    verify(weights.state, table, weights.model)
    with np.errstate(over="ignore"):
        tensors = {key: np.ascontiguousarray(weights.state[key], dtype) for key in table}
    beyond = [key for key, array in tensors.items() if not np.isfinite(array).all()]
    if beyond:
        raise CheckpointError(f"{weights.model}: {', '.join(beyond[:3])} has values beyond {dtype}; use float32")
    return network, tensors
