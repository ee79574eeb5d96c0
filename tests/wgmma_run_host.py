"""conv2d_wgmma.cu as a program of the host: its own text, all threads, with data, in bfloat16 or TF32.

C++ plays barriers, accelerator and tensor cores as for conv2d_wgmma_b2b (see `back_to_back_host`).
"""

import re

from back_to_back_machine import HOST as MACHINE
from wgmma_block import FETCH, SCHEDULER
from wgmma_host import IM2COL, HostSource, headers, kernel_text, place, staged_pair

HOST = r"""
#define WARPGROUP_MMA_OF_ALL(...)
enum { FILTERS = FIRST, RESIDUALS = ADDED, SHORTCUT_PIXELS = NEXT_FILTERS, MAPS = NEXT_OUTPUTS };
struct float4 { float x, y, z, w; };
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
float least_kept(bool with_relu) { return with_relu ? 0.0f : -INFINITY; }
void prefetch_box(const TensorMap& map, int, int) { if (map.id != RESIDUALS) fail("this is no residual"); }
template <typename Element> float2 load_pair(const void* source) {
    float values[2];
    memcpy(values, here().memory + shared_address(source), 8);
    return {values[0], values[1]};
}
template <typename Element> void store_pair(void* target, float x, float y) {
    const float values[2] = {x, y};
    for (unsigned at = shared_address(target), i = 0; i < 2; ++i) {
        memcpy(here().memory + at + i * 4, &values[i], 4);
        self().unseen.insert(at + i * 4);
    }
}
// Of a whole warp as well: lane l has rows 2 · (l % 4) and the next of column l / 4.
template <int COUNT> void load_transposed(unsigned (&words)[COUNT], unsigned address) {
    const unsigned* const rows = rows_of_all(address);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < COUNT * 2; ++i) {
        memcpy((char*)words + i * 2, here().memory + rows[i / 2 * 8 + lane % 4 * 2 + i % 2] + lane / 4 * 2, 2);
    }
}
template <int COUNT> void store_transposed(unsigned address, const unsigned (&words)[COUNT]) {
    const unsigned* const rows = rows_of_all(address);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < COUNT * 2; ++i) {
        const unsigned place = rows[i / 2 * 8 + lane % 4 * 2 + i % 2] + lane / 4 * 2;
        memcpy(here().memory + place, (const char*)words + i * 2, 2);
        self().unseen.insert(place);
    }
}
float __shfl_sync(unsigned mask, float value, int from) {
    if (mask != ~0u) fail("some lanes are left out");
    return __uint_as_float(rows_of_all(__float_as_uint(value))[from]);
}
"""

MAIN = (
    r"""
Conv2dParams params, alone;  // alone: the shortcut as a convolution of its own
int with_bias, with_residual, in_place;
std::vector<float> x, weight, bias, residual, shortcut_x, shortcut_weight, y;
std::vector<Word> stored, given;  // y and residual, for what goes to memory right from registers
"""
    + FETCH
    + r"""
void fetch_im2col(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n, int s, int r) {
    if (map.id != PIXELS && map.id != SHORTCUT_PIXELS) fail("these are no pixels");
    if (!self().waited) fail("earlier kernels may not have written the pixels");
    const bool first = map.id == PIXELS;
    const std::vector<float>& input = first ? x : shortcut_x;
    fetch(place, im2col_rows(first ? params : alone, input, TILE_M, c, w, h, n, s, r), barrier, map.id);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int row) {
    const auto box_of = [&](const std::vector<float>& matrix, int count, int end, int columns) {
        fetch(place, filter_rows(matrix, count, row, end, columns, column), barrier, map.id);
    };
    if (map.id == FILTERS) return box_of(weight, TILE_N, params.K, params.gemm_k);
    if (map.id == SHORTCUT_FILTERS) return box_of(shortcut_weight, TILE_N, params.K, alone.C);
    if (map.id != RESIDUALS || !with_residual || !self().waited) fail("this is no residual");
    box_of(in_place ? y : residual, TILE_M, params.gemm_m, params.K);
}
void store_box(const TensorMap& map, unsigned place, int column, int row) {
    if (map.id != OUTPUTS || place % 1024) fail("this is no output");
    stores.push_back({place, map.id, column, row, current});
    ++self().begun;
}
"""
    + SCHEDULER
    + r"""
void carry_out(const Store& box) {
    const Block& block = blocks[0];
    see(box.place, TILE_M * 128, 0);
    for (int i = 0; i < TILE_M && box.row + i < params.gemm_m; ++i) {
        for (int k = 0; k < PER_ROW && box.column + k < params.K; ++k) {
            y[long(box.row + i) * params.K + box.column + k] = value_at(box.place + i * 128 + k * SIZE, block);
        }
    }
}
void call_kernel() {
    ELEMENT* const output = (ELEMENT*)(STAGED ? nullptr : stored.data());
    const ELEMENT* const added = in_place ? output : (const ELEMENT*)given.data();
    KERNEL({PIXELS}, {FILTERS}, {SHORTCUT_PIXELS}, {SHORTCUT_FILTERS}, {RESIDUALS}, {OUTPUTS},
           with_bias ? bias.data() : nullptr, with_residual ? STAGED ? (const ELEMENT*)given.data() : added : nullptr,
           output, params);
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[7];
    if (fread(head, 4, 7, stdin) != 7 || fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), gridDim.x = head[1], with_bias = head[2], with_residual = head[3], in_place = head[4];
    alone = params;
    alone.C = params.shortcut_channels, alone.H = head[5], alone.W = head[6], alone.pad_h = alone.pad_w = 0;
    alone.stride_h = alone.stride_w = params.shortcut_stride;
    const long outputs = long(params.gemm_m) * params.K;
    read(x, long(params.N) * params.H * params.W * params.C), read(weight, long(params.K) * params.gemm_k);
    read(bias, params.K), read(residual, outputs);
    read(shortcut_x, long(params.N) * alone.H * alone.W * alone.C), read(shortcut_weight, long(params.K) * alone.C);
    y = residual;
    if (!in_place) for (float& value : y) value = NAN;
    for (float value : residual) given.push_back(bits_of(value));
    for (float value : y) stored.push_back(bits_of(value));
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) cluster();
    for (long i = 0; !STAGED && i < outputs; ++i) y[i] = __uint_as_float(stored[i]);
    fwrite(y.data(), 4, outputs, stdout);
}
"""
)


def host_source() -> HostSource:
    """The program's text."""
    epilogue, transposed = headers("pair_epilogue.cuh"), headers("transposed_matrices.cuh")
    trade = transposed[transposed.index("// values[i] becomes what was") :]  # what is before, C++ plays
    text = kernel_text("conv2d_wgmma", {"pair_epilogue.cuh": epilogue, "transposed_matrices.cuh": trade})
    text = re.sub(r"asm volatile\(.*?\);", "{}", text)
    assert "asm" not in text
    params = headers("conv2d_params.cuh", "turns.cuh")
    im2col = IM2COL.replace("32", "PER_ROW")  # channels
    before = "\n".join(["#define CLUSTER 1", MACHINE, HOST, params, place(), staged_pair()])
    return HostSource(before, text, "conv2d_wgmma", f"{im2col}\n{MAIN}")
