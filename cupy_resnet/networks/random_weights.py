"""Random weights that behave like trained ones: for tests and benchmarks that need no files."""

import numpy as np

from .layers import Conv2d
from .network import Network


def random_state_dict(network: Network, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a complete float32 state dict for `network`, with non-trivial BatchNorm statistics.

    Filters are drawn so that a unit-variance input has, channel by channel, roughly the running variance stored
    beside it (He et al., "Delving Deep into Rectifiers", 2015, for the gain behind a ReLU); variances spread over a
    factor of sixteen. The last BatchNorm of a residual block has a small weight, as trained networks have, so that
    activations stay of order one at any depth.

    Args:
        network: a description, as `cupy_resnet.networks.describe` gives.
        seed: equal seeds give equal weights.

    Returns:
        Checkpoint key to array, filters as OIHW, in torchvision's order.
    """
    rng = np.random.default_rng(seed)
    last_in_block = set()
    for _, block in network.blocks:
        branch = [conv.name for conv in block.convolutions() if ".downsample." not in conv.name]
        last_in_block.add(branch[-1])
    state: dict[str, np.ndarray] = {}
    for layer in network.layers():
        if not isinstance(layer, Conv2d):
            bound = layer.in_features**-0.5
            state[f"{layer.name}.weight"] = _normal(rng, (layer.out_features, layer.in_features)) * np.float32(bound)
            state[f"{layer.name}.bias"] = _normal(rng, (layer.out_features,)) * np.float32(0.1)
            continue
        K, C, R, S = layer.oihw_shape
        variance = np.exp2(rng.uniform(-2, 2, K)).astype(np.float32)
        gain = 1.0 if layer is network.stem else 2.0
        scale = np.sqrt(variance * np.float32(gain / (C * R * S)))
        state[f"{layer.name}.weight"] = _normal(rng, (K, C, R, S)) * scale[:, None, None, None]
        bn = layer.batch_norm
        if bn is None:
            raise ValueError(f"random_state_dict: {layer.name} has its BatchNorm folded; pass the description")
        low, high = (0.1, 0.3) if layer.name in last_in_block else (0.6, 1.4)
        state[f"{bn.name}.weight"] = rng.uniform(low, high, K).astype(np.float32)
        state[f"{bn.name}.bias"] = _normal(rng, (K,)) * np.float32(0.1)
        state[f"{bn.name}.running_mean"] = _normal(rng, (K,)) * np.float32(0.3) * np.sqrt(variance)
        state[f"{bn.name}.running_var"] = variance
    return state


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)
