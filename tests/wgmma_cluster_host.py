"""What the simulations of kernels share whose blocks form clusters: C++ that plays a cluster, and its order of events.

All threads of a cluster's consumers and one of each producer's warps run in turns at random. Boxes and partial sums
arrive some time after they were asked for or sent, and NaN lies there until then; an instruction reads its operands at
any time until it is waited for. ELEMENT is float, or Half, which holds integers.
"""

import re
from pathlib import Path

from wgmma_host import WAITS, HostSource, place

from cupy_resnet.jit.sources import find_kernel

HOST = (
    r"""
#include <algorithm>
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
#define __cluster_dims__(...)
#define WARPGROUP_MMA_OF_ALL(...)
using std::max;
using std::min;

struct Index { int x, y, z; } threadIdx, blockIdx;
struct TensorMap { int id; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
float2 make_float2(float x, float y) { return {x, y}; }
// Twice an integer, so that -1, which lies where nobody has written, is none.
struct Half { short twice; };
using Value = ELEMENT;
template <typename Element> constexpr int PER_CHUNK = 16 / sizeof(Element);
struct Chunk { Value values[PER_CHUNK<Value>]; };
constexpr int SHARED = 227 << 10, PER_BLOCK = 258;

struct Barrier { int count, pending, phase; long bytes; };
struct Box { int block; unsigned place; std::vector<Value> rows; unsigned barrier; };
struct Sent { int block; unsigned place; float first, second; unsigned barrier; };
struct Instruction {
    int columns;
    float* sums[128];
    unsigned long long a, b;
    bool accumulate;
    int issued = 0;
};
struct Consumer {
    std::deque<Instruction> instructions;  // not yet computed
    long computed = 0;
};
struct Block {
    alignas(1024) unsigned char shared[SHARED];
    std::map<unsigned, Barrier> barriers;
    Consumer consumers[2];
    int at_sync, at_consumers_sync;
};
struct Routine {
    ucontext_t context;
    int thread, block;
    bool ended, for_block, for_cluster, for_consumers, waited;
    unsigned barrier;
    int parity = -1;           // of a barrier that is waited for
    long issued, until;        // instructions; those before `until` are waited for
    std::vector<long> groups;  // their ends, in instructions
};

std::vector<Block> blocks;
std::vector<Box> fetches;
std::vector<Sent> sends;
std::vector<Routine> routines;
ucontext_t scheduler;
int current, in_cluster;
std::mt19937 draw;

[[noreturn]] void fail(const char* what) { fprintf(stderr, "%s\n", what); _Exit(1); }
void rest() { swapcontext(&routines[current].context, &scheduler); }
Routine& self() { return routines[current]; }
Block& own() { return blocks[self().block]; }
"""
    + WAITS
    + r"""
unsigned shared_address(const void* pointer) {
    const long place = static_cast<const unsigned char*>(pointer) - own().shared;
    if (place < 0 || place >= SHARED) fail("this is not in the block's shared memory");
    return place;
}
Value& at(Block& block, unsigned address) {
    return *reinterpret_cast<Value*>(block.shared + (address ^ (address >> 7 & 7) << 4));
}

void received(int block, unsigned address, int bytes) {
    Barrier& barrier = blocks[block].barriers.at(address);
    barrier.bytes -= bytes;
    complete(barrier);
}
void barrier_init(unsigned address, int count) { own().barriers[address] = {count, count, 0, 0}; }
void barrier_init_done() {}
void barrier_arrive(unsigned address) { arrive(own().barriers.at(address)); }
void barrier_arrive_expecting(unsigned address, int bytes) {
    own().barriers.at(address).bytes += bytes;
    barrier_arrive(address);
}
void __syncthreads() {
    ++own().at_sync, self().for_block = true;
    rest();
    self().for_block = false;
}
template <int COUNT>
void warpgroups_sync(int) {
    if (COUNT != 2 || threadIdx.x >= 256) fail("others than the consumers meet");
    if (++own().at_consumers_sync > 256) fail("a second meeting");
    self().for_consumers = true;
    rest();
    self().for_consumers = false;
}
void __syncwarp() {}
template <typename Element> void store_pair(void* place, float first, float second) {
    shared_address(place);
    const float pair[] = {first, second};
    memcpy(place, pair, 8);
}
void cluster_arrive_relaxed() { ++in_cluster; }
void cluster_wait() {
    self().for_cluster = true;
    rest();
    self().for_cluster = false;
}
unsigned address_in_block(unsigned address, int rank) {
    if (rank < 0 || rank >= int(blocks.size())) fail("there is no such block");
    return address | unsigned(rank + 1) << 20;
}
void store_in_cluster(unsigned address, float first, float second, unsigned barrier) {
    const int block = int(address >> 20) - 1;
    if (address % 8 || block != int(barrier >> 20) - 1) fail("no place for partial sums");
    if (in_cluster < int(routines.size())) fail("not all blocks have begun");
    bool alive = false;
    for (const Routine& routine : routines) {
        alive |= routine.block == block && routine.thread < 256 && !routine.ended;
    }
    if (!alive) fail("the block has ended");
    sends.push_back({block, address & 0xfffff, first, second, barrier & 0xfffff});
}
void let_next_kernel_start() {}
void wait_for_earlier_kernels() { self().waited = true; }
void prefetch_map(const TensorMap&) {}

template <typename Element, int N>
void warpgroup_mma(float (&sums)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    Consumer& consumer = own().consumers[threadIdx.x / 128];
    const long number = self().issued++ - consumer.computed;
    if (number == long(consumer.instructions.size())) consumer.instructions.push_back({N, {}, a, b, accumulate});
    Instruction& instruction = consumer.instructions[number];
    if (instruction.a != a || instruction.b != b || instruction.accumulate != accumulate) {
        fail("threads issue different instructions");
    }
    instruction.sums[threadIdx.x % 128] = sums;
    ++instruction.issued;
}
float to_float(float x) { return x; }
float to_float(Half x) { return x.twice % 2 ? NAN : x.twice / 2; }
template <typename Element> Element from_float(float x) {
    if constexpr (sizeof(Element) == 4) {
        return x;
    } else {
        if (x != x) return Half{-1};
        if (x != rint(x) || fabs(x) > 16000) fail("this is none of the numbers that a Half is here");
        return Half{static_cast<short>(2 * x)};
    }
}
// Products and sums of small integers are exact.
void compute(Block& block, Consumer& consumer) {
    const Instruction& in = consumer.instructions.front();
    const auto element = [&](unsigned long long operand, int row, int k) {
        return to_float(at(block, unsigned(operand & 0x3fff) * 16 + row * 128 + k * sizeof(Value)));
    };
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < in.columns / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
            float sum = in.accumulate ? in.sums[thread][i] : 0.0f;
            for (int k = 0; k < PER_CHUNK<Value> * 2; ++k) sum += element(in.a, row, k) * element(in.b, n, k);
            in.sums[thread][i] = sum;
        }
    }
    consumer.instructions.pop_front(), ++consumer.computed;
}
float relu_of(float x) { return x < 0.0f ? 0.0f : x; }
template <typename Element> Chunk pack(const float (&v)[PER_CHUNK<Element>]) {
    Chunk chunk;
    for (int i = 0; i < PER_CHUNK<Element>; ++i) chunk.values[i] = from_float<Element>(v[i]);
    return chunk;
}
template <typename Element> void unpack(const Chunk& chunk, float (&v)[PER_CHUNK<Element>]) {
    for (int i = 0; i < PER_CHUNK<Element>; ++i) v[i] = to_float(chunk.values[i]);
}
Chunk load_chunk(const Value* source) {
    if (!self().waited) fail("earlier kernels may not have written the residual");
    Chunk chunk;
    memcpy(&chunk, source, 16);
    return chunk;
}
void store_chunk(void* target, Chunk chunk) {
    const long place = static_cast<const unsigned char*>(target) - own().shared;
    if ((place < 0 || place >= SHARED) && !self().waited) fail("earlier kernels may still read y");
    memcpy(target, &chunk, 16);
}
void written_for_storing() {}
template <int COUNT> void warpgroup_results(float (&)[COUNT]) {}
void fetch(unsigned place, std::vector<Value> rows, unsigned barrier) {
    if (place % 128) fail("no place for rows");
    memset(own().shared + place, 0xff, rows.size() * sizeof(Value));
    fetches.push_back({self().block, place, std::move(rows), barrier});
}
"""
)
"""Before the kernel's text."""

CLUSTER = r"""
bool can_go_on(const Routine& routine) {
    Block& block = blocks[routine.block];
    if (routine.ended) return false;
    if (routine.for_block) return block.at_sync == PER_BLOCK;
    if (routine.for_consumers) return block.at_consumers_sync == 256;
    if (routine.for_cluster) return in_cluster == int(routines.size());
    if (routine.parity >= 0) return block.barriers.at(routine.barrier).phase % 2 != routine.parity;
    return routine.thread >= 256 || block.consumers[routine.thread / 128].computed >= routine.until;
}
void cluster(int tile) {
    const int threads = PER_BLOCK * SPLIT_K_CLUSTER;
    static std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 15));
    in_cluster = 0;
    blocks.clear(), blocks.resize(SPLIT_K_CLUSTER);
    for (Block& block : blocks) memset(block.shared, 0xff, SHARED);
    routines.clear(), routines.resize(threads);
    for (int i = 0; i < threads; ++i) {
        Routine& routine = routines[i];
        routine.block = i / PER_BLOCK, routine.thread = i % PER_BLOCK;
        if (routine.thread == 257) routine.thread = 288;  // the first of the second producer
        getcontext(&routine.context);
        routine.context.uc_stack.ss_sp = stacks[i].data();
        routine.context.uc_stack.ss_size = stacks[i].size();
        makecontext(&routine.context, ::run, 0);
    }
    const int slow = draw() % 4;           // nobody, the accelerator, one of the consumers
    const int late = draw() % (2 * SPLIT_K_CLUSTER);  // a block, or none
    const int sleep = draw() % 2 ? 2 : 500;
    for (;;) {
        const bool awake = draw() % sleep == 0;
        std::vector<int> able;
        for (int i = 0; i < threads; ++i) if (can_go_on(routines[i])) able.push_back(i);
        std::vector<std::pair<Block*, Consumer*>> busy;
        for (Block& block : blocks) {
            for (Consumer& consumer : block.consumers) {
                const auto& instructions = consumer.instructions;
                if (!instructions.empty() && instructions.front().issued == 128) busy.push_back({&block, &consumer});
            }
        }
        if (able.empty() && busy.empty() && fetches.empty() && sends.empty()) break;
        const bool stuck = able.empty() && busy.empty();
        for (int i = 0; i < SPLIT_K_CLUSTER && !fetches.empty(); ++i) {
            if (!stuck && draw() % (slow == 1 ? 50 : 2)) continue;
            const int number = draw() % fetches.size();
            const Box box = std::move(fetches[number]);
            fetches.erase(fetches.begin() + number);
            const int size = sizeof(Value);
            for (unsigned i = 0; i < box.rows.size(); ++i) at(blocks[box.block], box.place + i * size) = box.rows[i];
            received(box.block, box.barrier, box.rows.size() * size);
        }
        if (!sends.empty() && (stuck || draw() % 4 == 0)) {
            std::shuffle(sends.begin(), sends.end(), draw);
            for (int count = sends.size() / 2 + 1; count > 0; --count) {
                const Sent sent = sends.back();
                sends.pop_back();
                memcpy(blocks[sent.block].shared + sent.place, &sent.first, 4);
                memcpy(blocks[sent.block].shared + sent.place + 4, &sent.second, 4);
                received(sent.block, sent.barrier, 8);
            }
        }
        for (const auto& [block, consumer] : busy) if (able.empty() || draw() % 3 == 0) compute(*block, *consumer);
        // Most go on at once, so that runs are short; slow ones seldom do.
        for (int i : able) {
            const Routine& routine = routines[i];
            const bool seldom = slow >= 2 && routine.thread / 128 == slow - 2;
            if (draw() % (seldom ? 8 : 2) || (routine.block == late && !awake)) continue;
            current = i, threadIdx.x = routine.thread, blockIdx = {tile, 0, routine.block};
            swapcontext(&scheduler, &routines[i].context);
        }
    }
    for (const Routine& routine : routines) if (!routine.ended) fail("nobody can go on");
}
"""
"""Behind it, and behind `run`, which calls it and then ends the thread."""


def cluster_source(name: str, headers: tuple[str, ...], names: str, main: str) -> HostSource:
    """Returns a program's text.

    Args:
        name: of the kernel.
        headers: those of `include/` whose own text stands in the place where they are included; the others are played.
        names: C++ in front of the kernel's text.
        main: C++ behind it, with the word CLUSTER where that is to stand.
    """
    path = find_kernel(name).path
    include = path.parent / "include"

    def text_of(file: Path) -> str:
        return re.sub(r'#include "[^"]+"|#pragma once', "", file.read_text(encoding="utf-8"))

    kernel = path.read_text(encoding="utf-8")
    for header in headers:
        assert kernel.count(f'#include "{header}"') == 1, header
        kernel = kernel.replace(f'#include "{header}"', text_of(include / header))
    kernel = re.sub(r'#include "[^"]+"', "", kernel)
    kernel = kernel.replace(
        "extern __shared__ __align__(1024) unsigned char shared[];", "unsigned char* const shared = own().shared;"
    )
    kernel = kernel.replace(
        "__shared__ Barriers barriers;",
        "Barriers& barriers = *reinterpret_cast<Barriers*>(own().shared + SHARED - 1024);",
    )
    assert "__shared__" not in kernel
    epilogue = text_of(include / "epilogue.cuh")
    epilogue = epilogue[epilogue.index("template <typename Element>\nstruct Epilogue8") :]
    before = "\n".join([HOST, names, text_of(include / "conv2d_params.cuh"), place(), epilogue])
    return HostSource(before, kernel, name, main.replace("CLUSTER\n", CLUSTER))
