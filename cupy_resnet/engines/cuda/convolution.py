"""The CUDA engine's operations that multiply: convolution, the stem, the classifier."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ... import jit
from ...conv2d import VARIANTS, Conv2dPair, Conv2dProblem, choose, choose_shortcut
from ...conv2d.back_to_back import BackToBackConfig, BackToBackOperands, launch_back_to_back
from ...conv2d.back_to_back import Following as FollowingOperands
from ...conv2d.back_to_back_choice import BackToBackChoice, choose_back_to_back
from ...conv2d.stem_choice import STEM_LAUNCHES, choose_stem
from ...conv2d.variants import NULL, Filter, Operands
from ...conv2d.variants import Shortcut as ShortcutOperands
from .. import checks
from ..base import Following, Fusions, Ops, Pair, Shortcut, back_to_back_by_parts, shortcut_by_parts, stem_by_parts
from ..linear_problem import linear_problem
from . import forms
from .arrays import THREADS
from .device import describe_device
from .layout import Layouts
from .prefetching import Prefetch

if TYPE_CHECKING:
    import cupy


class Convolutions(Layouts):
    """`conv2d`, `conv2d_back_to_back`, `stem`, `linear`."""

    kernel: str
    strict: bool
    spread_nan: bool

    _backwards = False
    """Whether the newest launch took its tiles from the last one on."""

    def _turn(self) -> bool:
        """Returns whether the next launch should take its tiles backwards: the other way than the one before.

        So it reads first what that one has stored last, as far as that is in L2 still. A stem goes forwards.
        """
        self._backwards = not self._backwards
        return self._backwards

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
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
    ) -> "cupy.ndarray":
        x = self._activation("conv2d", "x", x)
        filter = self._filter("conv2d", weight, x)
        with x.device:
            bias = None if bias is None else self._float32("conv2d", "bias", bias, x)
            residual = None if residual is None else self._activation("conv2d", "residual", residual, x)
            geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
            second, arrays = self._shortcut(shortcut, x)
            problem = checks.conv2d(
                x, filter.weight, bias, residual=residual, shortcut=arrays, precision=self.precision, **geometry
            )
            device = describe_device(x.device.id)
            if second is not None and not self._fuses_shortcut(problem, x.device.id):
                two = second.x, second.filter, problem.shortcut_stride
                return shortcut_by_parts(cast(Ops, self), x, filter, bias, two, relu=relu, **geometry)
            choice = choose(problem, device, self.kernel, self.strict, spread_nan=self.spread_nan)
            # Every kernel has read an element of the residual before it writes that of the output, and no other one.
            y = self._output("conv2d", problem.output_shape, residual if overwrite_residual else None)
            if y.size:
                operands = Operands(x, filter, bias, residual, y, relu, second, self._turn())
                VARIANTS[choice.variant].launch(problem, operands, choice.config)
            return y

    def _shortcut(self, shortcut: Shortcut | None, x: Any) -> tuple[ShortcutOperands | None, Any]:
        """Returns a shortcut as kernels and as `checks` take it."""
        if shortcut is None:
            return None, None
        x0, weight0, stride0 = shortcut
        x0 = self._activation("conv2d", "the shortcut's x", x0, x)
        filter = self._filter("conv2d", weight0, x)
        return ShortcutOperands(x0, filter), (x0, filter.weight, stride0)

    def conv2d_back_to_back(
        self,
        x: Any,
        weights: tuple[Any, Any],
        biases: tuple[Any, Any] = (None, None),
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: Any = None,
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
        following: Following | None = None,
    ) -> "tuple[cupy.ndarray, cupy.ndarray | None]":
        geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        op = "conv2d_back_to_back"
        x = self._activation(op, "x", x)
        filters = self._filter(op, weights[0], x), self._filter(op, weights[1], x)
        with x.device:
            first, second = (None if bias is None else self._float32(op, "bias", bias, x) for bias in biases)
            residual = None if residual is None else self._activation(op, "residual", residual, x)
            added, arrays = self._shortcut(shortcut, x)
            third = None
            if following is not None:
                bias = following[1]
                third = self._filter(op, following[0], x), None if bias is None else self._float32(op, "bias", bias, x)
            asked = checks.conv2d_back_to_back(
                x,
                (filters[0].weight, filters[1].weight),
                (first, second),
                residual=residual,
                shortcut=arrays,
                following=None if third is None else (third[0].weight, third[1]),
                precision=self.precision,
                **geometry,
            )
            pair, config = self._fused(asked, x.device.id)
            if config is None:
                of_second = {"residual": residual, "relu": relu, "overwrite_residual": overwrite_residual}
                if added is not None:
                    of_second["shortcut"] = added.x, added.filter, pair.shortcut_stride
                return back_to_back_by_parts(cast(Ops, self), x, filters, (first, second), geometry, **of_second)
            # As in `conv2d`: of the residual too, each element is read before it is overwritten.
            y = self._output(op, pair.output_shape, residual if overwrite_residual else None)
            z, third_operands = None, None
            if third is not None and pair.third is not None:
                z = self._output(op, pair.third.output_shape)
                third_operands = FollowingOperands(*third, True, z)
            biases, relus = (first, second), (True, relu)
            operands = BackToBackOperands(x, filters, biases, residual, y, relus, added, third_operands, self._turn())
            launch_back_to_back(pair, operands, config)
            return y, z

    def _fused(self, asked: Conv2dPair, device_id: int) -> tuple[Conv2dPair, BackToBackConfig | None]:
        """Returns as much of the convolutions as one kernel computes, and how; None: not even two of them."""
        return next(
            (
                (pair, config)
                for pair in dict.fromkeys((asked, asked.without_following()))
                if (config := self._back_to_back_choice(pair, device_id).config) is not None
            ),
            (asked.without_following(), None),
        )

    def _back_to_back_choice(self, pair: Conv2dPair, device_id: int) -> BackToBackChoice:
        if self.kernel != "auto":
            return BackToBackChoice(None, f"{self.kernel} was asked for")
        return choose_back_to_back(pair, describe_device(device_id), spread_nan=self.spread_nan)

    def _fuses_shortcut(self, problem: Conv2dProblem, device_id: int) -> bool:
        return choose_shortcut(problem, describe_device(device_id), self.kernel, spread_nan=self.spread_nan)[0]

    def fusions(self) -> Fusions:
        """Returns which operations are one kernel on the engine's own device, that need not be."""
        return Fusions(
            back_to_back=lambda pair: self._back_to_back_choice(pair, self.device).config is not None,
            shortcut=lambda problem: self._fuses_shortcut(problem, self.device),
        )

    def stem_kernel(self, x_shape: tuple[int, ...], filter_shape: tuple[int, ...]) -> tuple[str | None, str]:
        """Returns the kernel that `stem` runs as, and where it runs as its parts, None and why.

        Args:
            x_shape: (N, H, W, C).
            filter_shape: (K, R, S, C).
        """
        if self.kernel != "auto":
            return None, f"{self.kernel} was asked for"
        return choose_stem(self.arithmetic, x_shape, filter_shape, describe_device(self.device))

    def stem(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: "cupy.ndarray | None" = None,
    ) -> "cupy.ndarray":
        x = self._pixels("stem", x, "(N, H, W, C)")
        filter = self._filter("stem", weight, x)
        shape = checks.stem(x, filter.weight, bias)
        kernel, _ = self.stem_kernel(x.shape, filter.weight.shape)
        if kernel is None:
            return stem_by_parts(cast(Ops, self), x, filter, bias, mean, std, out)
        with x.device:
            bias = self._float32("stem", "bias", bias, x)
            means, stds = self._normalization("stem", x.shape[3], mean, std)
            y = self._output("stem", shape, out)
            self._backwards = False
            if y.size:
                STEM_LAUNCHES[kernel](x, filter, bias, means, stds, y, self.arithmetic)
            return y

    def linear(self, x: Any, weight: Any, bias: Any = None) -> "cupy.ndarray":
        N, C, K = checks.linear(x, weight, bias)
        with x.device:
            x = self._float32("linear", "x", x)
            weight = self._float32("linear", "weight", weight, x)
            bias = None if bias is None else self._float32("linear", "bias", bias, x)
            y = self._cupy.empty((N, K), np.float32)
            if not y.size:
                return y
            problem = linear_problem(N, C, K, self.precision)
            if problem is not None:
                self._linear_as_conv2d(problem, x, weight, bias, y)
                return y
            form = forms.linear(N, C)
            grid = (-(-K // (THREADS // 32)), -(-N // int(form["ROWS"])))
            arguments = (x, weight, NULL if bias is None else bias, y, np.int32(N), np.int32(C), np.int32(K))
            jit.launch(jit.get_function("linear", defines=form), grid, (THREADS,), arguments, waits=True)
            return y

    @staticmethod
    def _linear_as_conv2d(problem: Conv2dProblem, x: Any, weight: Any, bias: Any, y: Any) -> None:
        device = describe_device(x.device.id)
        if device.compute_capability < (8, 0):  # its tensor cores do not know TF32
            problem = replace(problem, precision="fp32")
        choice = choose(problem, device)
        pixels, outputs = x.reshape(problem.input_shape), y.reshape(problem.output_shape)
        operands = Operands(pixels, Filter(weight.reshape(problem.filter_shape)), bias, None, outputs, False)
        VARIANTS[choice.variant].launch(problem, operands, choice.config)

    def prefetch(self, filters: Sequence[Filter]) -> Prefetch:
        """Returns what brings the filters, on the current device, to its L2 cache."""
        return Prefetch([filter.weight for filter in filters])

    def _filter(self, op: str, weight: Any, x: "cupy.ndarray") -> Filter:
        """Returns what `filter` made, or wraps an array that is like it; it must be on the device of `x`."""
        if not isinstance(weight, Filter):
            return Filter(self._activation(op, "weight", weight, x))
        if weight.weight.device != x.device:
            raise ValueError(f"{op}: weight is on GPU {weight.weight.device.id}, x on GPU {x.device.id}")
        return weight
