"""A network in torch, with nothing of this package's arithmetic in it.

Where torchvision has the network, it is torchvision's own module, and its values are taken with hooks: the graph is
verified as well. It has none of the CIFAR family; there `TorchOps` runs the network's description with torch's
functions. torch is imported here only, when a reference is made.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...binding import DEFAULT_EPS, bind
from ...engines.base import Ops, Pair
from ...networks import Network

if TYPE_CHECKING:
    from .references import Reference

_INSTALL = "pip install 'cupy-resnet[torch]'"


def torch_reference(
    network: Network,
    state: Mapping[str, np.ndarray],
    batch_norm_eps: float | Mapping[str, float] | None = None,
    *,
    device: str = "cpu",
) -> "Reference":
    """Returns a network in torch: eval mode, float32, TF32 off.

    Args:
        network: a description.
        state: its state dict.
        batch_norm_eps: as in `cupy_resnet.binding.bind`; None for torch's default.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ImportError: torch, or for the ImageNet family torchvision, is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"the reference torch is not installed: {_INSTALL}") from error
    if not network.stem_max_pool:
        return _Described(torch, network, state, batch_norm_eps, device)
    try:
        import torchvision
    except ImportError as error:
        raise ImportError(f"{network.name} in torch needs torchvision, which is not installed: {_INSTALL}") from error
    return _Torchvision(torch, torchvision, network, state, batch_norm_eps, device)


class _Described:
    """A network's own description, run by torch."""

    def __init__(
        self,
        torch: Any,
        network: Network,
        state: Mapping[str, np.ndarray],
        eps: float | Mapping[str, float] | None,
        device: str,
    ) -> None:
        self.name = f"torch {torch.__version__}'s functions on {_place(torch, device)}, float32"
        self._torch = torch
        self._ops = TorchOps(torch, device)
        self._network = bind(
            network, state, cast(Ops, self._ops), fuse=False, batch_norm_eps=DEFAULT_EPS if eps is None else eps
        )

    def checkpoints(self, x: np.ndarray) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        self._run(x, lambda name, value: values.update({name: value.cpu().numpy()}))
        return values

    def logits(self, x: np.ndarray) -> np.ndarray:
        logits: np.ndarray = self._run(x, None)[0].cpu().numpy()
        return logits

    def _run(self, x: np.ndarray, keep: Any) -> tuple[Any, Any]:
        with _exactly(self._torch):
            return self._network(cast(Ops, self._ops), self._ops.asarray(x), keep)


class _Torchvision:
    """torchvision's network with these weights."""

    def __init__(
        self,
        torch: Any,
        torchvision: Any,
        network: Network,
        state: Mapping[str, np.ndarray],
        eps: float | Mapping[str, float] | None,
        device: str,
    ) -> None:
        self.name = f"torchvision {torchvision.__version__} on {_place(torch, device)}, float32"
        self._torch, self._device = torch, device
        with torch.device("meta"):  # its own initialisation takes seconds, and is overwritten at once
            module = torchvision.models.get_model(network.name, weights=None, num_classes=network.num_classes)
            if network.in_channels != 3:
                module.conv1 = torch.nn.Conv2d(network.in_channels, 64, 7, 2, 3, bias=False)
        module.to_empty(device="cpu")
        tensors = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in state.items()}
        counters = {name: torch.tensor(0) for name in module.state_dict() if name.endswith("num_batches_tracked")}
        module.load_state_dict(tensors | counters)
        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                own = eps.get(name) if isinstance(eps, Mapping) else eps
                layer.eps = DEFAULT_EPS if own is None else own
        self._module = module.to(device).eval()
        self._points = {"stem": "maxpool", **{name: name for name, _ in network.blocks}, "gap": "avgpool"}
        self._points["logits"] = "fc"

    def checkpoints(self, x: np.ndarray) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}

        def keep(name: str) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                values[name] = (output.flatten(1) if name == "gap" else output).cpu().numpy()

            return hook

        modules = dict(self._module.named_modules())
        with contextlib.ExitStack() as hooks:
            for name, module in self._points.items():
                hooks.callback(modules[module].register_forward_hook(keep(name)).remove)
            self.logits(x)
        return values

    def logits(self, x: np.ndarray) -> np.ndarray:
        with _exactly(self._torch):
            logits: np.ndarray = self._module(_tensor(self._torch, x, self._device)).cpu().numpy()
        return logits


class TorchOps:
    """The operations of `cupy_resnet.engines.base.Ops` that networks use, in torch.

    Activations are torch's own (N, C, H, W) throughout, filters OIHW: a network's graph does not look at the layout.

    Args:
        torch: the module.
        device: where tensors lie.
    """

    name = "torch"
    precision = "fp32"

    def __init__(self, torch: Any, device: str = "cpu") -> None:
        self._torch, self._device = torch, device
        self._functional = torch.nn.functional

    def asarray(self, x: Any) -> Any:
        """Returns a NumPy array as a float32 tensor."""
        return _tensor(self._torch, x, self._device)

    def filter(self, weight: Any) -> Any:
        """Returns a KRSC array as an OIHW tensor."""
        return self.asarray(weight).permute(0, 3, 1, 2).contiguous()

    def pixels(self, x: Any, mean: Any = None, std: Any = None, *, out: Any = None) -> Any:
        """Returns normalised pixels as they are, (N, C, H, W) like activations."""
        return x

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
    ) -> Any:
        """``relu(conv(x, weight) + bias + residual)``: (N, C, H, W) to (N, K, P, Q)."""
        y = self._functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
        y = y if residual is None else y + residual
        return self._functional.relu(y) if relu else y

    def batch_norm2d(
        self, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *, eps: float = 1e-5
    ) -> Any:
        """Inference BatchNorm over the channels of (N, C, H, W)."""
        return self._functional.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)

    def relu(self, x: Any) -> Any:
        """``max(x, 0)``."""
        return self._functional.relu(x)

    def add(self, x: Any, y: Any) -> Any:
        """``x + y``."""
        return x + y

    def max_pool2d(self, x: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Any:
        """The window's maximum, (N, C, H, W) to (N, C, P, Q)."""
        return self._functional.max_pool2d(x, kernel_size, stride, padding)

    def global_avg_pool2d(self, x: Any) -> Any:
        """(N, C, H, W) to (N, C)."""
        return self._functional.adaptive_avg_pool2d(x, 1).flatten(1)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """(N, C), (K, C) to (N, K)."""
        return self._functional.linear(x, weight, bias)

    def pad_channels(self, x: Any, before: int, after: int, *, stride: int = 1) -> Any:
        """(N, C, H, W) to (N, before + C + after, ceil(H/stride), ceil(W/stride)), zeros around C."""
        return self._functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, before, after))


def cuda_is_available() -> bool:
    """Returns whether torch is installed and can use a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _tensor(torch: Any, x: np.ndarray, device: str) -> Any:
    return torch.from_numpy(np.array(x, np.float32, order="C")).to(device)


def _place(torch: Any, device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


@contextlib.contextmanager
def _exactly(torch: Any) -> Iterator[None]:
    """Computes without gradients, and in float32 where float32 is written, whatever the process had chosen."""
    cudnn = torch.backends.cudnn
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with torch.inference_mode(), cudnn.flags(enabled=cudnn.enabled, benchmark=False, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
