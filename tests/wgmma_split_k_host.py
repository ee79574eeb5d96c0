"""conv2d_wgmma_split_k.cu as a program of the host, in TF32 and with whole clusters: see `wgmma_cluster_host`."""

from wgmma_cluster_host import cluster_source
from wgmma_host import IM2COL, HostSource

NAMES = r"""
enum { PIXELS, FILTERS, SHORTCUT_PIXELS, SHORTCUT_FILTERS };
void fetch_im2col(unsigned, const TensorMap&, unsigned, int, int, int, int, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
"""

MAIN = r"""
Conv2dParams params;
Conv2dParams alone;  // the shortcut as a convolution of its own
int with_bias, with_residual, in_place;
std::vector<float> x, weight, bias, residual, y, shortcut_x, shortcut_weight;

void fetch_im2col(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n, int s, int r) {
    if (map.id % 2 != PIXELS || place % 1024) fail("no place for pixels");
    if (!self().waited) fail("earlier kernels may not have written the pixels");
    const bool first = map.id == PIXELS;
    if (c < 0 || c + 32 > (first ? params.C : alone.C)) fail("there are no such channels");
    fetch(place, im2col_rows(first ? params : alone, first ? x : shortcut_x, TILE_M, c, w, h, n, s, r), barrier);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int first) {
    if (map.id % 2 != FILTERS || place % 1024) fail("no place for filters");
    const auto& of = map.id == FILTERS ? weight : shortcut_weight;
    const int depth = map.id == FILTERS ? params.gemm_k : alone.C;
    if (column < 0 || column + 32 > depth) fail("there is no such depth");
    fetch(place, filter_rows(of, TILE_N, first, params.K, depth, column), barrier);
}
void run() {
    KERNEL({PIXELS}, {FILTERS}, {SHORTCUT_PIXELS}, {SHORTCUT_FILTERS}, with_bias ? bias.data() : nullptr,
           in_place ? y.data() : with_residual ? residual.data() : nullptr, y.data(), params);
    self().ended = true;
    rest();
}
CLUSTER
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[7];
    if (fread(head, 4, 7, stdin) != 7 || fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), with_bias = head[2], with_residual = head[3], in_place = head[4];
    const long outputs = long(params.gemm_m) * params.K;
    read(x, long(params.N) * params.H * params.W * params.C), read(weight, long(params.K) * params.gemm_k);
    read(bias, params.K), read(residual, outputs);
    alone = params;
    alone.C = params.shortcut_channels, alone.H = head[5], alone.W = head[6], alone.pad_h = alone.pad_w = 0;
    alone.stride_h = alone.stride_w = params.shortcut_stride;
    read(shortcut_x, long(params.N) * alone.H * alone.W * alone.C), read(shortcut_weight, long(params.K) * alone.C);
    y = residual;
    if (!in_place) for (float& value : y) value = NAN;
    for (int tile = 0; tile < head[1]; ++tile) cluster(tile);
    fwrite(y.data(), 4, outputs, stdout);
}
"""


def host_source() -> HostSource:
    """The program's text."""
    return cluster_source("conv2d_wgmma_split_k", ("partial_sums.cuh",), NAMES, f"{IM2COL}\n{MAIN}")
