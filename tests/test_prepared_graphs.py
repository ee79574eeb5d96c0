"""Graphs whose kernels are told other arrays than they were captured with; with a stand-in for the driver."""

import ctypes
import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_launching import Kernel, cupy, gpu_array

from cupy_resnet.jit import launching
from cupy_resnet.jit.launching import Launch, PreparedGraph

__all__ = ["cupy"]


class GraphDriver:
    """The driver's calls about a graph of three nodes; of the kernels, the second has the function 0xF00D."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=0)
    CUgraph = CUgraphExec = staticmethod(lambda handle: handle)

    def __init__(self, functions: dict[str, int | None]) -> None:
        self.functions = functions  # None for a node that is no kernel
        self.status = 0
        self.told: list[tuple[int, str, Any]] = []

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[int, list[str], int]:  # noqa: N802
        assert graph == 0x6
        return 0, list(self.functions)[:count], len(self.functions)

    def cuGraphNodeGetType(self, node: str) -> tuple[int, int]:  # noqa: N802
        return 0, 1 if self.functions[node] is None else 0

    def cuGraphKernelNodeGetParams(self, node: str) -> tuple[int, Any]:  # noqa: N802
        return 0, SimpleNamespace(func=self.functions[node], kernelParams=0)

    def cuGraphExecKernelNodeSetParams(self, graph: int, node: str, parameters: Any) -> tuple[int]:  # noqa: N802
        pointers = (ctypes.c_void_p * 2).from_address(parameters.kernelParams)
        assert ctypes.string_at(pointers[1], 4) == (7).to_bytes(4, "little")
        self.told.append((graph, node, ctypes.string_at(pointers[0], 8)))
        return (self.status,)


GRAPH = SimpleNamespace(graph=0x6)
READING = Launch(Kernel(), (1,), (32,), (gpu_array(0x1000), np.int32(7)), 0)


def told_graph(cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, **functions: int | None) -> GraphDriver:
    """The graph 0x6, of which executable ones are 0x61, 0x62, and so on."""
    driver = GraphDriver(functions)
    monkeypatch.setattr(launching, "_driver", lambda: driver)

    def note(what: str) -> Any:
        return lambda graph, stream=None: driver.told.append((graph, what, stream))

    numbers = itertools.count(0x61)
    cupy.cuda.runtime = SimpleNamespace(
        graphInstantiate=lambda graph: next(numbers) * (graph == 0x6),
        graphLaunch=note("runs"),
        graphExecDestroy=note("destroyed"),
    )
    return driver


def test_an_executable_graph_tells_the_kernel_its_array_and_runs(cupy: SimpleNamespace, monkeypatch) -> None:
    driver = told_graph(cupy, monkeypatch, copy=None, other=0xBEEF, stem=0xF00D)
    graph = PreparedGraph(GRAPH, READING).executable()
    assert graph.handle == 0x61
    for stream, address in ((0, 0x1000), (0x57, 0x7FFF87654320)):
        graph.read_from(address)
        graph.run(stream)
        assert driver.told == [(0x61, "stem", address.to_bytes(8, "little")), (0x61, "runs", stream)]
        driver.told.clear()


def test_executable_graphs_of_one_are_told_different_arrays(cupy: SimpleNamespace, monkeypatch) -> None:
    driver = told_graph(cupy, monkeypatch, stem=0xF00D)
    prepared = PreparedGraph(GRAPH, READING)
    one, other = prepared.executable(), prepared.executable()
    other.read_from(0x2000)
    one.read_from(0x3000)
    told = [(0x62, "stem", (0x2000).to_bytes(8, "little")), (0x61, "stem", (0x3000).to_bytes(8, "little"))]
    assert driver.told == told
    del one
    gc.collect()
    assert driver.told == [*told, (0x61, "destroyed", None)]
    cupy.cuda.runtime = None  # the end of the process
    del other


def test_a_prepared_graph_keeps_no_array_alive(cupy: SimpleNamespace, monkeypatch) -> None:
    """A plan's next capture uses the same memory, as far as nothing there is referred to."""
    told_graph(cupy, monkeypatch, stem=0xF00D)
    arrays = gpu_array(0x1000), gpu_array(0x2000)
    alive = [weakref.ref(array) for array in arrays]
    launch = Launch(Kernel(), (1,), (32,), arrays, 0)
    graph = PreparedGraph(GRAPH, launch, (launch, 1)).executable()
    del arrays, launch
    gc.collect()
    assert [one() for one in alive] == [None, None]
    del graph


def test_a_graph_that_cannot_be_told_an_array_is_not_prepared(cupy: SimpleNamespace, monkeypatch) -> None:
    for functions in ({"other": 0xBEEF}, {"one": 0xF00D, "two": 0xF00D}):
        told_graph(cupy, monkeypatch, **functions)
        with pytest.raises(LookupError, match="of the graph's kernels"):
            PreparedGraph(GRAPH, READING)
    monkeypatch.setattr(launching, "_driver", lambda: None)
    with pytest.raises(LookupError, match="cuda-bindings is not installed"):
        PreparedGraph(GRAPH, READING)


def test_a_prepared_graph_tells_another_kernel_where_results_go(cupy: SimpleNamespace, monkeypatch) -> None:
    driver = told_graph(cupy, monkeypatch, stem=0xF00D, linear=0xBEEF)
    kernel = Kernel()
    kernel.kernel.ptr = 0xBEEF
    writing = Launch(kernel, (1,), (32,), (gpu_array(0x9000), np.int32(7)), 0)
    graph = PreparedGraph(GRAPH, READING, (writing, 0)).executable()
    graph.write_to(0x5000)
    graph.read_from(0x1000)
    graph.run(0x57)
    assert driver.told == [
        (0x61, "linear", (0x5000).to_bytes(8, "little")),
        (0x61, "stem", (0x1000).to_bytes(8, "little")),
        (0x61, "runs", 0x57),
    ]
    driver.functions["linear too"] = 0xBEEF
    with pytest.raises(LookupError, match="2 of the graph's kernels"):
        PreparedGraph(GRAPH, READING, (writing, 0))


def test_an_arrays_place_is_found_where_nothing_else_may_hold_its_address() -> None:
    def place(*arguments: Any) -> int | None:
        return Launch(Kernel(), (1,), (32,), arguments, 0).place_of(0x2000)

    record = np.zeros(1, [("N", np.int32)])
    assert place(gpu_array(0x1000), np.int32(7), gpu_array(0x2000), record) == 2
    assert place(gpu_array(0x1000), np.int64(0x2000)) is None
    assert place(gpu_array(0x2000), gpu_array(0x2000)) is None
    assert place(gpu_array(0x2000), np.zeros(1, "V128")) is None  # a tensor map


def test_a_graph_that_refuses_an_array_says_so(cupy: SimpleNamespace, monkeypatch) -> None:
    driver = told_graph(cupy, monkeypatch, stem=0xF00D)
    cupy.cuda.driver.CUDADriverError = type("CUDADriverError", (RuntimeError,), {})
    graph = PreparedGraph(GRAPH, READING).executable()
    driver.status = 1
    with pytest.raises(RuntimeError):
        graph.read_from(0x2000)
    assert [what for _, what, _ in driver.told] == ["stem"]
