"""The C++ behind conv2d_wgmma_b2b's text: reads a problem, and runs its blocks on what `back_to_back_machine` plays."""

from wgmma_block import FETCH, SCHEDULER

MAIN = (
    r"""
constexpr int MAPS = NEXT_OUTPUTS + 1;
Conv2dParams first, second, shortcut_alone;
int with_biases, in_place, next_relu;
std::vector<float> x, x0, first_filter, second_filter, shortcut_filter, next_filter, first_bias, second_bias, next_bias;
std::vector<float> residual, y, z;

"""
    + FETCH
    + r"""
void fetch_im2col(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n, int s, int r) {
    const bool of_shortcut = SHORTCUT > 0 && map.id == ADDED;
    if (map.id != PIXELS && !of_shortcut) fail("these are no pixels");
    if (!self().waited) fail("earlier kernels may not have written the pixels");
    const std::vector<float>& input = of_shortcut ? x0 : x;
    fetch(place, im2col_rows(of_shortcut ? shortcut_alone : first, input, TILE_M, c, w, h, n, s, r), barrier, map.id);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int row) {
    const auto box_of = [&](const std::vector<float>& matrix, int count, int end, int columns) {
        fetch(place, filter_rows(matrix, count, row, end, columns, column), barrier, map.id);
    };
    if (map.id == FIRST) return box_of(first_filter, MIDDLE, first.K, first.gemm_k);
    if (map.id == SECOND) return box_of(second_filter, COLUMNS, second.K, first.K);
    if (map.id == SHORTCUT_FILTERS) return box_of(shortcut_filter, COLUMNS, second.K, SHORTCUT);
    if (map.id == NEXT_FILTERS) return box_of(next_filter, MIDDLE, NEXT, second.K);
    if (map.id != ADDED || SHORTCUT > 0 || !self().waited) fail("earlier kernels may not have written the residual");
    box_of(in_place ? y : residual, TILE_M, second.gemm_m, second.K);
}
void store_box(const TensorMap& map, unsigned place, int column, int row) {
    if ((map.id != OUTPUTS && map.id != NEXT_OUTPUTS) || place % 1024) fail("this is no output");
    stores.push_back({place, map.id, column, row, current});
    ++self().begun;
}
"""
    + SCHEDULER
    + r"""
void carry_out(const Store& box) {
    const Block& block = blocks[routines[box.thread].block];
    see(box.place, 64 * 128, routines[box.thread].block);
    std::vector<float>& output = box.map == OUTPUTS ? y : z;
    for (int i = 0; i < 64 && box.row + i < second.gemm_m; ++i) {
        float* const row = &output[long(box.row + i) * (box.map == OUTPUTS ? second.K : NEXT) + box.column];
        for (int k = 0; k < PER_ROW; ++k) row[k] = value_at(box.place + i * 128 + k * SIZE, block);
    }
}
void call_kernel() {
    KERNEL({PIXELS}, {FIRST}, {SECOND}, {ADDED}, {SHORTCUT_FILTERS}, {OUTPUTS}, {NEXT_FILTERS}, {NEXT_OUTPUTS},
           with_biases ? first_bias.data() : nullptr, with_biases ? second_bias.data() : nullptr,
           with_biases ? next_bias.data() : nullptr, first, second, next_relu);
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[5];
    if (fread(head, 4, 5, stdin) != 5 || fread(&first, sizeof first, 1, stdin) != 1) return 2;
    if (fread(&second, sizeof second, 1, stdin) != 1) return 2;
    if (fread(&shortcut_alone, sizeof shortcut_alone, 1, stdin) != 1) return 2;
    draw.seed(head[0]), gridDim.x = head[1], with_biases = head[2], in_place = head[3], next_relu = head[4];
    const long outputs = long(second.gemm_m) * second.K;
    read(x, long(first.N) * first.H * first.W * first.C), read(first_filter, long(first.K) * first.gemm_k);
    read(second_filter, long(second.K) * first.K);
    read(first_bias, first.K), read(second_bias, second.K), read(residual, outputs);
    read(next_filter, long(NEXT) * second.K), read(next_bias, NEXT);
    if (SHORTCUT > 0) read(x0, long(first.N) * shortcut_alone.H * shortcut_alone.W * SHORTCUT);
    read(shortcut_filter, long(second.K) * SHORTCUT);
    y = residual, z.assign(long(second.gemm_m) * NEXT, NAN);
    if (!in_place) for (float& value : y) value = NAN;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) cluster();
    fwrite(y.data(), 4, outputs, stdout);
    fwrite(z.data(), 4, z.size(), stdout);
}
"""
)
