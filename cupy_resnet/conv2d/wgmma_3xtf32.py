"""conv2d_wgmma_3xtf32: its filter in two parts, and its launch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import jit
from . import configs, tensor_maps
from .device import Device
from .params import conv2d_params
from .problem import Conv2dProblem
from .tensor_core_variants import WgmmaIm2col, multiprocessors
from .tf32_parts import MULTIPLIED, split_tf32
from .variant import Filter, Operands, blocks

if TYPE_CHECKING:
    import cupy


class Wgmma3xTf32(WgmmaIm2col):
    """conv2d_wgmma_3xtf32: conv2d_wgmma with three TF32 products for one of fp32."""

    name = "conv2d_wgmma_3xtf32"
    precisions = ("fp32-tc",)
    sources = ("conv2d_wgmma_3xtf32",)
    derives_filter = True

    def configurations(self) -> Sequence[configs.Wgmma3xTf32Config]:
        return configs.WGMMA_3XTF32

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.Wgmma3xTf32Config]:
        return [config for config in configs.WGMMA_3XTF32 if config.tile_n <= 64 or problem.K > 64]

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.Wgmma3xTf32Config) -> None:
        kernel = jit.get_function(self.name, defines=config.defines())
        residuals = tensor_maps.NONE
        if operands.residual is not None:
            residuals = tensor_maps.matrix_map(problem, operands.residual, problem.K, config.consumer_m, factor=False)
        arguments = (
            tensor_maps.im2col_map(problem, operands.x, config.tile_m),
            tensor_maps.matrix_map(problem, split_filter(operands.filter), problem.gemm_k, config.tile_n),
            residuals,
            tensor_maps.matrix_map(problem, operands.y, problem.K, config.consumer_m, factor=False),
            *operands.tail(),
            conv2d_params(problem, operands.relu),
        )
        grid = (min(blocks(problem.gemm_m, config.tile_m) * blocks(problem.K, config.tile_n), multiprocessors()),)
        jit.launch(kernel, grid, (config.threads,), arguments, shared=config.shared_memory, waits=True)


def split_filter(filter: Filter) -> "cupy.ndarray":
    """Returns the filter's high parts and below them its low parts, (2, K, R, S, C), made once per filter.

    Tensor cores do not look at the last 13 bits of either; in the low parts too they are 0, for the sake of energy.
    """

    def make(weight: "cupy.ndarray") -> "cupy.ndarray":
        import cupy

        parts = cupy.empty((2, *weight.shape), cupy.float32)
        parts[0], parts[1] = split_tf32(weight)
        bits = parts.view(np.uint32)
        bits &= MULTIPLIED
        return parts

    return filter.derived("3xtf32", make)
