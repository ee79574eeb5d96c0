"""The ladder's lower half: convolution in fp32 on CUDA cores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit
from . import configs
from .device import Device
from .params import conv2d_params
from .problem import Conv2dProblem
from .variant import NULL, Filter, Operands, Support, Variant, blocks

if TYPE_CHECKING:
    import cupy


class Direct(Variant):
    """conv2d_direct: one thread per output."""

    name = "conv2d_direct"
    sources = ("conv2d_direct",)

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.NoConfig) -> None:
        kernel = jit.get_function("conv2d_direct")
        arguments = (operands.x, operands.filter.weight, *operands.tail(), conv2d_params(problem, operands.relu))
        kernel((blocks(problem.gemm_m * problem.K, 256),), (256,), arguments)


class Shared(Variant):
    """conv2d_shared: input and filter tiles in shared memory."""

    name = "conv2d_shared"
    sources = ("conv2d_shared",)
    TILE = 32

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.NoConfig) -> None:
        kernel = jit.get_function("conv2d_shared")
        grid = (blocks(problem.gemm_m, self.TILE) * blocks(problem.gemm_n, self.TILE), problem.groups)
        arguments = (operands.x, operands.filter.weight, *operands.tail(), conv2d_params(problem, operands.relu))
        kernel(grid, (self.TILE, self.TILE), arguments)


class Im2colSgemm(Variant):
    """im2col, then sgemm. The columns are materialised a slice of rows at a time, to bound the workspace."""

    name = "im2col_sgemm"
    sources = ("im2col", "sgemm")
    TILE_M = TILE_N = 128
    WORKSPACE = 1 << 30
    """Bytes of columns at most, unless a single tile of rows needs more."""

    def configurations(self) -> Sequence[configs.SgemmConfig]:
        return configs.SGEMM

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.SgemmConfig]:
        # For a pointwise problem rows of x are the columns, so that the channels per group decide the alignment.
        aligned = problem.gemm_k % 4 == 0 and (not problem.is_pointwise or problem.C % 4 == 0)
        return configs.SGEMM[:1] if aligned else configs.SGEMM[1:]

    def rows_per_slice(self, problem: Conv2dProblem) -> int:
        """Rows of the im2col matrix that are materialised at once."""
        row_bytes = problem.groups * problem.gemm_k * 4
        return min(problem.gemm_m, max(self.TILE_M, self.WORKSPACE // row_bytes // self.TILE_M * self.TILE_M))

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.SgemmConfig) -> None:
        import cupy

        sgemm = jit.get_function("sgemm", defines=config.defines())
        y = operands.y.reshape(problem.gemm_m, problem.K)
        residual = None if operands.residual is None else operands.residual.reshape(y.shape)
        bias = NULL if operands.bias is None else operands.bias

        def multiply(columns: Any, lda: int, stride: int, row0: int, rows: int) -> None:
            grid = (blocks(rows, self.TILE_M) * blocks(problem.gemm_n, self.TILE_N), problem.groups)
            arguments = (
                columns,
                operands.filter.weight,
                bias,
                NULL if residual is None else residual[row0 : row0 + rows],
                y[row0 : row0 + rows],
                np.int64(lda),
                np.int64(stride),
                np.int32(problem.K),
                np.int32(rows),
                np.int32(problem.gemm_n),
                np.int32(problem.gemm_k),
                np.int32(operands.relu),
            )
            sgemm(grid, (256,), arguments)

        if problem.is_pointwise:
            multiply(operands.x, problem.C, problem.group_channels, 0, problem.gemm_m)
            return
        vector = 4 if problem.group_channels % 4 == 0 else 1
        im2col = jit.get_function("im2col", defines={"VECTOR": vector})
        params = conv2d_params(problem, operands.relu)
        step = self.rows_per_slice(problem)
        columns = cupy.empty(problem.groups * step * problem.gemm_k, cupy.float32)
        for row0 in range(0, problem.gemm_m, step):
            rows = min(step, problem.gemm_m - row0)
            arguments = (operands.x, columns, params, np.int32(row0), np.int32(rows))
            im2col((blocks(rows, 8), problem.groups), (32, 8), arguments)
            multiply(columns, problem.gemm_k, rows * problem.gemm_k, row0, rows)


class ImplicitGemm(Variant):
    """conv2d_implicit_gemm: register tiles, columns never stored."""

    name = "conv2d_implicit_gemm"
    sources = ("conv2d_implicit_gemm",)
    DEPTH_SUMMED_IN_PARTS = 512
    """From this depth on a single sum would lose about twice as much as parts of 128 do, and more the deeper it is."""

    def configurations(self) -> Sequence[configs.ImplicitGemmConfig]:
        return configs.IMPLICIT_GEMM

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.ImplicitGemmConfig]:
        vector = 4 if problem.group_channels % 4 == 0 and problem.gemm_n % 4 == 0 else 1
        in_parts = vector == 4 and problem.gemm_k >= self.DEPTH_SUMMED_IN_PARTS
        return [
            config
            for config in configs.IMPLICIT_GEMM
            if config.vector == vector and (config.sum_slices > 0) == in_parts
        ]

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.ImplicitGemmConfig) -> None:
        kernel = jit.get_function("conv2d_implicit_gemm", defines=config.defines())
        grid = (blocks(problem.gemm_m, config.tile_m) * blocks(problem.gemm_n, config.tile_n), problem.groups)
        arguments = (operands.x, operands.filter.weight, *operands.tail(), conv2d_params(problem, operands.relu))
        kernel(grid, (config.threads,), arguments)


class Winograd(Variant):
    """conv2d_winograd: F(2×2, 3×3), fused."""

    name = "conv2d_winograd"
    sources = ("conv2d_winograd",)
    derives_filter = True
    THREADS = 512

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        if (problem.R, problem.S) != (3, 3):
            return False, f"transforms 3×3 filters, not {problem.R}×{problem.S}"
        if (problem.stride_h, problem.stride_w) != (1, 1):
            return False, f"needs stride 1, not {problem.stride_h}×{problem.stride_w}"
        if (problem.dilation_h, problem.dilation_w) != (1, 1):
            return False, f"needs dilation 1, not {problem.dilation_h}×{problem.dilation_w}"
        if problem.groups != 1:
            return False, f"needs groups 1, not {problem.groups}"
        if device.compute_capability < (8, 0):
            return False, f"needs compute capability 8.0, {device.name} has {device.arch.removeprefix('sm_')}"
        if not self.candidates(problem, device):
            needed = min(config.shared_memory for config in configs.WINOGRAD)
            return (
                False,
                f"needs {needed} bytes of shared memory per block, {device.name} has {device.shared_memory_per_block}",
            )
        return super().supports(problem, device)

    def configurations(self) -> Sequence[configs.WinogradConfig]:
        return configs.WINOGRAD

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.WinogradConfig]:
        return [c for c in configs.WINOGRAD if c.shared_memory <= device.shared_memory_per_block]

    def transformed(self, problem: Conv2dProblem, filter: Filter, config: configs.WinogradConfig) -> "cupy.ndarray":
        """The filter as G g Gᵀ, computed once per filter."""

        def make(weight: "cupy.ndarray") -> "cupy.ndarray":
            import cupy

            k_padded = blocks(problem.K, config.TILE_K) * config.TILE_K
            c_padded = blocks(problem.C, config.chunk) * config.chunk
            out = cupy.empty(16 * k_padded * c_padded, cupy.float32)
            kernel = jit.get_function("conv2d_winograd", "winograd_filter_transform", defines=config.defines())
            arguments = (weight, out, np.int32(problem.K), np.int32(problem.C))
            kernel((blocks(k_padded * c_padded, 256),), (256,), arguments)
            return out

        return filter.derived((self.name, config), make)

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.WinogradConfig) -> None:
        transformed = self.transformed(problem, operands.filter, config)
        kernel = jit.get_function("conv2d_winograd", defines=config.defines())
        tiles = problem.N * blocks(problem.P, 2) * blocks(problem.Q, 2)
        grid = (blocks(tiles, config.TILES) * blocks(problem.K, config.TILE_K),)
        bias, residual, y = operands.tail()
        for first, channels in config.channels_by_launch(problem.C):
            last = first + channels == problem.C
            x, part = operands.x.reshape(-1)[first:], transformed[16 * config.TILE_K * first :]
            params = conv2d_params(problem, operands.relu and last)
            arguments = (x, part, bias, residual, y, np.int32(channels), params)
            jit.launch(kernel, grid, (self.THREADS,), arguments, shared=config.shared_memory)
            bias, residual = NULL, y  # to which the next channels' sums are added
