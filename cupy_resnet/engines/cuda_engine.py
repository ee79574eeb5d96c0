"""The CUDA engine: this project's kernels, on CuPy arrays. Imports CuPy only when an engine is made."""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit
from ..conv2d import VARIANTS, Conv2dProblem, Device, check_kernel, choose
from ..conv2d.variants import NULL, Filter, Operands
from ..errors import EngineUnavailableError
from . import checks
from .base import Pair

if TYPE_CHECKING:
    import cupy

SPECIALISATIONS: dict[str, tuple[dict[str, int | str], ...]] = {
    "max_pool2d": ({"VECTOR": 4}, {"VECTOR": 1}),
    "nchw_to_nhwc": ({"INPUT": "float"}, {"INPUT": "unsigned char"}),
    "normalize": ({"INPUT": "float"}, {"INPUT": "unsigned char"}),
}
"""The forms in which the kernels launched here are compiled, where there is more than one."""

POOL2D_FIELDS = (
    "N", "H", "W", "C", "P", "Q", "R", "S", "stride_h", "stride_w", "pad_h", "pad_w", "count_include_pad",
)  # fmt: skip
POOL2D_DTYPE = np.dtype([(name, np.int32) for name in POOL2D_FIELDS])
"""Mirror of ``Pool2dParams`` in kernels_cu/include/pool2d.cuh."""

THREADS = 256
MAX_BLOCKS = 1 << 20
"""Blocks of a grid-stride kernel at most."""

_problem = lru_cache(maxsize=4096)(checks.conv2d_problem)


@lru_cache(maxsize=64)
def describe_device(device_id: int) -> Device:
    """Asks the driver what the heuristics need to know of a GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        sm_count=properties["multiProcessorCount"],
        shared_memory_per_block=properties["sharedMemPerBlockOptin"],
    )


def cuda_obstacle() -> str | None:
    """Returns None where the CUDA engine can run, else a sentence with the reason and the remedy."""
    if importlib.util.find_spec("cupy") is None:
        return (
            "the CUDA engine needs CuPy, which is not installed: pip install 'cupy-resnet[cuda12]' (or cuda13), "
            "or use engine='numpy'"
        )
    try:
        import cupy
    except Exception as error:  # a broken installation can raise anything
        return f"the CUDA engine needs CuPy, which cannot be imported ({_first_line(error)}); reinstall it"
    try:
        count: Any = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return (
            f"the CUDA engine needs an NVIDIA GPU and its driver, and CuPy finds none that it can use "
            f"({_first_line(error)}); install or update the driver, or use engine='numpy'"
        )
    if count < 1:
        return "the CUDA engine needs an NVIDIA GPU, and CuPy finds none; check CUDA_VISIBLE_DEVICES and nvidia-smi"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class CudaEngine:
    """The operations of `base.Ops` on CuPy arrays.

    Every operation runs on the device of its input and on that device's current stream, whatever the current device
    is, and returns at once; errors of the GPU surface at the next synchronisation.

    Args:
        device: number of the GPU that `asarray` and `filter` put arrays on; the current one by default.
        kernel: ``"auto"`` or the name of a convolution kernel, used wherever it applies.
        strict: raise `UnsupportedProblemError` where it does not apply, instead of falling back.
        allow_winograd: whether ``"auto"`` may choose Winograd; see `conv2d.choose`.

    Raises:
        EngineUnavailableError: CuPy is not installed, or there is no GPU or driver.
        ValueError: unknown kernel.
    """

    name = "cuda"

    def __init__(
        self,
        device: int | None = None,
        *,
        kernel: str = "auto",
        strict: bool = False,
        allow_winograd: bool = False,
    ) -> None:
        check_kernel(kernel)
        obstacle = cuda_obstacle()
        if obstacle:
            raise EngineUnavailableError(obstacle)
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        device = cupy.cuda.runtime.getDevice() if device is None else device
        if not 0 <= device < count:
            raise EngineUnavailableError(f"there is no GPU {device}; this machine has {count}, numbered from 0")
        self._cupy = cupy
        self.device = device
        self.kernel = kernel
        self.strict = strict
        self.allow_winograd = allow_winograd

    def __repr__(self) -> str:
        return f"CudaEngine(device={self.device}, kernel={self.kernel!r}, strict={self.strict})"

    def close(self) -> None:
        """Returns CuPy's cached memory to the GPU: once a model's weights are dropped, nothing of it stays."""
        with self._cupy.cuda.Device(self.device):
            self._cupy.get_default_memory_pool().free_all_blocks()

    # Arrays ----------------------------------------------------------------------------------------------------------

    def asarray(self, x: Any) -> "cupy.ndarray":
        cupy = self._cupy
        if isinstance(x, cupy.ndarray):
            with x.device:
                return self._ready(x.astype(cupy.float32, copy=False))
        with cupy.cuda.Device(self.device):
            array = cupy.asarray(np.ascontiguousarray(x, dtype=np.float32))
            # Weights are used from whatever stream a later caller has, which nothing orders after this copy.
            cupy.cuda.get_current_stream().synchronize()
            return array

    def to_numpy(self, x: "cupy.ndarray") -> np.ndarray:
        with x.device:
            return self._cupy.asnumpy(x)

    def filter(self, weight: Any) -> Filter:
        return Filter(self.asarray(weight))

    def _ready(self, x: "cupy.ndarray") -> "cupy.ndarray":
        """Returns `x` as the kernels need it: C-contiguous, its first element 16-byte aligned; a copy if need be."""
        if x.flags.c_contiguous and x.data.ptr % 16 == 0:
            return x
        return self._cupy.array(x, order="C", copy=True)

    def _operand(self, op: str, name: str, x: Any, like: "cupy.ndarray | None" = None) -> "cupy.ndarray":
        """Checks that `x` is a float32 CuPy array on the device of `like`, and makes it ready for a kernel."""
        cupy = self._cupy
        if not isinstance(x, cupy.ndarray):
            raise TypeError(f"{op}: {name} must be a cupy.ndarray, got {type(x).__name__}; use the engine's asarray()")
        if x.dtype != np.float32:
            raise TypeError(f"{op}: {name} must be float32, got {x.dtype}")
        if like is not None and x.device != like.device:
            raise ValueError(f"{op}: {name} is on GPU {x.device.id}, the input on GPU {like.device.id}")
        return self._ready(x)

    # Layout ----------------------------------------------------------------------------------------------------------

    def nchw_to_nhwc(
        self, x: Any, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> "cupy.ndarray":
        checks.rank("nchw_to_nhwc", "x", x.shape, "(N, C, H, W)")
        N, C, H, W = x.shape
        return self._normalized("nchw_to_nhwc", x, C, (N, H, W, C), mean, std)

    def normalize(self, x: Any, mean: Sequence[float], std: Sequence[float]) -> "cupy.ndarray":
        checks.rank("normalize", "x", x.shape, "(N, H, W, C)")
        return self._normalized("normalize", x, x.shape[3], x.shape, mean, std)

    def _normalized(
        self,
        name: str,
        x: Any,
        C: int,
        shape: tuple[int, ...],
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
    ) -> "cupy.ndarray":
        """Launches one of the two kernels that read pixels of either type."""
        cupy = self._cupy
        vectors = checks.normalization(name, C, mean, std)
        if x.dtype == np.uint8:
            defines = SPECIALISATIONS[name][1]
        elif x.dtype == np.float32:
            defines = SPECIALISATIONS[name][0]
        else:
            raise TypeError(f"{name}: x must be uint8 or float32, got {x.dtype}")
        with x.device:
            x = self._ready(x)
            y = cupy.empty(shape, cupy.float32)
            if not y.size:
                return y
            mean_std = (NULL, NULL) if vectors is None else tuple(cupy.asarray(v) for v in vectors)
            kernel = jit.get_function(name, defines=defines)
            if name == "normalize":
                self._elementwise(kernel, y.size, x, y, *mean_std, np.int64(y.size), np.int32(C))
            else:
                self._transpose(kernel, x.shape[0], C, x.shape[2] * x.shape[3], x, y, *mean_std)
            return y

    def nhwc_to_nchw(self, x: Any) -> "cupy.ndarray":
        checks.rank("nhwc_to_nchw", "x", x.shape, "(N, H, W, C)")
        N, H, W, C = x.shape
        with x.device:
            x = self._operand("nhwc_to_nchw", "x", x)
            y = self._cupy.empty((N, C, H, W), np.float32)
            if y.size:
                self._transpose(jit.get_function("nhwc_to_nchw"), N, H * W, C, x, y)
            return y

    @staticmethod
    def _transpose(kernel: Any, N: int, rows: int, columns: int, *arrays: Any) -> None:
        """Launches a layout kernel, which turns N matrices of rows × columns in tiles of 32 × 32."""
        grid = (min(N * -(-columns // 32), MAX_BLOCKS), min(-(-rows // 32), 65535))
        kernel(grid, (32, 8), (*arrays, np.int32(N), np.int32(rows), np.int32(columns)))

    # Convolution -----------------------------------------------------------------------------------------------------

    def conv2d(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: Any = None,
        relu: bool = False,
    ) -> "cupy.ndarray":
        x = self._operand("conv2d", "x", x)
        filter = weight if isinstance(weight, Filter) else Filter(self._operand("conv2d", "weight", weight, x))
        if filter.weight.device != x.device:
            raise ValueError(f"conv2d: weight is on GPU {filter.weight.device.id}, x on GPU {x.device.id}")
        with x.device:
            bias = None if bias is None else self._operand("conv2d", "bias", bias, x)
            residual = None if residual is None else self._operand("conv2d", "residual", residual, x)
            problem = _problem(
                x.shape,
                filter.weight.shape,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
                residual_shape=None if residual is None else residual.shape,
                bias_shape=None if bias is None else bias.shape,
            )
            device = describe_device(x.device.id)
            choice = choose(problem, device, self.kernel, self.strict, allow_winograd=self.allow_winograd)
            y = self._cupy.empty(problem.output_shape, np.float32)
            if y.size:
                operands = Operands(x, filter, bias, residual, y, relu)
                VARIANTS[choice.variant].launch(problem, operands, choice.config)
            return y

    def launch_conv2d(self, variant: str, config: Any, problem: Conv2dProblem, operands: Operands) -> None:
        """Launches one kernel in one configuration, past the choice: for tests, tuning and the ladder."""
        with operands.x.device:
            VARIANTS[variant].launch(problem, operands, config)

    # Pointwise -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _elementwise(kernel: Any, threads: int, *arguments: Any) -> None:
        kernel((max(1, min(-(-threads // THREADS), MAX_BLOCKS)),), (THREADS,), arguments)

    def batch_norm2d(
        self, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *, eps: float = 1e-5
    ) -> "cupy.ndarray":
        op = "batch_norm2d"
        checks.rank(op, "x", x.shape, "(N, H, W, C)")
        vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        checks.vectors(op, x.shape[3], **{name: v.shape for name, v in vectors.items()})
        with x.device:
            x = self._operand(op, "x", x)
            parameters = [self._operand(op, name, v, x) for name, v in vectors.items()]
            y = self._cupy.empty_like(x)
            if y.size:
                size = (np.int64(y.size), np.int32(x.shape[3]), np.float32(eps))
                self._elementwise(jit.get_function(op), y.size, x, *parameters, y, *size)
            return y

    def relu(self, x: Any) -> "cupy.ndarray":
        return self._pointwise("relu", x)

    def add(self, x: Any, y: Any) -> "cupy.ndarray":
        return self._pointwise("add", x, y)

    def add_relu(self, x: Any, y: Any) -> "cupy.ndarray":
        return self._pointwise("add_relu", x, y)

    def _pointwise(self, op: str, *inputs: Any) -> "cupy.ndarray":
        """Launches a kernel over tensors of one shape, four elements per thread."""
        first = inputs[0]
        for other in inputs[1:]:
            checks.same_shape(op, first.shape, other.shape)
        with first.device:
            arrays = [self._operand(op, name, a, first) for name, a in zip("xy", inputs, strict=False)]
            out = self._cupy.empty(first.shape, np.float32)
            if out.size:
                self._elementwise(jit.get_function(op), -(-out.size // 4), *arrays, out, np.int64(out.size))
            return out

    # Pooling and the head --------------------------------------------------------------------------------------------

    def max_pool2d(self, x: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> "cupy.ndarray":
        vector = 4 if x.ndim == 4 and x.shape[3] % 4 == 0 else 1
        return self._pool("max_pool2d", {"VECTOR": vector}, vector, x, kernel_size, stride, padding, False)

    def avg_pool2d(
        self,
        x: Any,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        count_include_pad: bool = True,
    ) -> "cupy.ndarray":
        return self._pool("avg_pool2d", None, 1, x, kernel_size, stride, padding, count_include_pad)

    def _pool(
        self,
        op: str,
        defines: dict[str, int | str] | None,
        vector: int,
        x: Any,
        kernel_size: Pair,
        stride: Pair | None,
        padding: Pair,
        count_include_pad: bool,
    ) -> "cupy.ndarray":
        window = checks.pool2d(x.shape, kernel_size, stride, padding, op=op)
        N, H, W, C = x.shape
        with x.device:
            x = self._operand(op, "x", x)
            y = self._cupy.empty((N, window.P, window.Q, C), np.float32)
            if y.size:
                sizes = (N, H, W, C, window.P, window.Q, *window.kernel, *window.stride, *window.padding)
                params = np.array([(*sizes, count_include_pad)], POOL2D_DTYPE)
                self._elementwise(jit.get_function(op, defines=defines), y.size // vector, x, y, params)
            return y

    def global_avg_pool2d(self, x: Any) -> "cupy.ndarray":
        checks.global_avg_pool2d(x.shape)
        N, H, W, C = x.shape
        with x.device:
            x = self._operand("global_avg_pool2d", "x", x)
            y = self._cupy.empty((N, C), np.float32)
            if y.size:
                kernel = jit.get_function("global_avg_pool2d")
                kernel((-(-C // 32), min(N, 65535)), (32, 8), (x, y, np.int32(N), np.int32(H * W), np.int32(C)))
            return y

    def linear(self, x: Any, weight: Any, bias: Any = None) -> "cupy.ndarray":
        N, C, K = checks.linear(x.shape, weight.shape, None if bias is None else bias.shape)
        with x.device:
            x = self._operand("linear", "x", x)
            weight = self._operand("linear", "weight", weight, x)
            bias = NULL if bias is None else self._operand("linear", "bias", bias, x)
            y = self._cupy.empty((N, K), np.float32)
            if y.size:
                grid = (-(-K // 8), min(-(-N // 8), 65535))
                sizes = (np.int32(N), np.int32(C), np.int32(K))
                jit.get_function("linear")(grid, (THREADS,), (x, weight, bias, y, *sizes))
            return y

    def softmax(self, x: Any) -> "cupy.ndarray":
        checks.rank("softmax", "x", x.shape, "(N, K)")
        N, K = x.shape
        with x.device:
            x = self._operand("softmax", "x", x)
            y = self._cupy.empty_like(x)
            if y.size:
                kernel = jit.get_function("softmax")
                kernel((min(N, MAX_BLOCKS),), (THREADS,), (x, y, np.int64(N), np.int32(K)))
            return y

    def pad_channels(self, x: Any, before: int, after: int, *, stride: int = 1) -> "cupy.ndarray":
        shape = checks.pad_channels(x.shape, before, after, stride)
        _, H, W, C = x.shape
        with x.device:
            x = self._operand("pad_channels", "x", x)
            y = self._cupy.empty(shape, np.float32)
            if y.size:
                sizes = [np.int32(v) for v in (H, W, C, shape[3], before, stride)]
                self._elementwise(jit.get_function("pad_channels"), y.size, x, y, np.int64(y.size), *sizes)
            return y
