"""The C++ around conv2d_wgmma_b2b's text that plays the GPU (see `back_to_back_host`): before it, and after it."""

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

struct Index { int x, y, z; } threadIdx, blockIdx, gridDim;
struct TensorMap { int id; };
struct float2 { float x, y; };
struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
constexpr int SIZE = sizeof(ELEMENT), PER_ROW = 128 / SIZE, DEPTH = 32 / SIZE;  // elements of a row, of an instruction
using Word = std::conditional_t<SIZE == 4, unsigned, unsigned short>;
constexpr Word NOTHING = SIZE == 4 ? 0x7fffffff : 0x7fff;  // a NaN
enum { PIXELS, FIRST, SECOND, ADDED, SHORTCUT_FILTERS, OUTPUTS, NEXT_FILTERS, NEXT_OUTPUTS };
unsigned char shared[1];  // where a block's shared memory begins: 0, of each its own

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
    if (pointer == shared) return 0;
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
void __syncwarp() {}
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
template <int PENDING>
void store_wait() {
    const std::vector<long>& groups = self().stores;
    self().stores_until = groups.size() > PENDING ? groups[groups.size() - 1 - PENDING] : 0;
    rest();
}
"""
)

MAIN = r"""
Conv2dParams first, second, shortcut_alone;
int with_biases, in_place, next_relu;
std::vector<float> x, x0, first_filter, second_filter, shortcut_filter, next_filter, first_bias, second_bias, next_bias;
std::vector<float> residual, y, z;

void fetch(unsigned place, std::vector<float> rows, unsigned barrier, int map) {
    if (place % 1024) fail("a swizzle begins here");
    for (unsigned i = 0; i < rows.size(); ++i) at(place + i * SIZE, here()) = NOTHING;
    fetches.push_back({place, std::move(rows), barrier, map, blockIdx.z});
}
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
    if (map.id == SECOND) return box_of(second_filter, 64, second.K, first.K);
    if (map.id == SHORTCUT_FILTERS) return box_of(shortcut_filter, 64, second.K, SHORTCUT);
    if (map.id == NEXT_FILTERS) return box_of(next_filter, MIDDLE, NEXT, second.K);
    if (map.id != ADDED || SHORTCUT > 0 || !self().waited) fail("earlier kernels may not have written the residual");
    box_of(in_place ? y : residual, TILE_M, second.gemm_m, second.K);
}
void store_box(const TensorMap& map, unsigned place, int column, int row) {
    if ((map.id != OUTPUTS && map.id != NEXT_OUTPUTS) || place % 1024) fail("this is no output");
    stores.push_back({place, map.id, column, row, current});
    ++self().begun;
}
void see(unsigned place, int bytes, int block) {
    for (const Routine& routine : routines) {
        const auto next = routine.unseen.lower_bound(place);
        const bool unseen = next != routine.unseen.end() && *next < place + bytes;
        if (routine.block == block && unseen) fail("what is stored is not visible yet");
    }
}
void copy(const Copy& of) {
    see(of.source, of.bytes, of.block);
    Block& other = blocks[1 - of.block];
    memcpy(other.memory + of.destination, blocks[of.block].memory + of.source, of.bytes);
    Barrier& barrier = other.barriers.at(of.barrier);
    barrier.bytes -= of.bytes;
    complete(barrier);
}
void store(const Store& box) {
    const Block& block = blocks[routines[box.thread].block];
    see(box.place, 64 * 128, routines[box.thread].block);
    std::vector<float>& output = box.map == OUTPUTS ? y : z;
    for (int i = 0; i < 64 && box.row + i < second.gemm_m; ++i) {
        float* const row = &output[long(box.row + i) * (box.map == OUTPUTS ? second.K : NEXT) + box.column];
        for (int k = 0; k < PER_ROW; ++k) row[k] = value_at(box.place + i * 128 + k * SIZE, block);
    }
    ++routines[box.thread].stored;
}
void run() {
    KERNEL({PIXELS}, {FIRST}, {SECOND}, {ADDED}, {SHORTCUT_FILTERS}, {OUTPUTS}, {NEXT_FILTERS}, {NEXT_OUTPUTS},
           with_biases ? first_bias.data() : nullptr, with_biases ? second_bias.data() : nullptr,
           with_biases ? next_bias.data() : nullptr, first, second, next_relu);
    self().ended = true;
    if (self().stored != self().begun) fail("shared memory ends before all is stored");
    rest();
}
bool can_go_on(const Routine& routine) {
    if (routine.ended) return false;
    Block& block = blocks[routine.block];
    if (routine.for_all) return block.at_sync * CLUSTER == int(routines.size());
    if (routine.for_cluster) return in_cluster >= routine.in_cluster * int(routines.size());
    if (routine.parity >= 0) return block.barriers.at(routine.barrier).phase % 2 != routine.parity;
    if (routine.thread < 128) return true;
    const auto& warp = block.warps[routine.thread / 32 - 4];
    if (routine.collectives > 0 && warp[routine.collectives - 1].arrived < 32) return false;
    const Multiplier& multiplier = block.multipliers[routine.thread / 128 - 1];
    return multiplier.computed >= routine.until && routine.stored >= routine.stores_until &&
           multiplier.synced >= 128 * routine.syncs;
}
void cluster() {
    const int threads = CLUSTER * (THREADS - 127);
    static std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 16));
    in_cluster = 0;
    routines.assign(threads, {});
    for (int i = 0; i < threads; ++i) {
        Routine& routine = routines[i];
        const int number = i / CLUSTER;
        routine.block = i % CLUSTER;
        routine.thread = number == THREADS - 128 ? 0 : 128 + number;
        getcontext(&routine.context);
        routine.context.uc_stack.ss_sp = stacks[i].data();
        routine.context.uc_stack.ss_size = stacks[i].size();
        makecontext(&routine.context, ::run, 0);
    }
    for (Block& block : blocks) {
        block.barriers.clear(), block.at_sync = 0;
        for (Multiplier& multiplier : block.multipliers) multiplier = {};
        for (auto& warp : block.warps) warp.clear();
        memset(block.memory, 0xff, sizeof block.memory);
    }
    const int lazy = draw() % 8;  // who is slow: nobody, fetches, stores, one of three consumers, copies, a block
    const int slow_map = draw() % (NEXT_OUTPUTS + 1);  // its boxes come after all others, or there are none
    for (;;) {
        std::vector<int> able;
        for (int i = 0; i < threads; ++i) if (can_go_on(routines[i])) able.push_back(i);
        std::vector<std::pair<Multiplier*, Block*>> busy;
        for (Block& block : blocks) {
            for (Multiplier& multiplier : block.multipliers) {
                const auto& instructions = multiplier.instructions;
                if (!instructions.empty() && instructions.front().issued == 128) busy.push_back({&multiplier, &block});
            }
        }
        if (able.empty() && busy.empty() && fetches.empty() && stores.empty() && copies.empty()) break;
        const bool stuck = able.empty() && busy.empty();
        std::vector<int> coming;
        const bool only_fetches = stuck && stores.empty() && copies.empty();
        const bool last = only_fetches && std::all_of(fetches.begin(), fetches.end(), [&](const Box& box) {
            return box.map == slow_map;
        });
        for (int i = 0; i < int(fetches.size()); ++i) if (last || fetches[i].map != slow_map) coming.push_back(i);
        if (!coming.empty() && (only_fetches || draw() % (lazy == 1 ? 50 : 3) == 0)) {
            const int number = coming[draw() % coming.size()];
            const Box box = std::move(fetches[number]);
            fetches.erase(fetches.begin() + number);
            Block& block = blocks[box.block];
            for (unsigned i = 0; i < box.rows.size(); ++i) at(box.place + i * SIZE, block) = bits_of(box.rows[i]);
            Barrier& barrier = block.barriers.at(box.barrier);
            barrier.bytes -= box.rows.size() * SIZE;
            complete(barrier);
        } else if (!copies.empty() && ((stuck && stores.empty()) || draw() % (lazy == 6 ? 50 : 3) == 0)) {
            const int number = draw() % copies.size();
            copy(copies[number]);
            copies.erase(copies.begin() + number);
        } else if (!stores.empty() && (stuck || draw() % (lazy == 2 ? 50 : 3) == 0)) {
            // Those of one thread in their order, as it waits for the oldest.
            int number = draw() % stores.size();
            for (int i = 0; i < number; ++i) if (stores[i].thread == stores[number].thread) number = i;
            store(stores[number]);
            stores.erase(stores.begin() + number);
        } else if (!busy.empty() && (able.empty() || draw() % 4 == 0)) {
            const auto& [multiplier, block] = busy[draw() % busy.size()];
            compute(*multiplier, *block);
        } else {
            // Most go on at once, so that runs are short; a slow consumer seldom does.
            for (int i : able) {
                const bool slow = lazy >= 3 && routines[i].thread / 128 == lazy - 2;
                const bool slow_block = lazy == 7 && routines[i].block > 0;
                if (draw() % (slow_block ? 40 : slow ? 8 : 2)) continue;
                current = i, threadIdx.x = routines[i].thread, blockIdx.z = routines[i].block;
                swapcontext(&scheduler, &routines[i].context);
            }
        }
    }
    for (const Routine& routine : routines) if (!routine.ended) fail("nobody can go on");
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
