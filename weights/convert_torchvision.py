"""Writes torchvision's weights of one model as a safetensors file that `cupy_resnet.load` reads.

Needs torch and torchvision; torchvision downloads the weights and checks their hash.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from cupy_resnet.checkpoints import infer_sizes, read_state_dict, verify
from cupy_resnet.networks import describe

logger = logging.getLogger("convert_torchvision")


def convert(state_dict: Mapping[str, Any], model: str, output: Path, *, source: str = "") -> None:
    """Verifies a state dict against the model and writes it, complete or not at all.

    Args:
        state_dict: torchvision's keys to torch or NumPy arrays.
        model: name of the network.
        output: the file to write; an existing one is replaced.
        source: where the weights come from, kept in the file's metadata.

    Raises:
        CheckpointError: the state dict does not fit the model.
    """
    state = read_state_dict(state_dict)
    num_classes, in_channels = infer_sizes(state)
    table = describe(model, num_classes=num_classes, in_channels=in_channels).tensor_table()
    verify(state, table, model)
    tensors = {key: np.ascontiguousarray(state[key], dtype=np.float32) for key in table}
    content = save(tensors, metadata={"model": model, "source": source})
    output.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=output.parent, prefix=output.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main() -> None:
    """Converts what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a torchvision model, as resnet50")
    parser.add_argument("--weights", default="DEFAULT", help="which of torchvision's weights, as IMAGENET1K_V1")
    parser.add_argument("--output", type=Path, help="the file to write, by default MODEL.safetensors here")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    import torchvision

    output = arguments.output or Path(f"{arguments.model}.safetensors")
    weights = torchvision.models.get_model_weights(arguments.model)[arguments.weights]
    convert(weights.get_state_dict(progress=True, check_hash=True), arguments.model, output, source=weights.url)
    logger.info("%s (%s, %.1f MB)", output, weights, output.stat().st_size / 1e6)


if __name__ == "__main__":
    main()
