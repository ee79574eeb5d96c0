"""The C++ behind conv2d_wgmma_b2b's text: reads a problem, and runs its blocks on what `back_to_back_machine` plays."""

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
