"""conv2d_wgmma_patch.cu as a program of the host: its own text; C++ plays barriers, accelerator and tensor cores.

Of 2-byte elements, and without data; `wgmma_patch_run_host` has it in TF32, with data.

One block runs with one thread of each warpgroup, taken in turns at random. Fetches land, and stores are read, some time
after they were asked for; an instruction reads its operands at any time until it is waited for. The program ends with
an error where memory is written that somebody else may still read or write, and where nobody can go on.
"""

import re
from collections.abc import Sequence

from wgmma_host import HostSource, Program, headers, kernel_text, place

HOST = r"""
#include <cstdio>
#include <cstdlib>
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
#define WARPGROUP_MMA_OF_ALL(...)

struct Index { int x; } threadIdx, blockIdx, gridDim;
struct Half { unsigned short bits; };
struct Chunk { unsigned words[4]; };
struct TensorMap { int id; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
enum { PIXELS_OF_X, FILTER, RESIDUAL, OUTPUT };
unsigned char shared[1 << 18] __align__(1024);
int box_bytes, store_bytes;

struct Barrier { int count, pending, phase; long bytes; };
struct Box { unsigned place; int bytes, map, at[4]; unsigned barrier; int consumer; };
struct Read { unsigned begin, end; int consumer, group; };
struct Routine {
    ucontext_t context;
    int thread;
    bool ended, waits, for_stores, for_all;
    unsigned barrier;
    int parity;
};

std::map<const void*, unsigned> addresses;
std::map<unsigned, Barrier> barriers_at;
std::map<unsigned, Box> landed;
std::vector<Box> fetches, stores;
std::vector<Read> reads;
Routine routines[3];
ucontext_t scheduler;
int current, at_sync, groups[3];
std::mt19937 draw;

[[noreturn]] void fail(const char* what) { printf("error %s\n", what); fflush(stdout); _Exit(1); }
void rest() { swapcontext(&routines[current].context, &scheduler); }
bool overlap(unsigned a, unsigned a_end, unsigned b, unsigned b_end) { return a < b_end && b < a_end; }
bool overlap(const Box& box, unsigned begin, unsigned end) {
    return overlap(box.place, box.place + box.bytes, begin, end);
}
bool any_overlap(const std::vector<Box>& boxes, unsigned begin, unsigned end) {
    for (const Box& box : boxes) if (overlap(box, begin, end)) return true;
    return false;
}

unsigned shared_address(const void* pointer) {
    const auto byte = static_cast<const unsigned char*>(pointer);
    if (byte >= shared && byte < shared + sizeof shared) return byte - shared;
    return addresses.try_emplace(pointer, 0x100000 + 8 * addresses.size()).first->second;
}
void complete(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, ++barrier.phase;
}
void barrier_init(unsigned address, int count) { barriers_at[address] = {count, count, 0, 0}; }
void barrier_init_done() {}
void barrier_arrive(unsigned address) {
    Barrier& barrier = barriers_at.at(address);
    if (barrier.pending-- == 0) fail("a barrier has more arrivals than it counts");
    complete(barrier);
}
void barrier_arrive_expecting(unsigned address, int bytes) {
    barriers_at.at(address).bytes += bytes;
    barrier_arrive(address);
}
bool can_go_on(const Routine& routine) {
    if (routine.for_all) return at_sync == 3;
    if (routine.for_stores) {
        for (const Box& store : stores) if (store.consumer == routine.thread / 128) return false;
        return true;
    }
    return !routine.waits || barriers_at.at(routine.barrier).phase % 2 != routine.parity;
}
void barrier_wait(unsigned address, int parity) {
    Routine& routine = routines[current];
    routine.waits = true, routine.barrier = address, routine.parity = parity;
    rest();
    routine.waits = false;
}
void __syncthreads() {
    ++at_sync;
    routines[current].for_all = true;
    rest();
    routines[current].for_all = false;
}
void store_wait() {
    routines[current].for_stores = true;
    rest();
    routines[current].for_stores = false;
}
void fetch(Box box) {
    for (const Read& read : reads) if (overlap(box, read.begin, read.end)) fail("an operand in use is overwritten");
    const unsigned end = box.place + box.bytes;
    if (any_overlap(fetches, box.place, end) || any_overlap(stores, box.place, end)) fail("two boxes meet");
    fetches.push_back(box);
    rest();
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int row) {
    fetch({place, 64 * 128, map.id, {column, row, 0, 0}, barrier, threadIdx.x / 128});
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n) {
    fetch({place, map.id == RESIDUAL ? store_bytes : box_bytes, map.id, {c, w, h, n}, barrier, threadIdx.x / 128});
}
void store_box(const TensorMap& map, unsigned place, int c, int w, int h, int n) {
    printf("store %d %d %d %d %d\n", threadIdx.x / 128 - 1, c, w, h, n);
    landed.erase(place);
    stores.push_back({place, store_bytes, map.id, {c, w, h, n}, 0, threadIdx.x / 128});
}
void store_commit() { rest(); }
void written_for_storing() {}
void let_next_kernel_start() {}
void __syncwarp() {}
void prefetch_map(const TensorMap&) {}
int this_warpgroup() { return threadIdx.x / 128; }
void wait_for_earlier_kernels() {}
void store_chunk(void* place, Chunk) {}

void touch_staged(unsigned address, bool load) {
    if (any_overlap(fetches, address, address + 16)) fail("the residual has not come");
    if (any_overlap(stores, address, address + 16)) fail("a staged tile is still being stored");
    if (!load) return;
    auto box = landed.upper_bound(address);
    if (box == landed.begin() || (--box)->second.map != RESIDUAL) fail("there is no residual");
    const int* const at = box->second.at;
    printf("residual %d %d %d %d %d\n", threadIdx.x / 128 - 1, at[0], at[1], at[2], at[3]);
}

void warpgroup_sync(int) {}  // one thread of each plays all
unsigned long long operand(unsigned address) { return address >> 4; }
void warpgroup_fence() {}
template <typename Element, int N>
void warpgroup_mma(float (&sums)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    const unsigned filter = static_cast<unsigned>(a) * 16 & ~1023u, tap = static_cast<unsigned>(b) * 16;
    auto patch = landed.upper_bound(tap);
    if (patch == landed.begin() || (--patch)->second.map != PIXELS_OF_X) fail("there is no patch");
    if (!landed.count(filter) || landed[filter].map != FILTER) fail("there is no filter");
    const unsigned begin = patch->first, end = begin + box_bytes;
    if (any_overlap(fetches, begin, end)) fail("a patch has not come");
    if (any_overlap(fetches, filter, filter + 8192)) fail("a slice of the filter has not come");
    const int consumer = threadIdx.x / 128;
    reads.push_back({begin, end, consumer, groups[consumer]});
    reads.push_back({filter, filter + 8192, consumer, groups[consumer]});
    const int *const of_filter = landed[filter].at, *const at = patch->second.at;
    printf("mma %d %d %d %d %d ", consumer - 1, accumulate, of_filter[0], of_filter[1], (unsigned(a) * 16 & 1023) / 32);
    printf("%d %d %d %d %d %d\n", at[0], at[1], at[2], at[3], (tap - begin) / 128, (tap - begin) % 128 / 32);
    for (float& sum : sums) sum = 0;
}
void warpgroup_commit() { ++groups[threadIdx.x / 128]; rest(); }
template <int PENDING>
void warpgroup_wait() {
    const int consumer = threadIdx.x / 128;
    const int done = groups[consumer] - PENDING;
    std::erase_if(reads, [&](const Read& read) { return read.consumer == consumer && read.group < done; });
    rest();
}
float2 make_float2(float x, float y) { return {x, y}; }
unsigned floor_word(int, Half) { return 0; }
template <typename Element, bool ADD, int COUNT>
void finish_matrices_of_rows(unsigned (&)[COUNT], const float*, float2, unsigned) {}
// What only a tile of floats needs, which is not staged.
[[noreturn]] void not_staged() { fail("every tile is staged"); }
int min(int, int) { not_staged(); }
float least_kept(bool) { not_staged(); }
float relu_of(float, float) { not_staged(); }
float __shfl_sync(unsigned, float, int) { not_staged(); }
float4 make_float4(float, float, float, float) { not_staged(); }
void prefetch_box(const TensorMap&, int, int, int, int) { not_staged(); }
template <int COUNT> void warpgroup_results(float (&)[COUNT]) { not_staged(); }
"""

MAIN = r"""
PatchTile shape;
Conv2dParams params;
bool with_residual;
void run() {
    static unsigned char something;
    KERNEL({PIXELS_OF_X}, {FILTER}, {RESIDUAL}, {OUTPUT}, nullptr,
           with_residual ? reinterpret_cast<const ELEMENT*>(&something) : nullptr, nullptr, shape, params);
    routines[current].ended = true;
    rest();
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int seed;
    while (scanf("%d", &seed) == 1) {
        draw.seed(seed);
        int given;
        for (unsigned i = 0; i < sizeof shape / 4; ++i) if (scanf("%d", (int*)&shape + i) != 1) return 2;
        for (unsigned i = 0; i < sizeof params / 4; ++i) if (scanf("%d", (int*)&params + i) != 1) return 2;
        if (scanf("%d %d %d", &gridDim.x, &blockIdx.x, &given) != 3) return 2;
        with_residual = given, box_bytes = shape.box_bytes, store_bytes = shape.store_bytes;
        barriers_at.clear(), landed.clear(), fetches.clear(), stores.clear(), reads.clear(), at_sync = 0;
        static std::vector<char> stacks[3];
        for (int i = 0; i < 3; ++i) {
            stacks[i].resize(1 << 18), groups[i] = 0;
            routines[i] = {};
            routines[i].thread = 128 * i;
            getcontext(&routines[i].context);
            routines[i].context.uc_stack.ss_sp = stacks[i].data();
            routines[i].context.uc_stack.ss_size = stacks[i].size();
            makecontext(&routines[i].context, run, 0);
        }
        const int lazy = draw() % 3;  // who is slow: nobody, the accelerator (with residuals above all), the threads
        for (;;) {
            std::vector<int> able;
            int ended = 0;
            for (int i = 0; i < 3; ++i) {
                ended += routines[i].ended;
                if (!routines[i].ended && can_go_on(routines[i])) able.push_back(i);
            }
            const int transfers = fetches.size() + stores.size();
            if (ended == 3 && !transfers) break;
            if (able.empty() && !transfers) fail("nobody can go on");
            bool transfer = draw() % (lazy == 1 ? 20 : 2) == 0;
            if (lazy == 2) transfer = draw() % 20 != 0;
            const int number = transfers ? draw() % transfers : 0;
            if (lazy == 1 && number < int(fetches.size()) && fetches[number].map == RESIDUAL) transfer = false;
            if (transfers && (able.empty() || transfer)) {
                if (number < int(fetches.size())) {
                    const Box box = fetches[number];
                    fetches.erase(fetches.begin() + number);
                    landed[box.place] = box;
                    Barrier& barrier = barriers_at.at(box.barrier);
                    barrier.bytes -= box.bytes;
                    complete(barrier);
                } else {
                    stores.erase(stores.begin() + number - fetches.size());
                }
            } else {
                current = able[draw() % able.size()];
                threadIdx.x = routines[current].thread;
                swapcontext(&scheduler, &routines[current].context);
            }
        }
        if (!reads.empty()) fail("products that nobody has waited for");
        printf("end\n");
    }
}
"""

PTX = {
    "ldmatrix": "touch_staged(address, true);",
    "stmatrix": "touch_staged(address, false);",
    "setmaxnreg": "",
}
"""What an instruction of the kernel's own file becomes."""


def host_source() -> HostSource:
    """The program's text."""
    names = "conv2d_params.cuh", "patch_tile.cuh", "transposed_matrices.cuh", "turns.cuh"
    text = kernel_text("conv2d_wgmma_patch", {name: headers(name) for name in names})
    assert text.count("WARPS = WARPGROUP / 32") == 1
    text = text.replace("WARPS = WARPGROUP / 32", "WARPS = 1")  # a warpgroup is one thread here

    def replaced(statement: re.Match[str]) -> str:
        (becomes,) = [code for name, code in PTX.items() if name in statement[0]]
        return becomes

    text = re.sub(r"asm volatile\(.*?\);", replaced, text, flags=re.DOTALL)
    return HostSource("\n".join([HOST, place()]), text, "conv2d_wgmma_patch", MAIN)


def run(program: Program, blocks: Sequence[Sequence[int]]) -> list[list[str]]:
    """Runs blocks; returns what each did, a line a step, of which the last one is ``end`` or begins with ``error``.

    Args:
        program: from `build`.
        blocks: for each a seed, the words of PatchTile and of Conv2dParams, gridDim.x, blockIdx.x, 1 for a residual.
    """
    text = "\n".join(" ".join(map(str, words)) for words in blocks)
    logs: list[list[str]] = [[]]
    for line in program(text.encode()).stdout.decode().splitlines():
        logs[-1].append(line)
        if line == "end" or line.startswith("error"):
            logs.append([])
    return logs[:-1]
