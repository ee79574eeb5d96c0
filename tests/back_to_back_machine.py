"""The C++ before conv2d_wgmma_b2b's text that plays the GPU for `back_to_back_host`; see `back_to_back_main`."""

from wgmma_host import WAITS

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
#include <set>
#include <type_traits>
#include <vector>
#include <ucontext.h>
#define __device__
#define __global__
#define __restrict__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __cluster_dims__(...)
#define WARPGROUP_MMA_FROM_REGISTERS(...)
#define WARPGROUP_MMA_TF32_FROM_REGISTERS(...)
#define WARPGROUP_MMA_OF_ALL(...)

struct Index { int x, y, z; } threadIdx, blockIdx, gridDim;
struct TensorMap { int id; };
struct float2 { float x, y; };
struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
constexpr int SIZE = sizeof(ELEMENT), PER_ROW = 128 / SIZE, DEPTH = 32 / SIZE;  // elements of a row, of an instruction
using Word = std::conditional_t<SIZE == 4, unsigned, unsigned short>;
constexpr Word NOTHING = SIZE == 4 ? 0x7fffffff : 0x7fff;  // a NaN
enum { PIXELS, FIRST, SECOND, ADDED, SHORTCUT_FILTERS, OUTPUTS, NEXT_FILTERS, NEXT_OUTPUTS };
unsigned char shared[1];  // where a block's shared memory, of each its own, begins in what pointers say: 0

struct Barrier { int count, pending, phase; long bytes; };
struct Box { unsigned place; std::vector<float> rows; unsigned barrier; int map, block; };
struct Store { unsigned place; int map, column, row, thread; };
struct Copy { unsigned source, destination; int bytes; unsigned barrier; int block; };  // to the other one
struct Instruction {
    int columns;
    float* sums[128];
    const unsigned long long* a[128];  // in registers, or of the first null: in shared memory
    unsigned long long a_shared, b;
    bool accumulate;
    int issued = 0;
};
struct Multiplier {
    std::deque<Instruction> instructions;  // not yet computed
    long computed = 0;
    long synced = 0;  // arrivals
};
struct Collective { unsigned addresses[32]; int arrived; };
struct Routine {
    ucontext_t context;
    int thread;
    int block;
    bool ended, for_all, for_cluster, waited;
    unsigned barrier;
    int parity = -1;             // of a barrier that is waited for
    long issued, until;          // instructions; those before `until` are waited for
    std::vector<long> groups;    // their ends, in instructions
    long collectives, syncs;     // of the warp; of the consumer
    int in_cluster;              // arrivals
    std::vector<long> stores;    // ends of groups of stores
    long begun, stored;          // boxes
    long stores_until;           // those before are waited for
    std::set<unsigned> unseen;   // written to shared memory, not yet visible to the accelerator
};

struct Block {
    unsigned char memory[227 << 10] __align__(1024);
    std::map<unsigned, Barrier> barriers;
    Multiplier multipliers[3];
    std::deque<Collective> warps[12];
    int at_sync;
} blocks[CLUSTER];
constexpr unsigned ELSEWHERE = 1u << 28;  // an address in another block has this and its number behind

std::map<const void*, unsigned> addresses;
std::vector<Box> fetches;
std::vector<Store> stores;
std::vector<Copy> copies;
std::vector<Routine> routines;
ucontext_t scheduler;
int current, in_cluster;
std::mt19937 draw;

[[noreturn]] void fail(const char* what) { fprintf(stderr, "%s\n", what); _Exit(1); }
void rest() { swapcontext(&routines[current].context, &scheduler); }
Routine& self() { return routines[current]; }
Block& here() { return blocks[blockIdx.z]; }
Multiplier& own() { return here().multipliers[threadIdx.x / 128 - 1]; }
"""
    + WAITS
    + r"""
void fetch_im2col(unsigned, const TensorMap&, unsigned, int, int, int, int, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int), store_box(const TensorMap&, unsigned, int, int);
float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
float to_float(BFloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
unsigned bits_of(float v) {
    const unsigned bits = __float_as_uint(v);
    if (SIZE == 4) return bits;
    return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
unsigned pack_pair(float low, float high, BFloat16) { return bits_of(low) | bits_of(high) << 16; }
unsigned larger_half(unsigned a, unsigned b) {
    const float x = __uint_as_float(a << 16), y = __uint_as_float(b << 16);
    return x != x || y != y ? 0x7fff : x > y ? a & 0xffff : b & 0xffff;
}
unsigned larger_word(unsigned a, unsigned b, BFloat16) {
    return larger_half(a, b) | larger_half(a >> 16, b >> 16) << 16;
}
float2 make_float2(float x, float y) { return {x, y}; }
float relu_of(float x, float least) { return x < least ? 0.0f : x; }
unsigned round_to_tf32(unsigned bits) { return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & ~0x1fffu; }

unsigned shared_address(const void* pointer) {
    const auto from = (const char*)pointer - (const char*)shared;
    if (from >= 0 && from < long(sizeof Block::memory)) return from;
    return addresses.try_emplace(pointer, 0x100000 + 8 * addresses.size()).first->second;
}
Word& at(unsigned address, const Block& block) {
    return *(Word*)(block.memory + (address ^ (address >> 7 & 7) << 4));
}
float value_at(unsigned address, const Block& block) {
    return __uint_as_float(SIZE == 4 ? at(address, block) : unsigned(at(address, block)) << 16);
}
// What tensor cores take of a value in TF32; they are given no others here.
float multiplied(float value) {
    const unsigned bits = __float_as_uint(value);
    if (SIZE == 4 && value == value && round_to_tf32(bits) != bits) fail("this is no TF32");
    return value;
}

void barrier_init(unsigned address, int count) { here().barriers[address] = {count, count, 0, 0}; }
void barrier_init_done() {}
void barrier_arrive(unsigned address) { arrive(here().barriers.at(address)); }
void barrier_arrive_expecting(unsigned address, int bytes) {
    here().barriers.at(address).bytes += bytes, barrier_arrive(address);
}
void __syncthreads() { ++here().at_sync, self().for_all = true, rest(), self().for_all = false; }
void __syncwarp();
void cluster_arrive_relaxed() { ++in_cluster, ++self().in_cluster; }
void cluster_wait() {
    self().for_cluster = true;
    rest();
    self().for_cluster = false;
}
unsigned address_in_block(unsigned address, int rank) { return address | ELSEWHERE | unsigned(rank) << 24; }
Block& elsewhere(unsigned address) {
    if (!(address & ELSEWHERE) || in_cluster < int(routines.size())) fail("the other block may not have begun");
    if ((address >> 24 & 15) == unsigned(blockIdx.z)) fail("this is no other block");
    return blocks[address >> 24 & 15];
}
void arrive_in_block(unsigned barrier) { arrive(elsewhere(barrier).barriers.at(barrier & 0xffffff)); }
void copy_to_block(unsigned destination, unsigned source, int bytes, unsigned barrier) {
    if (&elsewhere(destination) != &elsewhere(barrier)) fail("who gets it is not told");
    copies.push_back({source, destination & 0xffffff, bytes, barrier & 0xffffff, blockIdx.z});
}
void let_next_kernel_start() {}
void prefetch_map(const TensorMap&) {}
void wait_for_earlier_kernels() { self().waited = true; }

// Instructions of a whole warp: where all lanes' rows begin, once all have come.
const unsigned* rows_of_all(unsigned address) {
    const int warp = threadIdx.x / 32 - 4;
    const long number = self().collectives++;
    std::deque<Collective>& own = here().warps[warp];
    if (number == long(own.size())) own.push_back({});
    own[number].addresses[threadIdx.x % 32] = address, ++own[number].arrived;
    rest();
    return own[number].addresses;
}
void __syncwarp() { if (threadIdx.x >= 128) rows_of_all(0); }  // of a producer's warp one thread is there
void load_matrices(unsigned (&words)[4], unsigned address) {
    const unsigned* const rows = rows_of_all(address);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(&words[i], here().memory + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
}
void store_matrices(unsigned address, const unsigned (&words)[4]) {
    const unsigned* const rows = rows_of_all(address);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const unsigned place = rows[8 * i + lane / 4] + lane % 4 * 4;
        memcpy(here().memory + place, &words[i], 4);
        self().unseen.insert(place);
    }
}
void written_for_storing() { self().unseen.clear(); }
void warpgroup_sync(int barrier) {
    if (barrier != threadIdx.x / 128) fail("this is another consumer's barrier");
    ++own().synced, ++self().syncs;
    rest();
}

void issue(const Instruction& wanted, float* sums, const unsigned long long* a) {
    Multiplier& multiplier = own();
    const long number = self().issued++ - multiplier.computed;
    if (number == long(multiplier.instructions.size())) multiplier.instructions.push_back(wanted);
    Instruction& in = multiplier.instructions[number];
    if (in.a_shared != wanted.a_shared || in.b != wanted.b || in.accumulate != wanted.accumulate) {
        fail("threads issue different instructions");
    }
    in.sums[threadIdx.x % 128] = sums, in.a[threadIdx.x % 128] = a;
    ++in.issued;
}
template <typename Element, int N>
void warpgroup_mma(float (&sums)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    issue({N, {}, {}, a, b, accumulate}, sums, nullptr);
}
template <typename Element, int N>
void warpgroup_mma(float (&sums)[N / 2], const unsigned long long (&a)[2], unsigned long long b, bool accumulate) {
    issue({N, {}, {}, 0, b, accumulate}, sums, a);
}
template <int COUNT>
void warpgroup_results(float (&)[COUNT]) {}
template <int COUNT>
void warpgroup_operands(unsigned long long (&)[COUNT][2]) {}
// Sums of small integers are exact.
void compute(Multiplier& multiplier, const Block& block) {
    const Instruction& in = multiplier.instructions.front();
    std::vector<float> a(64 * DEPTH), b(in.columns * DEPTH);
    const auto element = [&](unsigned long long operand, int i) {
        return value_at(unsigned(operand & 0x3fff) * 16 + i / DEPTH * 128 + i % DEPTH * SIZE, block);
    };
    for (int i = 0; i < 64 * DEPTH && !in.a[0]; ++i) a[i] = element(in.a_shared, i);
    for (int thread = 0; thread < 128 && in.a[0]; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        for (int i = 0; i < 4; ++i) {  // words
            const unsigned word = in.a[thread][i / 2] >> i % 2 * 32;
            float* const first = &a[(row + i % 2 * 8) * DEPTH + i / 2 * DEPTH / 2];
            if (SIZE == 4) {
                first[t] = multiplied(__uint_as_float(word));
            } else {
                first[2 * t] = __uint_as_float(word << 16), first[2 * t + 1] = __uint_as_float(word & 0xffff0000);
            }
        }
    }
    for (int i = 0; i < in.columns * DEPTH; ++i) b[i] = element(in.b, i);
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < in.columns / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
            float sum = in.accumulate ? in.sums[thread][i] : 0.0f;
            for (int k = 0; k < DEPTH; ++k) sum += a[row * DEPTH + k] * b[n * DEPTH + k];
            in.sums[thread][i] = sum;
        }
    }
    multiplier.instructions.pop_front(), ++multiplier.computed;
}
void store_commit() { self().stores.push_back(self().begun); }
template <int PENDING = 0>
void store_wait() {
    const std::vector<long>& groups = self().stores;
    self().stores_until = groups.size() > PENDING ? groups[groups.size() - 1 - PENDING] : 0;
    rest();
}
"""
)
