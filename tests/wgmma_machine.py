"""C++ that plays the GPU for one block on Hopper's warpgroup instructions in TF32: with data, threads in random turns.

Boxes lie in shared memory as the accelerator leaves them, some time after they were asked for, and NaN does until then;
an instruction takes its operands as the PTX ISA lays them out, at any time until it is waited for. Whatever is read too
early, or from a wrong place, makes a wrong result.
"""

from wgmma_host import WAITS

MACHINE = (
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
unsigned char shared[227 << 10] __align__(1024);

struct Barrier { int count, pending, phase; long bytes; };
struct Box { unsigned place; std::vector<float> rows; unsigned barrier; };
struct Store { int routine; unsigned place; int column, row; };
struct Instruction {
    int columns;
    unsigned long long a, b;  // operands in shared memory
    bool a_in_registers, accumulate;
    float* sums[128];
    unsigned words[128][4];  // of a, where it is in registers
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
    const long* count;         // waits until this is another than
    long seen;
};

std::map<const void*, unsigned> addresses;
std::map<unsigned, Barrier> barriers_at;
std::vector<Box> fetches;
std::vector<Store> stores;
Consumer consumers[3];  // or two of them
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
float2 make_float2(float x, float y) { return {x, y}; }
float relu_of(float x) { return x < 0.0f ? 0.0f : x; }
float least_kept(bool with_relu) { return with_relu ? 0.0f : -INFINITY; }
float relu_of(float x, float least) { return x < least ? 0.0f : x; }

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
void prefetch_map(const TensorMap&) {}
void wait_for_earlier_kernels() {}

template <int COUNT>
void warpgroup_results(float (&)[COUNT]) {}
// `words` is null where `a` lies in shared memory.
void issue(int columns, float* sums, const unsigned* words, unsigned long long a, unsigned long long b,
           bool accumulate) {
    Consumer& own = consumer();
    const long number = self().issued++ - own.computed;
    if (number == long(own.instructions.size())) own.instructions.push_back({columns, a, b, words != 0, accumulate});
    Instruction& instruction = own.instructions[number];
    if (instruction.a != a || instruction.b != b || instruction.accumulate != accumulate) {
        fail("threads issue different instructions");
    }
    instruction.sums[threadIdx.x % 128] = sums;
    if (words) memcpy(instruction.words[threadIdx.x % 128], words, 16);
    ++instruction.issued;
}
double tf32_at(unsigned long long operand, int row, int k) {
    const unsigned address = unsigned(operand & 0x3fff) * 16 + row * 128 + k * 4;
    return bits_as_float(__float_as_uint(at(address)) & 0xffffe000u);
}
// Products of TF32 are exact in double, and so are the sums of small integers.
void compute(Consumer& own) {
    Instruction& in = own.instructions.front();
    double a[64][8];
    for (int thread = 0; in.a_in_registers && thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, k = thread % 4;
        const unsigned* const words = in.words[thread];
        for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][k + i / 2 * 4] = bits_as_float(words[i] & 0xffffe000u);
    }
    for (int i = 0; !in.a_in_registers && i < 64 * 8; ++i) a[i / 8][i % 8] = tf32_at(in.a, i / 8, i % 8);
    std::vector<double> b(in.columns * 8);
    for (int i = 0; i < in.columns * 8; ++i) b[i] = tf32_at(in.b, i / 8, i % 8);
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
// What the accelerator stores some time later, and a thread's wait for all that it has asked for.
void store(unsigned place, int column, int row) { stores.push_back({current, place, column, row}); }
void wait_for_stores() {
    self().storing = true;
    rest();
    self().storing = false;
}
// What the accelerator brings some time later.
void fetch(unsigned place, std::vector<float> rows, unsigned barrier) {
    for (unsigned i = 0; i < rows.size(); ++i) at(place + i * 4) = NAN;
    fetches.push_back({place, std::move(rows), barrier});
}
"""
)
"""Before the kernel's text."""

BLOCK = r"""
void call_kernel();
void carry_out(const Store& store);
void run() {
    call_kernel();
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
    if (routine.count) return *routine.count != routine.seen;
    return routine.thread < 128 || consumers[routine.thread / 128 - 1].computed >= routine.until;
}
// One block, with these of its threads.
void block(const std::vector<int>& threads) {
    static std::vector<std::vector<char>> stacks;
    const int count = threads.size();
    stacks.resize(count, std::vector<char>(1 << 16));
    barriers_at.clear(), at_sync = 0;
    routines.assign(count, {});
    for (int i = 0; i < count; ++i) {
        Routine& routine = routines[i];
        routine.thread = threads[i];
        getcontext(&routine.context);
        routine.context.uc_stack.ss_sp = stacks[i].data();
        routine.context.uc_stack.ss_size = stacks[i].size();
        makecontext(&routine.context, ::run, 0);
    }
    for (Consumer& consumer : consumers) consumer = {};
    memset(shared, 0xff, sizeof shared);
    const int lazy = draw() % 5;  // who is slow: nobody, the accelerator, one of the consumers
    for (;;) {
        std::vector<int> able;
        for (int i = 0; i < count; ++i) if (can_go_on(routines[i])) able.push_back(i);
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
"""
"""Behind it; needs `call_kernel`, what a thread does, and `carry_out`, what a store does."""
