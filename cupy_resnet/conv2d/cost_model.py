"""What a configuration is expected to cost, from the shape alone. Needs no measurement, imports no CuPy."""

from . import configs
from .back_to_back import BackToBackConfig
from .device import Device
from .problem import Conv2dPair, Conv2dProblem
from .tensor_core_variants import as_merged, shared_memory
from .wgmma_patch import patch_tile

IMPLICIT_GEMM_EFFICIENCY = {
    (128, 256, 4): 1.04,
    (256, 128, 4): 1.0,
    (128, 128, 4): 0.97,
    (64, 128, 4): 0.96,
    (128, 64, 4): 0.925,
    (64, 64, 4): 0.925,
    (64, 32, 4): 0.71,
    (128, 64, 1): 0.56,
    (64, 64, 1): 0.61,
    (64, 32, 1): 0.46,
}
"""Rate of a full wave per (tile_m, tile_n, vector), relative to 41.9 TFLOP/s. Measured on an H100, N = 256: for 16-byte
loads on 14²×256 → 256, 3×3; for 4-byte loads on 224²×3 → 64, 7×7, stride 2. Forms that sum a large depth in parts are
taken to be as fast."""

PROLOGUE_AND_EPILOGUE = 16, 28
"""Fixed work of a block of conv2d_implicit_gemm, in steps of depth: where other blocks of the multiprocessor overlap
it, and where it has the multiprocessor to itself; from 56²×64 → 256, 1×1, N = 64 on an H100."""

WINOGRAD_EFFICIENCY = 0.70
WINOGRAD_OVERHEAD = 16
"""Rate of Winograd's multiplications on the same scale, and its fixed work per block in channels; from 56²×64 and
14²×256, N = 256 on an H100."""


def cost(problem: Conv2dProblem, device: Device, config: configs.Config) -> float:
    """Predicted time of a configuration.

    On CUDA cores: multiply-adds of the busiest multiprocessor over the rate it reaches, in an arbitrary unit that is
    the same for conv2d_implicit_gemm and conv2d_winograd. Blocks are dealt out evenly, and the last round counts whole,
    since its blocks take as long as any other's. On tensor cores: microseconds. Kernels with nothing to choose cost 0.
    """
    if isinstance(config, configs.MmaConfig | configs.WmmaConfig):
        return _tensor_core_microseconds(problem, device, config)
    if isinstance(config, configs.WgmmaConfig):
        return _wgmma_microseconds(problem, device, config)
    if isinstance(config, configs.WgmmaPatchConfig):
        return _wgmma_patch_microseconds(problem, device, config)
    if isinstance(config, configs.Wgmma3xTf32Config):
        return _wgmma_3xtf32_microseconds(problem, device, config)
    if isinstance(config, configs.WinogradConfig):
        tiles = problem.N * _ceil(problem.P, 2) * _ceil(problem.Q, 2)
        blocks = _ceil(tiles, config.TILES) * _ceil(problem.K, config.TILE_K)
        launches = len(config.channels_by_launch(problem.C))
        channels = _ceil(problem.C, config.chunk) * config.chunk + launches * WINOGRAD_OVERHEAD
        work = 16 * config.TILES * config.TILE_K * channels
        return _ceil(blocks, device.sm_count) * work / WINOGRAD_EFFICIENCY
    if isinstance(config, configs.ImplicitGemmConfig):
        work = config.tile_m * config.tile_n * (problem.gemm_k + PROLOGUE_AND_EPILOGUE[config.min_blocks == 1])
        rate = IMPLICIT_GEMM_EFFICIENCY[config.tile_m, config.tile_n, config.vector]
        return _ceil(implicit_gemm_tiles(problem, config), device.sm_count) * work / rate
    return 0.0


PEAK_TFLOPS = {"fp16": 600.0, "bf16": 600.0, "tf32": 300.0, "fp32-tc": 100.0}
"""What mma.sync reaches at best on an H100, by the direct convolution's operations; other GPUs scale all alike."""

BANDWIDTH = 3.0e6
"""Bytes per microsecond that an H100 copies, read and written."""

MMA_SHARE_OF_BANDWIDTH = 0.65
"""That kernels without the tensor memory accelerator reach on layers bound by memory, as 1×1 from 64 to 256 at 56²."""

STEP_MICROSECONDS = 0.25
"""A block's time per slice when it has its multiprocessor to itself: latencies that nothing hides."""

LAUNCH_MICROSECONDS = 2.0
REDUCE_BYTES_PER_MICROSECOND = 1.5e5
"""At which a single block adds up the partial sums of split-K."""

CLUSTER_MICROSECONDS = 0.5
CLUSTER_BYTES_PER_MICROSECOND = 5.0e4
"""For the barrier of split-K in a cluster, and at which a block passes on its partial sums: guesses."""


def _tensor_core_microseconds(
    problem: Conv2dProblem, device: Device, config: configs.MmaConfig | configs.WmmaConfig
) -> float:
    """The slower of arithmetic and memory, plus what nothing overlaps."""
    merged = as_merged(problem, config.merged_groups) if isinstance(config, configs.MmaConfig) else problem
    slices = config.split_k_slices if isinstance(config, configs.MmaConfig) else 1
    blocks = _ceil(merged.gemm_m, config.tile_m) * _ceil(merged.gemm_n, config.tile_n) * merged.groups * slices
    resident = config.min_blocks
    if isinstance(config, configs.MmaConfig):
        resident = min(resident, (device.shared_memory_per_block + 1024) // (shared_memory(merged, config) + 1024))
    steps = _ceil(_ceil(merged.gemm_k, config.tile_k), slices)
    operations = 2 * config.tile_m * config.tile_n * config.tile_k
    per_step = operations / (PEAK_TFLOPS[problem.precision] * 1e6 / 132 * _efficiency(problem, config))
    rounds, last = divmod(_ceil(blocks, device.sm_count), resident)
    arithmetic = rounds * max(resident * per_step, STEP_MICROSECONDS) * steps
    if last:
        arithmetic += max(last * per_step, STEP_MICROSECONDS) * steps
    reduce = 0.0
    if isinstance(config, configs.MmaConfig) and config.cluster:
        reduce = CLUSTER_MICROSECONDS + config.tile_m * config.tile_n * 4 / CLUSTER_BYTES_PER_MICROSECOND
    elif slices > 1:
        partial = slices * config.tile_m * config.tile_n * 4  # bytes of a tile's partial sums, written and read again
        reduce = 1.0 + partial / REDUCE_BYTES_PER_MICROSECOND + 2 * partial * (blocks // slices) / BANDWIDTH
    return max(arithmetic, _bytes(problem) / (MMA_SHARE_OF_BANDWIDTH * BANDWIDTH)) + reduce + LAUNCH_MICROSECONDS


WGMMA_SHARED_BYTES_PER_MICROSECOND = 2.0e5
WGMMA_TILE_MICROSECONDS = 1.0
"""What shared memory takes and gives, 128 bytes per clock at most, and for a tile beside its slices; from ResNet's 3×3
layers, N = 256 on an H200.
"""


def _wgmma_slice_microseconds(config: configs.WgmmaConfig) -> float:
    """Shared memory bounds a slice: what comes to it, and what each instruction, of 64 rows, asks of it."""
    rows, columns = (config.tile_n, config.tile_m) if config.transposed else (config.tile_m, config.tile_n)
    asked = rows / 64 * (64 + columns)
    return (config.tile_m + config.tile_n + asked) * config.ROW_BYTES / WGMMA_SHARED_BYTES_PER_MICROSECOND


def _wgmma_microseconds(problem: Conv2dProblem, device: Device, config: configs.WgmmaConfig) -> float:
    """The slower of arithmetic and memory: a multiprocessor takes tiles in turn, each the slices of its whole depth."""
    if config.cluster:
        return _wgmma_split_k_microseconds(problem, device, config)
    tiles = _ceil(problem.gemm_m, config.tile_m) * _ceil(problem.gemm_n, config.tile_n)
    slices = _ceil(problem.depth, config.tile_k)
    per_tile = slices * _wgmma_slice_microseconds(config) + WGMMA_TILE_MICROSECONDS
    arithmetic = _ceil(tiles, device.sm_count) * per_tile
    return max(arithmetic, _bytes(problem) / BANDWIDTH) + LAUNCH_MICROSECONDS


WGMMA_SPLIT_K_MICROSECONDS = 1.5
WGMMA_SPLIT_K_SHARE = 0.8
"""For a block beside its slices, and how long it takes for a slice relative to conv2d_wgmma, since two consumers work
on them: guesses."""


def _wgmma_split_k_microseconds(problem: Conv2dProblem, device: Device, config: configs.WgmmaConfig) -> float:
    """As above, but for a block's share of the depth; a second block on a multiprocessor takes as long again."""
    tiles = _ceil(problem.gemm_m, config.tile_m) * _ceil(problem.gemm_n, config.tile_n)
    per_slice = WGMMA_SPLIT_K_SHARE * _wgmma_slice_microseconds(config)
    slices = _ceil(_ceil(problem.depth, config.tile_k), config.split_k_slices)
    sums = config.CONSUMERS * 64 * config.tile_n * 4 / CLUSTER_BYTES_PER_MICROSECOND
    per_block = slices * per_slice + WGMMA_SPLIT_K_MICROSECONDS + sums
    arithmetic = _ceil(tiles * config.split_k_slices, device.sm_count) * per_block
    return max(arithmetic, _bytes(problem) / BANDWIDTH) + LAUNCH_MICROSECONDS


WGMMA_PATCH_SLICE_MICROSECONDS = 0.33
WGMMA_PATCH_CHUNK_MICROSECONDS = 1.15
"""For 64 filters, 256 pixels and 128 bytes of channels: the products of one tap, and at least that for all taps
together, since the next patch has to come meanwhile; from ResNet's layers in fp16, N = 256 on an H200."""


def _wgmma_patch_microseconds(problem: Conv2dProblem, device: Device, config: configs.WgmmaPatchConfig) -> float:
    if config.cluster:
        return _wgmma_patch_split_k_microseconds(problem, device, config)
    tile = patch_tile(problem, config.pixels, device.shared_memory_per_block)
    assert tile is not None, "not one of the candidates"
    tiles = tile.pixel_tiles * _ceil(problem.K, config.FILTERS)
    per_chunk = max(problem.R * problem.S * WGMMA_PATCH_SLICE_MICROSECONDS, WGMMA_PATCH_CHUNK_MICROSECONDS)
    per_tile = _ceil(problem.C, config.channels) * per_chunk * max(0.3, config.pixels / 256) + WGMMA_TILE_MICROSECONDS
    return max(_ceil(tiles, device.sm_count) * per_tile, _bytes(problem) / BANDWIDTH) + LAUNCH_MICROSECONDS


WGMMA_PATCH_SPLIT_K_MICROSECONDS = 2.5
"""For a block beside its slices of channels: until the first has come, and until all parts are added up."""

INGRESS_BYTES_PER_MICROSECOND = 1.1e5
"""What L2 of an H100 delivers to a multiprocessor: 64 bytes a clock."""


def _wgmma_patch_split_k_microseconds(
    problem: Conv2dProblem, device: Device, config: configs.WgmmaPatchConfig
) -> float:
    """A block's slices of channels, each the slower of fetches and products."""
    tile = patch_tile(problem, config.pixels, device.shared_memory_per_block, config.split_k_slices)
    assert tile is not None, "not one of the candidates"
    taps = problem.R * problem.S
    fetches = (tile.box_bytes + taps * config.FILTERS * config.ROW_BYTES) / INGRESS_BYTES_PER_MICROSECOND
    products = taps * WGMMA_PATCH_SLICE_MICROSECONDS * max(0.3, config.pixels / 256)
    chunks = _ceil(_ceil(problem.C, config.channels), config.split_k_slices)
    arithmetic = chunks * max(fetches, products) + WGMMA_PATCH_SPLIT_K_MICROSECONDS
    return max(arithmetic, _bytes(problem) / BANDWIDTH) + LAUNCH_MICROSECONDS


WGMMA_3XTF32_SLICE_MICROSECONDS = 1.1
WGMMA_3XTF32_TILE_MICROSECONDS = 1.5
"""For a slice of 128×128×32, and for a tile beside its slices, which nothing overlaps; from ResNet's 3×3 layers,
N = 256 and 32 on an H200."""


def _wgmma_3xtf32_microseconds(problem: Conv2dProblem, device: Device, config: configs.Wgmma3xTf32Config) -> float:
    tiles = _ceil(problem.gemm_m, config.tile_m) * _ceil(problem.K, config.tile_n)
    share = config.tile_m * config.tile_n / (128 * 128)
    per_slice = WGMMA_3XTF32_SLICE_MICROSECONDS * share**0.7
    per_tile = _ceil(problem.gemm_k, config.tile_k) * per_slice + WGMMA_3XTF32_TILE_MICROSECONDS * share
    return max(_ceil(tiles, device.sm_count) * per_tile, _bytes(problem) / BANDWIDTH) + LAUNCH_MICROSECONDS


BACK_TO_BACK_TFLOPS = 610.0
BACK_TO_BACK_PRODUCT_MICROSECONDS = 1.3
BACK_TO_BACK_BANDWIDTH = 3.4e6
"""The rate of a tile's products on all multiprocessors of an H100 or H200, what begins each product of a tile beside
that, and bytes per microsecond; from the ends of ResNet-50's bottlenecks with a residual, N = 8 to 256 on an H200. That
a shortcut is no more than depth of the second product, a third product like the first two, and TF32 half as fast, are
guesses."""


def back_to_back_microseconds(pair: Conv2dPair, device: Device, config: BackToBackConfig) -> float:
    """The slower of arithmetic and memory for one kernel that computes all of `pair`.

    A tile of pixels goes through all products on one multiprocessor. A small tile is as fast by the operation: both
    wait for filters as long. What begins a product takes longer where a third consumer waits for the tensor cores.
    """
    pixels = pair.first.gemm_m
    operations = pair.flops / max(pixels, 1) * config.tile_m / config.cluster_size
    rate = BACK_TO_BACK_TFLOPS * 1e6 * 2 / pair.first.arithmetic.element_size
    begin = BACK_TO_BACK_PRODUCT_MICROSECONDS * max(2, config.consumers) / 2
    per_tile = operations * 132 / rate + len(pair.parts) * begin
    residual = 0 if pair.shortcut_channels else pixels * pair.K * pair.first.arithmetic.element_size
    memory = (pair.bytes + residual) / BACK_TO_BACK_BANDWIDTH
    at_a_time = device.sm_count // config.cluster_size
    return max(_ceil(_ceil(pixels, config.tile_m), at_a_time) * per_tile, memory) + LAUNCH_MICROSECONDS


def _efficiency(problem: Conv2dProblem, config: configs.MmaConfig | configs.WmmaConfig) -> float:
    """Share of the peak of a multiprocessor full of such blocks: operands are loaded less often for a larger tile."""
    shared_by_taps = isinstance(config, configs.MmaPatchConfig) and problem.R * problem.S > 1
    fetched = 1 / config.tile_n + (1 / 4 if shared_by_taps else 1) / config.tile_m
    reuse = 1 / (1 + 24 * fetched)
    return reuse * (1.0 if config.aligned else 0.15) * (1.0 if isinstance(config, configs.MmaConfig) else 0.6)


def implicit_gemm_tiles(problem: Conv2dProblem, config: configs.ImplicitGemmConfig) -> int:
    return _ceil(problem.gemm_m, config.tile_m) * _ceil(problem.gemm_n, config.tile_n) * problem.groups


def _bytes(problem: Conv2dProblem) -> int:
    """As ``problem.bytes``, without the rows and columns that a filter smaller than its stride steps over."""
    read = min(problem.H, problem.P * problem.R) * min(problem.W, problem.Q * problem.S)
    skipped = problem.N * (problem.H * problem.W - read) * problem.C
    return problem.bytes - problem.arithmetic.element_size * skipped


def _ceil(size: int, step: int) -> int:
    return -(-size // step)
