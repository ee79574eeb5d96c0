"""What a network is made of: layers, shapes, parameters, FLOPs; known without weights."""

import math
from dataclasses import dataclass

from .explanation import explain
from .networks import Conv2d, Linear, Network


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operation of a forward pass.

    Args:
        name: parameter key prefix, empty for an operation without weights.
        op: what it computes, with what is fused behind it.
        output_shape: (N, P, Q, K), or (N, K) once pooled.
        parameters: trainable values, those of a folded BatchNorm included.
        flops: floating-point operations, a multiply-add counted as two.
    """

    name: str
    op: str
    output_shape: tuple[int, ...]
    parameters: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A network on inputs of one shape.

    Args:
        input_shape: (N, C, H, W).
        layers: in the order they run.
        parameters: trainable values of the whole network.
        tensors: tensors in a checkpoint, BatchNorm's running statistics included.
    """

    input_shape: tuple[int, int, int, int]
    layers: tuple[Layer, ...]
    parameters: int
    tensors: int

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward pass of the whole batch."""
        return sum(layer.flops for layer in self.layers)


def summarize(network: Network, shape: tuple[int, int, int, int]) -> Summary:
    """Walks a network's graph with shapes only.

    Args:
        network: as `cupy_resnet.networks.describe` gives it.
        shape: (N, C, H, W) of the input.

    Raises:
        ValueError: a shape that the network cannot run.
    """
    counts = {layer.name: _parameters(layer) for layer in network.layers()}
    steps = explain(network, shape, engine="numpy")
    layers = tuple(
        Layer(
            name=step.layer,
            op=step.op,
            output_shape=step.record.output_shape,
            parameters=counts.get(step.layer, 0),
            flops=step.record.flops,
        )
        for step in steps
    )
    tensors = len(network.tensor_table())
    return Summary(input_shape=shape, layers=layers, parameters=sum(counts.values()), tensors=tensors)


def count_parameters(network: Network) -> int:
    """Returns the number of trainable values: filters, BatchNorms' weights and biases, the classifier."""
    return sum(_parameters(layer) for layer in network.layers())


def _parameters(layer: Conv2d | Linear) -> int:
    running = (".running_mean", ".running_var")
    return sum(math.prod(shape) for key, shape in layer.tensors() if not key.endswith(running))
