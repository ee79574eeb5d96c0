"""The C++ that runs the threads of a block, or a cluster of two, on what `back_to_back_machine` plays."""

FETCH = r"""
void fetch(unsigned place, std::vector<float> rows, unsigned barrier, int map) {
    if (place % 1024) fail("a swizzle begins here");
    for (unsigned i = 0; i < rows.size(); ++i) at(place + i * SIZE, here()) = NOTHING;
    fetches.push_back({place, std::move(rows), barrier, map, blockIdx.z});
}
"""
"""Asks for a box; before what the accelerator is asked by a kernel."""

SCHEDULER = r"""
void call_kernel();
void carry_out(const Store& box);  // of what is stored, where it goes
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
void run() {
    call_kernel();
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
    const int slow_map = draw() % MAPS;  // its boxes come after all others, or there are none
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
            carry_out(stores[number]);
            ++routines[stores[number].thread].stored;
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
"""
"""Behind that; needs `call_kernel` and `carry_out`, and MAPS, CLUSTER and THREADS."""
