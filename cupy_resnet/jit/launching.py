"""Launches, and two ways to make them cheap that CuPy has no call for.

Launches may overlap: a kernel whose source waits (kernels_cu/include/dependent_launch.cuh) can be started before the
one in front of it on the stream has finished, by programmatic dependent launch. Its blocks prepare themselves while
the last blocks of the other still run. Where many short kernels follow each other, as in a captured forward pass at
batch 1, that hides most of what a launch costs the GPU.

Launches may be prepared: one that was recorded is repeated with another array in a place of its arguments, for the
price of the driver's call, by itself or within a captured graph. Choosing a kernel and packing its arguments in Python
costs the host several times as much.
"""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cupy

logger = logging.getLogger(__name__)

STATIC_LIMIT = 32 << 10
"""Bytes of dynamic shared memory that a kernel gets without asking: of 48 KiB what one leaves that has arrays there."""

_thread = threading.local()
_allowing = threading.Lock()


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Has this thread's launches of kernels that can wait overlap with the kernels before them, where the GPU can."""
    before = getattr(_thread, "overlapping", False)
    _thread.overlapping = True
    try:
        yield
    finally:
        _thread.overlapping = before


@contextlib.contextmanager
def allocating_during_capture() -> Iterator[None]:
    """Lets this thread allocate memory while a stream is captured, by torch for instance, in the strictest mode.

    That is safe here: what is allocated is not freed before the graph is.
    """
    driver = _driver()
    if driver is None:
        yield
        return
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


@dataclass(frozen=True, eq=False)
class Launch:
    """What `launch` was called with."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared: int

    def reads(self, address: int) -> bool:
        """Whether the first argument is the array at `address`."""
        return bool(self.arguments) and _address_of(self.arguments[0]) == address

    def place_of(self, address: int) -> int | None:
        """Returns which argument is the array at `address`.

        None if not exactly one is, or if others may hold addresses too, as tensor maps do: all that is passed by value
        must be numbers, or have fields with names.
        """
        values = (argument.dtype for argument in self.arguments if not _is_array(argument))
        plain = (dtype.names or dtype.kind != "V" for dtype in values)
        places = [n for n, argument in enumerate(self.arguments) if _address_of(argument) == address]
        return places[0] if len(places) == 1 and all(plain) else None


def _is_array(argument: Any) -> bool:
    """Whether a kernel is given an address: arguments of NumPy's are passed by value."""
    return not isinstance(argument, np.ndarray | np.generic)


def _address_of(argument: Any) -> int | None:
    """Of an array on the GPU."""
    address: int | None = getattr(argument.data, "ptr", None)
    return address


@dataclass(frozen=True)
class _Address:
    """In the place of a CuPy array, which it does not keep alive: what `Launch` asks it for."""

    ptr: int

    @property
    def data(self) -> "_Address":
        return self


@contextlib.contextmanager
def recording(*, arrays: bool = True) -> Iterator[list[Launch]]:
    """Collects what this thread enqueues with `launch` meanwhile. Copies and kernels of CuPy's own are not seen.

    Args:
        arrays: whether the arrays among the arguments are kept alive; if not, addresses are in their places.
    """
    before = getattr(_thread, "recorder", None)
    recorded: list[Launch] = []

    def record(launch: Launch) -> None:
        given = launch.arguments
        kept = (each if arrays or not _is_array(each) else _Address(each.data.ptr) for each in given)
        recorded.append(replace(launch, arguments=tuple(kept)))

    _thread.recorder = record
    try:
        yield recorded
    finally:
        _thread.recorder = before


class _Parameters:
    """A recorded launch's parameters as the driver takes them; `array` is that in `place`. No array is kept alive."""

    def __init__(self, launch: Launch, place: int = 0) -> None:
        self._values = [_as_bytes(argument) for argument in launch.arguments]
        self._pointers = _pointers_to(self._values)
        self.address = ctypes.addressof(self._pointers)
        self.array = ctypes.c_void_p.from_buffer(self._values[place])


class PreparedLaunch:
    """A launch to be repeated with other arrays in the place of its first argument, by one thread at a time.

    It never overlaps with the kernel before it.

    Args:
        launch: a recorded one, whose first argument is an array. It has run: what its kernel had to be allowed is.
    """

    def __init__(self, launch: Launch) -> None:
        import cupy

        self._parameters = _Parameters(launch)
        self._kept = launch.kernel, launch.arguments[1:]
        self._launch_kernel = cupy.cuda.driver.launchKernel
        self._what = launch.kernel.kernel.ptr, *_three(launch.grid), *_three(launch.block), launch.shared

    def __call__(self, stream: int, address: int) -> None:
        """Enqueues it, while the device that it was recorded on is current.

        Args:
            stream: the handle of one of that device's streams.
            address: of the array that the kernel gets first. It must look to the kernel as the recorded one did.
        """
        self._parameters.array.value = address
        self._launch_kernel(*self._what, stream, self._parameters.address, 0)  # copies the values at once


def graphs_can_be_prepared() -> bool:
    """Whether `PreparedGraph` can look at a graph's kernels: cuda-bindings is installed."""
    return _driver() is not None


class PreparedGraph:
    """A captured graph to be run with another array in the place of a kernel's first argument, and perhaps with another
    one where it leaves its results.

    Args:
        graph: it must stay alive, and so must what its kernels were given.
        reading: recorded during its capture; the first argument is an array that no other kernel of the graph reads.
        writing: the same of the kernel that writes results, and which of its arguments is the array that it writes.

    Raises:
        LookupError: the graph's kernels cannot be looked at (`graphs_can_be_prepared`), or one is not among them.
    """

    def __init__(self, graph: "cupy.cuda.Graph", reading: Launch, writing: tuple[Launch, int] | None = None) -> None:
        if _driver() is None:
            raise LookupError("cuda-bindings is not installed")
        self.graph = graph
        self.input = _GraphArgument(graph, reading, 0)
        self.output = None if writing is None else _GraphArgument(graph, *writing)

    def executable(self) -> "ExecutableGraph":
        """Returns the graph ready to be run, with the arrays that it was captured with; as often as it is called."""
        return ExecutableGraph(self)


class ExecutableGraph:
    """A prepared graph that can be run, by one thread at a time. What it is told, it is told from the next run on.

    Args:
        prepared: the graph.

    Attributes:
        handle: what CUDA runs.
    """

    def __init__(self, prepared: PreparedGraph) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        self._prepared, self._launch, self._destroy = prepared, runtime.graphLaunch, runtime.graphExecDestroy
        self.handle: int = runtime.graphInstantiate(prepared.graph.graph)
        self._executable = _driver().CUgraphExec(self.handle)

    def run(self, stream: int) -> None:
        """Enqueues it on a stream of the device that it was captured on, which is current."""
        self._launch(self.handle, stream)

    def read_from(self, address: int) -> None:
        """Gives it another input. That must look to the kernel as the one during the capture did."""
        self._prepared.input.tell(self._executable, address)

    def write_to(self, address: int) -> None:
        """Has it leave its results elsewhere, if it was prepared for that."""
        assert self._prepared.output is not None, "the graph was prepared to leave results where it was captured to"
        self._prepared.output.tell(self._executable, address)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process there may be no CUDA any more
            self._destroy(self.handle)  # what is under way ends first


class _GraphArgument:
    """An array that a kernel of a graph is given, and may be given another in the place of."""

    def __init__(self, graph: "cupy.cuda.Graph", launch: Launch, place: int) -> None:
        self._driver = _driver()
        self._parameters = _Parameters(launch, place)
        self._node, self._kernel = _find_kernel(graph.graph, launch.kernel.kernel.ptr)
        self._kernel.kernelParams = self._parameters.address

    def tell(self, executable: Any, address: int) -> None:
        """The kernel is given the array at `address` from the next run on."""
        self._parameters.array.value = address
        _check(*self._driver.cuGraphExecKernelNodeSetParams(executable, self._node, self._kernel))


def _find_kernel(graph: int, function: int) -> tuple[Any, Any]:
    """Returns the only node of a graph that runs a function, and its parameters; raises LookupError."""
    driver = _driver()
    status, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph))
    _check(status)
    status, nodes, _ = driver.cuGraphGetNodes(driver.CUgraph(graph), count)
    _check(status)
    found = []
    for node in nodes:
        status, kind = driver.cuGraphNodeGetType(node)
        _check(status)
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            status, parameters = driver.cuGraphKernelNodeGetParams(node)
            _check(status)
            if int(parameters.func) == function:
                found.append((node, parameters))
    if len(found) != 1:
        raise LookupError(f"{len(found)} of the graph's kernels are the one that was launched")
    return found[0]


def _check(status: Any) -> None:
    import cupy

    if status != _driver().CUresult.CUDA_SUCCESS:
        raise cupy.cuda.driver.CUDADriverError(int(status))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    shared: int = 0,
    waits: bool = False,
) -> None:
    """Enqueues a kernel on the current stream of the current device.

    Args:
        kernel: what `get_function` returned.
        grid, block: up to three sizes each.
        arguments: CuPy arrays, NumPy scalars, and one-element structured arrays, which are passed by value.
        shared: bytes of dynamic shared memory.
        waits: whether the kernel waits for earlier ones by itself, so that it may be started early.
    """
    if shared > STATIC_LIMIT:
        _allow(kernel, shared)
    if waits and getattr(_thread, "overlapping", False) and _can_overlap():
        _launch_early(kernel, grid, block, arguments, shared)
    else:
        kernel(grid, block, tuple(arguments), shared_mem=shared)
    record = getattr(_thread, "recorder", None)
    if record is not None:
        record(Launch(kernel, grid, block, tuple(arguments), shared))


def _allow(kernel: Any, shared: int) -> None:
    """Raises what a kernel may have of dynamic shared memory; lowering it would fail launches of other threads."""
    with _allowing:
        if kernel.max_dynamic_shared_size_bytes < shared:
            kernel.max_dynamic_shared_size_bytes = shared


def _can_overlap() -> bool:
    import cupy

    return int(cupy.cuda.Device().compute_capability) >= 90 and _driver() is not None


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        logger.info("cuda-bindings is not installed: kernels do not overlap their launches")
        return None
    return driver


def _launch_early(
    kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared: int
) -> None:
    import cupy

    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
    config.sharedMemBytes = shared
    config.hStream = cupy.cuda.get_current_stream().ptr
    config.attrs = [attribute]
    config.numAttrs = 1
    values = [_as_bytes(argument) for argument in arguments]  # alive until the launch has copied them
    pointers = _pointers_to(values)
    _check(*driver.cuLaunchKernelEx(config, driver.CUfunction(kernel.kernel.ptr), ctypes.addressof(pointers), 0))


def _three(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes, 1, 1)[:3]


def _pointers_to(values: Sequence[ctypes.Array[ctypes.c_char]]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of kernel parameters, as the driver takes them; the values must outlive it."""
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


def _as_bytes(argument: Any) -> ctypes.Array[ctypes.c_char]:
    """The bytes of one kernel parameter."""
    data = (np.uintp(argument.data.ptr) if _is_array(argument) else argument).tobytes()
    return (ctypes.c_char * len(data)).from_buffer_copy(data)
