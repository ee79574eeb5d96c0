"""conv2d_wgmma_3xtf32.cu as a program of the host: its own text; C++ plays barriers, accelerator and tensor cores.

A block runs with all threads of its consumers and one of its producer, taken in turns at random. Boxes lie in shared
memory as the accelerator leaves them, some time after they were asked for, and NaN does until then; an instruction
takes its operands as the PTX ISA lays them out, at any time until it is waited for. Whatever is read too early, or from
a wrong place, makes a wrong result.
"""

import re

import numpy as np
from wgmma_host import IM2COL, WAITS, HostSource, Program, ask, place

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.jit.sources import find_kernel

HOST = (
    r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>
#include <ucontext.h>
#define __device__
#define __global__
#define __restrict__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Index { int x; } threadIdx, blockIdx, gridDim;
struct TensorMap { int id; };
struct float2 { float x, y; };
enum { PIXELS, FILTERS, RESIDUALS, OUTPUTS };
unsigned char shared[227 << 10] __align__(1024);

struct Barrier { int count, pending, phase; long bytes; };
struct Box { unsigned place; std::vector<float> rows; unsigned barrier; };
struct Store { int routine; unsigned place; int column, row; };
struct Instruction {
    int columns;
    float* sums[128];
    unsigned a[128][4];
    unsigned long long b;
    bool accumulate;
    int issued = 0;
};
struct Consumer {
    std::deque<Instruction> instructions;  // not yet computed
    long computed = 0;
};
struct Routine {
    ucontext_t context;
    int thread;
    bool ended, for_all, storing;
    unsigned barrier;
    int parity = -1;           // of a barrier that is waited for
    long issued, until;        // instructions; those before `until` are waited for
    std::vector<long> groups;  // their ends, in instructions
};

std::map<const void*, unsigned> addresses;
std::map<unsigned, Barrier> barriers_at;
std::vector<Box> fetches;
std::vector<Store> stores;
Consumer consumers[2];
std::vector<Routine> routines;
ucontext_t scheduler;
int current, at_sync;
std::mt19937 draw;

[[noreturn]] void fail(const char* what) { fprintf(stderr, "%s\n", what); _Exit(1); }
void rest() { swapcontext(&routines[current].context, &scheduler); }
Routine& self() { return routines[current]; }
Consumer& consumer() { return consumers[threadIdx.x / 128 - 1]; }
"""
    + WAITS
    + r"""
float bits_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
float __uint_as_float(unsigned bits) { return bits_as_float(bits); }
unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }

unsigned shared_address(const void* pointer) {
    const auto byte = static_cast<const unsigned char*>(pointer);
    if (byte >= shared && byte < shared + sizeof shared) return byte - shared;
    return addresses.try_emplace(pointer, 0x100000 + 8 * addresses.size()).first->second;
}
unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }
float& at(unsigned address) { return *reinterpret_cast<float*>(shared + swizzled(address)); }

void barrier_init(unsigned address, int count) { barriers_at[address] = {count, count, 0, 0}; }
void barrier_init_done() {}
void barrier_arrive(unsigned address) { arrive(barriers_at.at(address)); }
void barrier_arrive_expecting(unsigned address, int bytes) {
    barriers_at.at(address).bytes += bytes;
    barrier_arrive(address);
}
void __syncthreads() {
    ++at_sync, self().for_all = true;
    rest();
    self().for_all = false;
}
void let_next_kernel_start() {}
void wait_for_earlier_kernels() {}

template <int COUNT>
void warpgroup_results(float (&)[COUNT]) {}
template <int N>
void warpgroup_mma_tf32(float (&sums)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    Consumer& own = consumer();
    const long number = self().issued++ - own.computed;
    if (number == long(own.instructions.size())) own.instructions.push_back({N, {}, {}, b, accumulate});
    Instruction& instruction = own.instructions[number];
    if (instruction.b != b || instruction.accumulate != accumulate) fail("threads issue different instructions");
    instruction.sums[threadIdx.x % 128] = sums;
    memcpy(instruction.a[threadIdx.x % 128], a, sizeof a);
    ++instruction.issued;
}
// Products of TF32 are exact in double, and so are the sums of small integers.
void compute(Consumer& own) {
    Instruction& in = own.instructions.front();
    double a[64][8];
    for (int thread = 0; thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, k = thread % 4;
        for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][k + i / 2 * 4] = bits_as_float(in.a[thread][i] & 0xffffe000u);
    }
    std::vector<double> b(in.columns * 8);
    for (int n = 0; n < in.columns; ++n) {
        for (int k = 0; k < 8; ++k) {
            const unsigned address = unsigned(in.b & 0x3fff) * 16 + n * 128 + k * 4;
            b[n * 8 + k] = bits_as_float(__float_as_uint(at(address)) & 0xffffe000u);
        }
    }
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < in.columns / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
            double sum = in.accumulate ? in.sums[thread][i] : 0.0;
            for (int k = 0; k < 8; ++k) sum += a[row][k] * b[n * 8 + k];
            in.sums[thread][i] = float(sum);
        }
    }
    own.instructions.pop_front(), ++own.computed;
}
float2 make_float2(float x, float y) { return {x, y}; }
float relu_of(float x) { return x < 0.0f ? 0.0f : x; }
template <typename Element> float2 load_pair(const float* source) { return {source[0], source[1]}; }
template <typename Element> void store_pair(float* place, float x, float y) { place[0] = x, place[1] = y; }
void fetch_im2col(unsigned, const TensorMap&, unsigned, int, int, int, int, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
void written_for_storing() {}
void store_box(const TensorMap& map, unsigned place, int column, int row) {
    if (map.id != OUTPUTS) fail("this is no output");
    stores.push_back({current, place, column, row});
}
void store_commit() {}
void store_wait() {
    self().storing = true;
    rest();
    self().storing = false;
}
void prefetch_box(const TensorMap& map, int, int) { if (map.id != RESIDUALS) fail("this is no residual"); }
"""
)

MAIN = r"""
Conv2dParams params;
int with_bias, with_residual, in_place;
std::vector<float> x, parts, bias, residual, y;

void fetch(unsigned place, std::vector<float> rows, unsigned barrier) {
    for (unsigned i = 0; i < rows.size(); ++i) at(place + i * 4) = NAN;
    fetches.push_back({place, std::move(rows), barrier});
}
void fetch_im2col(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n, int s, int r) {
    if (map.id != PIXELS || place % 1024) fail("no place for pixels");
    fetch(place, im2col_rows(params, x, TILE_M, c, w, h, n, s, r), barrier);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int first) {
    if (place % 1024) fail("no place for a box");
    if (map.id == FILTERS) {
        fetch(place, filter_rows(parts, TILE_N, first, 2 * params.K, params.gemm_k, column), barrier);
        return;
    }
    if (map.id != RESIDUALS || !with_residual) fail("this is no box");
    std::vector<float> rows(CONSUMER_M * 32);
    for (int i = 0; i < CONSUMER_M * 32; ++i) {
        const int m = first + i / 32, k = column + i % 32;
        if (m < params.gemm_m && k < params.K) rows[i] = (in_place ? y : residual)[long(m) * params.K + k];
    }
    fetch(place, std::move(rows), barrier);
}
void carry_out(const Store& store) {
    for (int i = 0; i < CONSUMER_M * 32; ++i) {
        const int m = store.row + i / 32, k = store.column + i % 32;
        if (m < params.gemm_m && k < params.K) y[long(m) * params.K + k] = at(store.place + i * 4);
    }
}
void run() {
    KERNEL({PIXELS}, {FILTERS}, {RESIDUALS}, {OUTPUTS}, with_bias ? bias.data() : nullptr,
           in_place ? y.data() : with_residual ? residual.data() : nullptr, y.data(), params);
    self().ended = true;
    rest();
}
bool can_go_on(const Routine& routine) {
    if (routine.ended) return false;
    if (routine.for_all) return at_sync == int(routines.size());
    if (routine.storing) {
        for (const Store& store : stores) if (store.routine == &routine - routines.data()) return false;
        return true;
    }
    if (routine.parity >= 0) return barriers_at.at(routine.barrier).phase % 2 != routine.parity;
    return routine.thread < 128 || consumers[routine.thread / 128 - 1].computed >= routine.until;
}
void block() {
    constexpr int COUNT = 256 + 3;  // the consumers' threads, the producer, and who carries for each consumer
    static std::vector<std::vector<char>> stacks(COUNT, std::vector<char>(1 << 16));
    barriers_at.clear(), at_sync = 0;
    routines.assign(COUNT, {});
    for (int i = 0; i < COUNT; ++i) {
        Routine& routine = routines[i];
        routine.thread = i < 256 ? 128 + i : (i - 256) * 32;
        getcontext(&routine.context);
        routine.context.uc_stack.ss_sp = stacks[i].data();
        routine.context.uc_stack.ss_size = stacks[i].size();
        makecontext(&routine.context, ::run, 0);
    }
    for (Consumer& consumer : consumers) consumer = {};
    memset(shared, 0xff, sizeof shared);
    const int lazy = draw() % 4;  // who is slow: nobody, the accelerator, one of the consumers
    for (;;) {
        std::vector<int> able;
        for (int i = 0; i < COUNT; ++i) if (can_go_on(routines[i])) able.push_back(i);
        std::vector<Consumer*> busy;
        for (Consumer& consumer : consumers) {
            const auto& instructions = consumer.instructions;
            if (!instructions.empty() && instructions.front().issued == 128) busy.push_back(&consumer);
        }
        if (able.empty() && busy.empty() && fetches.empty() && stores.empty()) break;
        const bool stuck = able.empty() && busy.empty();
        if (!stores.empty() && ((stuck && fetches.empty()) || draw() % (lazy == 1 ? 50 : 3) == 0)) {
            const int number = draw() % stores.size();
            carry_out(stores[number]);
            stores.erase(stores.begin() + number);
            continue;
        }
        if (!fetches.empty() && (stuck || draw() % (lazy == 1 ? 50 : 3) == 0)) {
            const int number = draw() % fetches.size();
            const Box box = std::move(fetches[number]);
            fetches.erase(fetches.begin() + number);
            for (unsigned i = 0; i < box.rows.size(); ++i) at(box.place + i * 4) = box.rows[i];
            Barrier& barrier = barriers_at.at(box.barrier);
            barrier.bytes -= box.rows.size() * 4;
            complete(barrier);
        } else if (!busy.empty() && (able.empty() || draw() % 4 == 0)) {
            compute(*busy[draw() % busy.size()]);
        } else {
            // Most go on at once, so that runs are short; a slow consumer seldom does.
            for (int i : able) {
                const bool slow = lazy >= 2 && routines[i].thread / 128 == lazy - 1;
                if (draw() % (slow ? 8 : 2)) continue;
                current = i, threadIdx.x = routines[i].thread;
                swapcontext(&scheduler, &routines[i].context);
            }
        }
    }
    for (const Routine& routine : routines) if (!routine.ended) fail("nobody can go on");
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[5];
    if (fread(head, 4, 5, stdin) != 5 || fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), gridDim.x = head[1], with_bias = head[2], with_residual = head[3], in_place = head[4];
    const long outputs = long(params.gemm_m) * params.K;
    read(x, long(params.N) * params.H * params.W * params.C), read(parts, 2l * params.K * params.gemm_k);
    read(bias, params.K), read(residual, outputs);
    y = residual;
    if (!in_place) for (float& value : y) value = NAN;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) block();
    fwrite(y.data(), 4, outputs, stdout);
}
"""


def host_source() -> HostSource:
    """The program's text."""
    path = find_kernel("conv2d_wgmma_3xtf32").path
    include = path.parent / "include"
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'#include "[^"]+"', "", text)
    text = re.sub(r'asm volatile\("setmaxnreg.*?\);', "", text)
    text = text.replace("extern __shared__ __align__(1024) unsigned char shared[];", "")
    text = text.replace("__shared__", "static")
    text = re.sub(r'asm volatile\("mov.u32 %0, %%tid.x;.*?\);', "thread = threadIdx.x;", text)
    text = re.sub(r'asm volatile\("mov.u32 %0, %%nctaid.x;.*?\);', "blocks = gridDim.x;", text)
    split = re.search(
        r"template <int WORDS>[^;{}]+ split_tf32\(.*?\n}\n", (include / "tensor_core.cuh").read_text("utf-8"), re.S
    )
    assert split
    params = (include / "conv2d_params.cuh").read_text("utf-8").replace("#pragma once", "")
    before = "\n".join([HOST, params, place(), split[0]])
    return HostSource(before, text, "conv2d_wgmma_3xtf32", f"{IM2COL}\n{MAIN}")


def run(
    program: Program,
    problem: Conv2dProblem,
    arrays: dict[str, np.ndarray],
    *,
    seed: int,
    grid: int,
    bias: bool,
    residual: bool,
    in_place: bool,
    relu: bool,
) -> np.ndarray | str:
    """Runs all blocks of a launch, one after the other; returns the output, or what went wrong.

    Args:
        program: from `build`.
        problem: the convolution.
        arrays: x, parts (2, K, R, S, C), bias and residual, float32.
        seed: of the order.
        grid: blocks.
        bias, residual, relu: the epilogue.
        in_place: whether the output lies in the residual's place.
    """
    head = seed, grid, bias, residual, in_place
    tensors = [arrays[name] for name in ("x", "parts", "bias", "residual")]
    return ask(program, problem, head, tensors, relu=relu)
