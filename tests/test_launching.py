"""jit.launching: how arguments become bytes, when a launch may overlap, how one is repeated; with stand-ins for CuPy
and the driver."""

import ctypes
import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet.jit import launching
from cupy_resnet.jit.launching import (
    STATIC_LIMIT,
    Launch,
    PreparedLaunch,
    launch,
    overlapping,
    recording,
)


class Kernel:
    """What `get_function` returns, as far as a launch looks at it."""

    def __init__(self) -> None:
        self.kernel = SimpleNamespace(ptr=0xF00D)
        self.max_dynamic_shared_size_bytes = 0
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        self.calls.append((grid, block, arguments, shared_mem))


class DriverError(Exception):
    """In the place of CuPy's CUDADriverError."""


class Driver:
    """cuda.bindings.driver: writes down what is launched, and reads the parameters as the driver would."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="serialization")
    CUlaunchConfig = SimpleNamespace
    CUfunction = staticmethod(lambda ptr: ("function", ptr))

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.sizes = sizes
        self.status = 0
        self.launched: list[tuple[Any, Any, list[bytes]]] = []

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(id=None, value=SimpleNamespace())

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[int]:  # noqa: N802
        assert extra == 0
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(params)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, self.sizes, strict=True)]
        self.launched.append((config, function, values))
        return (self.status,)


class GpuArray(SimpleNamespace):
    """A CuPy array, as far as a launch looks at it; unlike its base it can be referred to weakly."""


def gpu_array(address: int) -> Any:
    return GpuArray(data=SimpleNamespace(ptr=address), dtype=np.dtype(np.float32))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CuPy on a Hopper GPU, whose current stream is at 0x57."""
    device = SimpleNamespace(compute_capability="90")
    cuda = SimpleNamespace(
        Device=lambda: device,
        get_current_stream=lambda: SimpleNamespace(ptr=0x57),
        driver=SimpleNamespace(CUDADriverError=DriverError),
    )
    fake = SimpleNamespace(cuda=cuda, device=device)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def driver(cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """cuda-bindings."""
    fake = Driver()
    monkeypatch.setattr(launching, "_driver", lambda: fake)
    return fake


PARAMS = np.zeros(1, np.dtype([("n", np.int32), ("stride", np.int64), ("relu", np.int32)], align=True))
PARAMS[0] = (7, 2**40, 1)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (gpu_array(0x7F0012345678), (0x7F0012345678).to_bytes(8, "little")),
        (np.uintp(0), bytes(8)),  # a null pointer
        (np.int32(-2), (-2).to_bytes(4, "little", signed=True)),
        (np.int64(2**40), (2**40).to_bytes(8, "little")),
        (np.float32(1), bytes.fromhex("0000803f")),
        (PARAMS, bytes([7, 0, 0, 0]) + bytes(4) + (2**40).to_bytes(8, "little") + bytes([1, 0, 0, 0]) + bytes(4)),
    ],
    ids=["array", "null", "int32", "int64", "float32", "structure with padding"],
)
def test_an_argument_is_its_bytes(argument: Any, expected: bytes) -> None:
    value = launching._as_bytes(argument)
    assert bytes(value) == expected
    assert ctypes.sizeof(value) == len(expected)


def test_an_early_launch_says_what_an_ordinary_one_would(driver: Driver) -> None:
    driver.sizes = (8, 4, PARAMS.nbytes)
    kernel = Kernel()
    with overlapping():
        launch(kernel, (5, 3), (256,), (gpu_array(0xABC0), np.int32(9), PARAMS), shared=1024, waits=True)
    assert kernel.calls == []
    ((config, function, values),) = driver.launched
    assert function == ("function", 0xF00D)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (5, 3, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert (config.sharedMemBytes, config.hStream) == (1024, 0x57)
    assert values == [(0xABC0).to_bytes(8, "little"), (9).to_bytes(4, "little"), PARAMS.tobytes()]
    (attribute,) = config.attrs
    assert config.numAttrs == 1
    assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed) == ("serialization", 1)


def test_a_refused_launch_is_cupys_error(driver: Driver) -> None:
    driver.status = 701
    with overlapping(), pytest.raises(DriverError, match="701"):
        launch(Kernel(), (1,), (32,), (), waits=True)


def test_a_kernel_that_does_not_wait_by_itself_is_never_early(driver: Driver) -> None:
    kernel = Kernel()
    with overlapping():
        launch(kernel, (1, 2), (32,), [np.int32(1)], shared=16)
    assert kernel.calls == [((1, 2), (32,), (np.int32(1),), 16)]
    assert driver.launched == []


def test_launches_overlap_only_where_that_was_asked_for(driver: Driver) -> None:
    kernel = Kernel()
    early: list[bool] = []

    def run() -> None:
        before = len(driver.launched)
        launch(kernel, (1,), (32,), (), waits=True)
        early.append(len(driver.launched) > before)

    run()
    with overlapping():
        run()
        with overlapping():
            run()
        run()  # the inner one does not end the outer
        other = threading.Thread(target=run)
        other.start()
        other.join()
    run()
    assert early == [False, True, True, True, False, False]


def test_an_error_inside_ends_it(driver: Driver) -> None:
    with pytest.raises(ZeroDivisionError), overlapping():
        raise ZeroDivisionError
    launch(Kernel(), (1,), (32,), (), waits=True)
    assert driver.launched == []


@pytest.mark.parametrize(("capability", "early"), [("70", 0), ("80", 0), ("89", 0), ("90", 1), ("100", 1), ("120", 1)])
def test_what_the_gpu_can(cupy: SimpleNamespace, driver: Driver, capability: str, early: int) -> None:
    cupy.device.compute_capability = capability
    kernel = Kernel()
    with overlapping():
        launch(kernel, (1,), (32,), (), waits=True)
    assert (len(driver.launched), len(kernel.calls)) == (early, 1 - early)


def test_without_cuda_bindings_launches_are_ordinary_and_it_is_said_once(
    cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    launching._driver.cache_clear()
    kernel = Kernel()
    try:
        with caplog.at_level("INFO"), overlapping():
            launch(kernel, (1,), (32,), (), waits=True)
            launch(kernel, (1,), (32,), (), waits=True)
    finally:
        launching._driver.cache_clear()
    assert len(kernel.calls) == 2
    assert [record.message for record in caplog.records if "cuda-bindings" in record.message] == [
        "cuda-bindings is not installed: kernels do not overlap their launches"
    ]


@pytest.mark.parametrize("early", [False, True])
def test_more_shared_memory_than_usual_is_asked_for_first(driver: Driver, early: bool) -> None:
    modest, greedy = Kernel(), Kernel()
    for kernel, shared in ((modest, STATIC_LIMIT), (greedy, STATIC_LIMIT + 1)):
        if early:
            with overlapping():
                launch(kernel, (1,), (32,), (), shared=shared, waits=True)
        else:
            launch(kernel, (1,), (32,), (), shared=shared, waits=True)
    assert modest.max_dynamic_shared_size_bytes == 0
    assert greedy.max_dynamic_shared_size_bytes == STATIC_LIMIT + 1


def test_a_limit_once_raised_stays_for_other_threads_launches() -> None:
    kernel = Kernel()
    for shared in (STATIC_LIMIT + 200, STATIC_LIMIT + 100):
        launch(kernel, (1,), (32,), (), shared=shared)
        assert kernel.max_dynamic_shared_size_bytes == STATIC_LIMIT + 200


def test_recording_sees_what_this_thread_launches_and_it_is_launched_all_the_same(driver: Driver) -> None:
    kernel = Kernel()
    launch(kernel, (9,), (32,), ())
    with recording() as launches:
        launch(kernel, (5, 3), (256,), [gpu_array(0xABC0), np.int32(1)], shared=16)
        with recording() as inner, overlapping():
            launch(kernel, (2,), (64,), (gpu_array(0xDEF0),), waits=True)
        other = threading.Thread(target=launch, args=(kernel, (8,), (32,), ()))
        other.start()
        other.join()
        launch(kernel, (6,), (32,), ())
    launch(kernel, (7,), (32,), ())
    assert [(one.grid, one.block, one.shared) for one in launches] == [((5, 3), (256,), 16), ((6,), (32,), 0)]
    assert [one.grid for one in inner] == [(2,)]
    assert len(kernel.calls) == 5
    assert len(driver.launched) == 1


def test_a_record_keeps_arrays_alive_or_has_their_addresses() -> None:
    for arrays in (True, False):
        kernel, array = Kernel(), gpu_array(0x1000)
        alive = weakref.ref(array)
        with recording(arrays=arrays) as launches:
            launch(kernel, (1,), (32,), (array, np.int32(7)))
        kernel.calls.clear()
        del array
        gc.collect()
        assert (alive() is not None) == arrays
        (recorded,) = launches
        assert recorded.reads(0x1000)
        assert recorded.place_of(0x1000) == 0
        assert recorded.arguments[1] == 7


def test_a_launch_that_failed_is_not_recorded_and_an_error_ends_the_recording(driver: Driver) -> None:
    driver.status = 701
    with overlapping(), pytest.raises(DriverError), recording() as launches:
        launch(Kernel(), (1,), (32,), (), waits=True)
    launch(Kernel(), (1,), (32,), ())
    assert launches == []


def test_whether_a_launch_reads_an_array() -> None:
    def reads(*arguments: Any) -> bool:
        return Launch(Kernel(), (1,), (32,), arguments, 0).reads(0xABC0)

    assert reads(gpu_array(0xABC0), gpu_array(0xDEF0))
    assert not reads(gpu_array(0xDEF0), gpu_array(0xABC0)), "not what comes first"
    assert not reads(np.uintp(0xABC0))
    assert not reads()


class CupyDriver:
    """cupy.cuda.driver.launchKernel, whose parameters have these sizes in bytes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.launched: list[tuple[tuple[int, ...], list[bytes]]] = []

    def __call__(self, *arguments: int) -> None:
        *what, params, extra = arguments
        assert extra == 0
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(params)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, self.sizes, strict=True)]
        self.launched.append((tuple(what), values))


def test_a_prepared_launch_differs_in_its_first_argument_and_its_stream(cupy: SimpleNamespace) -> None:
    cupy.cuda.driver.launchKernel = driver = CupyDriver(8, 8, 8, 4, PARAMS.nbytes)
    arguments = (gpu_array(0x1000), np.uintp(0), gpu_array(0x7F0012345678), np.int32(-2), PARAMS)
    with recording() as launches:
        launch(Kernel(), (5, 3), (256,), arguments, shared=1024)
    prepared = PreparedLaunch(launches[0])
    del arguments, launches
    gc.collect()
    for stream, address in ((0, 0x1000), (0x57, 0x7FFF87654320), (2, 0x2000)):
        prepared(stream, address)
        what, values = driver.launched.pop()
        assert what == (0xF00D, 5, 3, 1, 256, 1, 1, 1024, stream)
        assert values == [
            address.to_bytes(8, "little"),
            bytes(8),
            (0x7F0012345678).to_bytes(8, "little"),
            (-2).to_bytes(4, "little", signed=True),
            PARAMS.tobytes(),
        ]


def test_a_prepared_launch_keeps_alive_what_it_reads_but_not_the_first_input(cupy: SimpleNamespace) -> None:
    cupy.cuda.driver.launchKernel = CupyDriver()
    first, second = gpu_array(0x1000), gpu_array(0x2000)
    alive = weakref.ref(first), weakref.ref(second)
    prepared = PreparedLaunch(Launch(Kernel(), (1,), (32,), (first, second), 0))
    del first, second
    gc.collect()
    assert [one() is not None for one in alive] == [False, True]
    del prepared
    gc.collect()
    assert alive[1]() is None
