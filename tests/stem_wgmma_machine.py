"""The C++ around the text of a stem on Hopper that plays the GPU (see `stem_wgmma_host`): before it, and after it."""

HOST = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>
#include <ucontext.h>
#define __device__
#define __global__
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define WARPGROUP_MMA_FROM_REGISTERS(...)
#pragma GCC diagnostic ignored "-Wunknown-pragmas"

struct Index { unsigned x, y; } threadIdx, blockIdx, gridDim;
using std::max, std::min;

// Elements, as element.cuh has them.
struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct alignas(16) Chunk { unsigned words[4]; };
struct float2 { float x, y; };
float2 make_float2(float x, float y) { return {x, y}; }
float __uint_as_float(unsigned bits) { float v; memcpy(&v, &bits, 4); return v; }
unsigned __float_as_uint(float v) { unsigned bits; memcpy(&bits, &v, 4); return bits; }
float __int_as_float(int bits) { return __uint_as_float(bits); }
float __fdiv_rn(float a, float b) { return a / b; }
float __fsub_rn(float a, float b) { return a - b; }
float to_float(float v) { return v; }
float to_float(Half v) { _Float16 h; memcpy(&h, &v.bits, 2); return h; }
float to_float(BFloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
unsigned half_bits(float v) { const _Float16 h = v; unsigned short bits; memcpy(&bits, &h, 2); return bits; }
unsigned bfloat16_bits(float v) {
    unsigned bits;
    memcpy(&bits, &v, 4);
    return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
unsigned pack_pair(float low, float high, Half) { return half_bits(low) | half_bits(high) << 16; }
unsigned pack_pair(float low, float high, BFloat16) { return bfloat16_bits(low) | bfloat16_bits(high) << 16; }
unsigned round_to_tf32(unsigned bits) {
    const bool finite = (bits & 0x7f800000) != 0x7f800000;
    return finite ? bits + 0x1000 & 0xffffe000 : bits & 0x7fffff ? 0x7fffffff : bits;
}
template <int WORDS>
void round_to_tf32(unsigned (&words)[WORDS]) {
    for (unsigned& word : words) word = round_to_tf32(word);
}
float larger(float a, float b) { return a > b || a != a ? a : b; }
template <typename Element>
unsigned larger_word(unsigned a, unsigned b, Element e) {
    const auto value = [](unsigned word) { return to_float(Element{static_cast<unsigned short>(word)}); };
    return pack_pair(larger(value(a), value(b)), larger(value(a >> 16), value(b >> 16)), e);
}
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

// Threads.
struct Thread { ucontext_t context; bool ended; };
constexpr int MOST_THREADS = 512;
Thread threads[MOST_THREADS];
int block_threads;
ucontext_t scheduler;
int current;
bool progress;
std::mt19937 draw;
void rest() { swapcontext(&threads[current].context, &scheduler); }
template <typename Condition>
void wait_until(Condition condition) {
    do rest(); while (!condition());
    progress = true;
}
struct Meeting {
    int here, generation;
    void join(int count) {
        const int before = generation;
        progress = true;
        if (++here == count) here = 0, ++generation;
        wait_until([&] { return generation != before; });
    }
};
Meeting of_block, of_warpgroup[MOST_THREADS / 128], of_warp[MOST_THREADS / 32];
void __syncthreads() { of_block.join(block_threads); }
void __syncwarp() { of_warp[threadIdx.x / 32].join(32); }
void warpgroup_sync() { of_warpgroup[threadIdx.x / 128].join(128); }
unsigned offered[MOST_THREADS], addresses[MOST_THREADS];
template <typename Word>
Word __shfl_sync(unsigned, Word value, int lane) {
    Word result;
    memcpy(&offered[threadIdx.x], &value, 4);
    __syncwarp();
    memcpy(&result, &offered[threadIdx.x / 32 * 32 + lane], 4);
    __syncwarp();
    return result;
}

// Shared memory and its barriers.
unsigned char shared[1 << 18] __align__(128);
struct Barrier {
    int count, pending, phase, bytes;
    void complete_if_all_is_there() {
        if (pending == 0 && bytes == 0) pending = count, ++phase;
        progress = true;
    }
};
std::map<unsigned, Barrier> barriers_at;
const char* failure;
unsigned shared_address(const void* pointer) {
    const auto byte = static_cast<const unsigned char*>(pointer);
    if (byte >= shared && byte < shared + sizeof shared) return byte - shared;
    return 0x100000 + (reinterpret_cast<size_t>(pointer) & 0xffff);
}
void barrier_init(unsigned address, int count) { barriers_at[address] = {count, count, 0, 0}; }
void barrier_init_done() {}
bool unfenced[MOST_THREADS];  // threads that have stored since their last fence
void written_for_storing() { unfenced[threadIdx.x] = false; }
void barrier_arrive(unsigned address) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (unfenced[threadIdx.x / 32 * 32 + lane]) failure = "stores that tensor cores may not see";
    }
    Barrier& barrier = barriers_at.at(address);
    --barrier.pending;
    barrier.complete_if_all_is_there();
}
void barrier_arrive_expecting(unsigned address, int bytes) {
    barriers_at.at(address).bytes += bytes;
    barrier_arrive(address);
}
void barrier_wait(unsigned address, int parity) {
    wait_until([&] { return barriers_at.at(address).phase % 2 != parity; });
}
void let_next_kernel_start() {}
bool may_touch[MOST_THREADS];
void wait_for_earlier_kernels() { may_touch[threadIdx.x] = true; }

// The accelerator: brings 16 bytes at a time, of any that it has been asked for.
struct Fetch { unsigned destination; const unsigned char* source; int left; unsigned barrier; };
std::vector<Fetch> fetches;
int bytes_fetched;  // of pixels
const unsigned char* filters_begin;
const unsigned char* filters_end;
bool slow_filters;
void fetch_bytes(unsigned destination, const void* source, int bytes, unsigned barrier) {
    const bool aligned = destination % 16 == 0 && reinterpret_cast<size_t>(source) % 16 == 0 && bytes % 16 == 0;
    if (!aligned || bytes <= 0) failure = "a fetch that is not aligned";
    const auto first = static_cast<const unsigned char*>(source);
    const bool filters = first >= filters_begin && first < filters_end;  // they do not change
    if (!filters && !may_touch[threadIdx.x]) failure = "a fetch before earlier kernels have ended";
    if (filters && first + bytes > filters_end) failure = "a fetch behind the filters";
    if (!filters) bytes_fetched += bytes;
    fetches.push_back({destination, first, bytes, barrier});
}
void go_on_fetching() {
    const unsigned which = draw() % fetches.size();
    Fetch& fetch = fetches[which];
    if (slow_filters && fetch.source >= filters_begin && fetch.source < filters_end && draw() % 64) return;
    fetch.left -= 16;
    if (fetch.destination + fetch.left + 16 > sizeof shared) { failure = "a fetch behind shared memory"; return; }
    memcpy(shared + fetch.destination + fetch.left, fetch.source + fetch.left, 16);
    Barrier& barrier = barriers_at.at(fetch.barrier);
    barrier.bytes -= 16;
    barrier.complete_if_all_is_there();
    if (fetch.left == 0) fetches.erase(fetches.begin() + which);
}

unsigned char* y_begin;
unsigned char* y_end;
unsigned char* writes;  // of each 8 bytes of y
void store(void* place, const void* source, int bytes) {
    const auto byte = static_cast<unsigned char*>(place);
    if (byte < shared || byte >= shared + sizeof shared) {
        if (byte < y_begin || byte + bytes > y_end) failure = "a store outside of y";
        if (!may_touch[threadIdx.x]) failure = "a store before earlier kernels have ended";
        if (failure) return;
        for (int i = 0; i < bytes; i += 8) ++writes[(byte - y_begin + i) / 8];
    } else {
        unfenced[threadIdx.x] = true;
    }
    if (reinterpret_cast<size_t>(place) % bytes) failure = "a store that is not aligned";
    memcpy(place, source, bytes);
}
Chunk load_chunk(const void* source) { Chunk chunk; memcpy(&chunk, source, 16); return chunk; }
void store_chunk(void* place, const Chunk& chunk) { store(place, &chunk, 16); }
template <typename Element>
void store_pair(void* place, float low, float high) {
    const float2 pair = {low, high};
    store(place, &pair, 8);
}
template <typename Element>
float2 load_pair(const void* source) {
    float2 pair;
    if (reinterpret_cast<size_t>(source) % 8) failure = "a load that is not aligned";
    memcpy(&pair, source, 8);
    return pair;
}
template <int COUNT>
void store_matrices(unsigned address, const unsigned (&words)[COUNT]) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 32;
    addresses[threadIdx.x] = address;
    __syncwarp();
    for (int i = 0; i < COUNT; ++i) {
        for (int half = 0; half < 2; ++half) {
            const unsigned row = addresses[first + 8 * i + lane % 4 * 2 + half];
            if (row % 16) failure = "a row of a matrix is not aligned";
            const unsigned short element = words[i] >> 16 * half;
            memcpy(shared + row + lane / 4 * 2, &element, 2);
        }
    }
    __syncwarp();
}

// Tensor cores.
struct Product { unsigned a[4]; unsigned long long b; bool accumulate; float* sums; int columns; unsigned group; };
std::vector<Product> asked[MOST_THREADS];
unsigned committed[MOST_THREADS], waited[MOST_THREADS];  // groups of products, counted from a random number
void warpgroup_fence() {}
void compute_products(unsigned pending);
void warpgroup_commit() {
    // Two in a row are computed at once, the next two when they are waited for.
    if (++committed[threadIdx.x] / 2 % 2) compute_products(0);
}
void ask(float* sums, int columns, const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    asked[threadIdx.x].push_back({{a[0], a[1], a[2], a[3]}, b, accumulate, sums, columns, committed[threadIdx.x] + 1});
    for (int i = 0; i < columns / 2 && !accumulate; ++i) sums[i] = NAN;
}
template <typename Element, int N>
void warpgroup_mma(float (&sums)[N / 2], const unsigned long long (&a)[2], unsigned long long b, bool accumulate) {
    ask(sums, N, {unsigned(a[0]), unsigned(a[0] >> 32), unsigned(a[1]), unsigned(a[1] >> 32)}, b, accumulate);
}
template <int N>
void warpgroup_mma_tf32(float (&sums)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    ask(sums, N, a, b, accumulate);
}
template <int COUNT>
void warpgroup_results(float (&)[COUNT]) {}
template <typename Operands>
void warpgroup_operands(Operands&) {}
template <typename Element>
float element_at(const void* place) {
    if constexpr (sizeof(Element) == 4) {
        unsigned bits;
        memcpy(&bits, place, 4);
        return __uint_as_float(bits & 0xffffe000);  // the rest is cut off
    } else {
        Element element;
        memcpy(&element, place, 2);
        return to_float(element);
    }
}
template <typename Element>
void compute(unsigned which) {
    constexpr int SIZE = sizeof(Element), PER_WORD = 4 / SIZE, PER_CHUNK = 16 / SIZE, DEPTH = 2 * PER_CHUNK;
    const int thread = threadIdx.x, t = thread % 4;
    const Product& product = asked[thread][which];
    float rows[2][DEPTH];
    for (int i = 0; i < 2; ++i) {
        for (int k = 0; k < DEPTH; ++k) {
            const Product& held = asked[thread - t + k % PER_CHUNK / PER_WORD][which];
            const unsigned word = held.a[k / PER_CHUNK * 2 + i] >> k % PER_WORD * 16;
            rows[i][k] = element_at<Element>(&word);
        }
    }
    const unsigned start = (product.b & 0x3fff) * 16, leading = (product.b >> 16 & 0x3fff) * 16;
    const unsigned stride = (product.b >> 32 & 0x3fff) * 16;
    if (product.b >> 49) failure = "an operand of another layout";
    for (int v = 0; v < product.columns / 2; ++v) {
        const int column = v / 4 * 8 + 2 * t + v % 2;
        double sum = product.accumulate ? product.sums[v] : 0;
        for (int k = 0; k < DEPTH; ++k) {
            const unsigned chunk = start + column / 8 * stride + k / PER_CHUNK * leading + column % 8 * 16;
            sum += static_cast<double>(rows[v % 4 / 2][k]) * element_at<Element>(shared + chunk + k % PER_CHUNK * SIZE);
        }
        const float nearest = sum;
        product.sums[v] = std::abs(nearest) > std::abs(sum) ? std::nextafter(nearest, 0.0f) : nearest;  // toward zero
    }
}
void wait_for_products(unsigned pending);
template <int PENDING>
void warpgroup_wait() { wait_for_products(PENDING); }
"""

MAIN = r"""
void compute_products(unsigned pending) {
    auto& products = asked[threadIdx.x];
    unsigned count = 0;
    while (count < products.size() && products[count].group + pending <= committed[threadIdx.x]) ++count;
    warpgroup_sync();
    for (unsigned i = 0; i < count; ++i) compute<ELEMENT>(i);
    warpgroup_sync();
    products.erase(products.begin(), products.begin() + count);
}
void wait_for_products(unsigned pending) {
    const unsigned last = committed[threadIdx.x];
    const auto& products = asked[threadIdx.x];
    if (!products.empty() && products.back().group > last) failure = "products that are not committed";
    for (int i = draw() % 4; i > 0; --i) rest();
    compute_products(pending);
    waited[threadIdx.x] = last - pending;
}
static std::function<void()> program;
static void run() {
    program();
    threads[current].ended = progress = true;
    rest();
}
extern "C" __attribute__((visibility("default"))) const char* run_block(
    int number, int seed, int grid, int block, int group, const void* x, const void* filter, const float* bias,
    const float* mean, const float* std, void* y, unsigned char* counts, long long y_bytes, long long filter_bytes,
    const StemParams* params, int stripe_rows) {
    kernel_number = number;
    draw.seed(seed);
    failure = nullptr;
    block_threads = THREADS;
    gridDim.x = grid, blockIdx.x = block, blockIdx.y = group;
    y_begin = static_cast<unsigned char*>(y), y_end = y_begin + y_bytes, writes = counts;
    filters_begin = static_cast<const unsigned char*>(filter), filters_end = filters_begin + filter_bytes;
    memset(shared, 0xff, sizeof shared);
    barriers_at.clear();
    fetches.clear();
    of_block = {};
    for (Meeting& meeting : of_warpgroup) meeting = {};
    for (Meeting& meeting : of_warp) meeting = {};
    program = [=] {
        KERNEL(static_cast<const INPUT*>(x), static_cast<const ELEMENT*>(filter), bias, mean, std,
               static_cast<ELEMENT*>(y), *params, stripe_rows);
    };
    static std::vector<char> stacks[THREADS];
    for (int i = 0; i < THREADS; ++i) {
        stacks[i].resize(1 << 16);
        asked[i].clear();
        committed[i] = waited[i] = seed;
        may_touch[i] = unfenced[i] = threads[i].ended = false;
        getcontext(&threads[i].context);
        threads[i].context.uc_stack.ss_sp = stacks[i].data();
        threads[i].context.uc_stack.ss_size = stacks[i].size();
        makecontext(&threads[i].context, run, 0);
    }
    const int slow = draw() % (THREADS / 128 + 1);  // which warpgroup, or none
    slow_filters = draw() % 2;
    for (int idle = 0, ended = 0; ended < THREADS && !failure;) {
        for (int i = draw() % 128; i > 0 && !fetches.empty() && !failure; --i) go_on_fetching();
        const int warp = draw() % (THREADS / 32);
        if (warp / 4 == slow && draw() % 8) continue;
        progress = false;
        for (int lane = 0; lane < 32; ++lane) {
            current = warp * 32 + lane;
            if (threads[current].ended) continue;
            threadIdx.x = current;
            swapcontext(&scheduler, &threads[current].context);
            ended += threads[current].ended;
        }
        idle = progress ? 0 : idle + 1;
        if (idle == 20000) failure = "nobody can go on";
    }
    const bool works = !barriers_at.empty();
    if (!failure && works && barriers_at.size() != sizeof(Barriers) / 8) failure = "barriers that are not initialised";
    for (int i = 0; i < THREADS; ++i) {
        if (!failure && waited[i] != committed[i]) failure = "products that nobody waits for";
    }
    if (!failure && !fetches.empty()) failure = "a fetch that nobody waits for";
    return failure;
}
extern "C" __attribute__((visibility("default"))) int count_bytes_fetched() { return std::exchange(bytes_fetched, 0); }
"""
