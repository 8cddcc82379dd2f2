// The walk of the kernel that owns keys (dK, dV): the transpose of row_walk.cuh.
//
// Key blocks: a CTA works on two neighbouring key blocks of one kv head, one a consumer warpgroup. The scout lists the
// query blocks of every head of the group that any of them meets; the loader brings q, dout, lse and delta of each
// once.
//
// Tiles of compact columns of one query head are few and of very different weight: two neighbours are the work of a
// whole cluster, whose CTAs deal the rows out among themselves and add up what they found.
#pragma once

#include <climits>

#include "sm90/row_walk.cuh"

namespace mtraining::sm90 {

// kCluster: CTAs that share the keys and deal the rows out; 1, or more for compact columns.
template <int kHeadDim_, int kCluster_>
struct KeyPlan {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kCluster = kCluster_;
    static constexpr bool kColumns = kCluster > 1;  // keys are compact columns
    static constexpr int kKeyBlocks = 2;
    static constexpr int kThreads = 128 * (kKeyBlocks + 1);
    static constexpr int kConsumerRegisters = 224;
    static constexpr int kProducerRegisters = 56;
    static_assert(register_pool(kThreads) >= 128 * (kKeyBlocks * kConsumerRegisters + kProducerRegisters));

    static constexpr uint32_t kTileBytes = 64 * kHeadDim * 2;
    static constexpr uint32_t kStatisticsBytes = 64 * 4;
    static constexpr uint32_t kStageBytes = 2 * kTileBytes + 2 * kStatisticsBytes;
    static constexpr uint32_t kSharedLimit = 227 * 1024 - 4096;
    static constexpr int kFit = (kSharedLimit - kKeyBlocks * 2 * kTileBytes) / kStageBytes;
    static constexpr int kStages = kFit < 6 ? kFit : 6;
    static constexpr int kQueue = 32;
};

struct KeyMaps {
    CUtensorMap k, v, q, dout;
};

// Both backward operators in one form. For compact columns: one chunk, kv_heads == heads, kv_blocks = tiles
// of the compact columns, and mask.column_list is given.
struct KeyParams {
    Shape shape;
    Mask mask;
    const float* lse;
    const float* delta;
    ChunkView<float> dk, dv;
    int key_rows;  // rows of dk and dv
    float scale;
};

template <typename Plan>
struct KeyShared {
    static constexpr int kKeyBlocks = Plan::kKeyBlocks;
    static constexpr int kConsumers = kKeyBlocks;
    static constexpr int kStages = Plan::kStages;
    using Entry = TileEntry<kConsumers>;
    alignas(1024) uint8_t k[kKeyBlocks][Plan::kTileBytes];
    alignas(1024) uint8_t v[kKeyBlocks][Plan::kTileBytes];
    alignas(1024) uint8_t q[Plan::kStages][Plan::kTileBytes];
    alignas(1024) uint8_t dout[Plan::kStages][Plan::kTileBytes];
    alignas(16) float lse[Plan::kStages][64];
    alignas(16) float delta[Plan::kStages][64];
    Entry queue[Plan::kQueue];
    Entry loaded[Plan::kStages];
    RingBarriers<Plan::kQueue> listing;
    RingBarriers<Plan::kStages> ring;
    uint64_t keys_full[kKeyBlocks], keys_empty[kKeyBlocks];
    TicketLists<kConsumers> tickets;

    __device__ void init() {
        tickets.init();
        listing.init(1);
        ring.init(4 * kWarpArrivals * kConsumers);
        for (int w = 0; w < kKeyBlocks; ++w) {
            mbarrier_init(&keys_full[w], 1);
            mbarrier_init(&keys_empty[w], 4 * kWarpArrivals);
        }
        mbarrier_init_fence();
    }
};

// The keys of one visit, heaviest (first keys) to lightest. Key blocks: (batch, kv head) outermost, so that CTAs that
// run together share queries. Column tiles: those of all heads by weight, since they are few and each head has queries
// of its own.
template <typename Plan>
struct KeyTile {
    int batch, kv_head, chunk, first;

    __device__ static __forceinline__ KeyTile at(const Shape& shape, int index) {
        const int heads = shape.batch * shape.kv_heads;
        KeyTile tile;
        tile.chunk = index % shape.chunks;
        index /= shape.chunks;
        tile.first = (Plan::kColumns ? index / heads : index % steps(shape)) * Plan::kKeyBlocks;
        index = Plan::kColumns ? index % heads : index / steps(shape);
        tile.kv_head = index % shape.kv_heads;
        tile.batch = index / shape.kv_heads;
        return tile;
    }

    __host__ __device__ static int steps(const Shape& shape) {
        return (shape.kv_blocks + Plan::kKeyBlocks - 1) / Plan::kKeyBlocks;
    }

    __host__ __device__ static int count(const Shape& shape) {
        return shape.batch * shape.kv_heads * shape.chunks * steps(shape);
    }
};

// The items of one CTA. With columns that is one, its cluster's: clusters are launched heaviest first as
// multiprocessors fall free, which deals items of very different weight out evenly.
template <typename Plan>
struct KeyItems {
    int count, item;
    PersistentLoop loop;

    __device__ __forceinline__ explicit KeyItems(const Shape& shape) : count(KeyTile<Plan>::count(shape)) {
        item = Plan::kColumns ? static_cast<int>(blockIdx.x) / Plan::kCluster : loop.item;
    }

    __device__ __forceinline__ bool left() const { return item < count; }

    __device__ __forceinline__ void advance() {
        loop.advance();
        item = Plan::kColumns ? count : loop.item;
    }
};

template <typename Plan>
struct KeyScout {
    static constexpr int kKeyBlocks = Plan::kKeyBlocks;
    using Entry = typename KeyShared<Plan>::Entry;

    const Shape& shape;
    const Mask& mask;
    KeyShared<Plan>& shared;
    RingPosition<Plan::kQueue> position;

    __device__ __forceinline__ void list(int head, int index, uint32_t diagonal, const uint64_t (&keys)[kKeyBlocks]) {
        if (warp_leader()) {
            const int s = position.stage;
            mbarrier_wait(&shared.listing.empty[s], position.parity ^ 1);
            Entry& entry = shared.queue[s];
            entry.chunk = head;
            entry.index = index;
            entry.diagonal = diagonal;
#pragma unroll
            for (int w = 0; w < kKeyBlocks; ++w) entry.columns[w] = keys[w];
            mbarrier_arrive(&shared.listing.full[s]);
        }
        position.advance();
    }

    __device__ __forceinline__ void mark(int kind, int index) {
        const uint64_t none[kKeyBlocks] = {};
        list(kind, index, 0, none);
    }

    __device__ __forceinline__ const int64_t* words(int batch, int head) const {
        return mask.slash_words + (int64_t{batch} * shape.heads + head) * ((shape.blocks + 63) / 64);
    }

    __device__ __forceinline__ void slash_rows(const KeyTile<Plan>& tile) {
        KeyBlocks<kKeyBlocks> keys;
        const int32_t* blocks = mask.kv_blocks + int64_t{tile.chunk} * shape.kv_blocks;
#pragma unroll
        for (int w = 0; w < kKeyBlocks; ++w) {
            keys.block[w] = tile.first + w < shape.kv_blocks ? __ldg(blocks + tile.first + w) : kNoBlock;
        }
        const int group = shape.heads / shape.kv_heads;
        for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
            const int64_t* bits = words(tile.batch, head);
            scan_blocks(
                shape.q_blocks, [&](int index) { return __ldg(mask.q_blocks + index); },
                [&](int block) { return keys.reach(block); },
                [&](int block) { return keys.need(bits, block, __ldg(mask.doc_start + block)); },
                [&](int index, Need need) {
                    uint64_t all[kKeyBlocks];
#pragma unroll
                    for (int w = 0; w < kKeyBlocks; ++w) all[w] = (need.needed >> w & 1) ? kAllColumns : 0;
                    list(head, index, need.diagonal, all);
                });
        }
    }

    // The columns of the tiles, which the lanes hold, and the blocks they lie in.
    struct HeldColumns {
        int position[kKeyBlocks][2];  // -1: none
        int lowest = INT_MAX, highest = -1;
    };

    __device__ __forceinline__ HeldColumns hold_columns(const KeyTile<Plan>& tile) const {
        const int32_t* columns = mask.column_list + (int64_t{tile.batch} * shape.heads + tile.kv_head) * shape.columns;
        HeldColumns held;
#pragma unroll
        for (int i = 0; i < 2 * kKeyBlocks; ++i) {
            const int slot = tile.first * 64 + 32 * i + static_cast<int>(threadIdx.x) % 32;
            const int position = slot < shape.columns ? __ldg(columns + slot) : -1;
            held.position[i / 2][i % 2] = position;
            if (position >= 0) held.lowest = min(held.lowest, position >> 6);
            held.highest = max(held.highest, position >> 6);
        }
        held.lowest = __reduce_min_sync(0xFFFFFFFF, held.lowest);
        held.highest = __reduce_max_sync(0xFFFFFFFF, held.highest);
        return held;
    }

    // This CTA's share of the rows that attend some of the columns: CTA r of the cluster takes the rows r, r +
    // kCluster,
    // ... Many lie before all of the columns: 32 rows are looked at together.
    __device__ __forceinline__ void column_rows(const KeyTile<Plan>& tile) {
        const HeldColumns held = hold_columns(tile);
        QueryBlocks<1> row;
        row.words = words(tile.batch, tile.kv_head);
        const int share = static_cast<int>(blockIdx.x) % Plan::kCluster;
        const int rows = (shape.q_blocks - share + Plan::kCluster - 1) / Plan::kCluster;
        for (int base = rows > 0 ? (rows - 1) / 32 * 32 : -1; base >= 0; base -= 32) {
            const int lane = base + static_cast<int>(threadIdx.x) % 32;
            const int block = lane < rows ? __ldg(mask.q_blocks + lane * Plan::kCluster + share) : kNoBlock;
            const int start = lane < rows ? __ldg(mask.doc_start + block) : 0;
            uint32_t found = __ballot_sync(0xFFFFFFFF, block > held.lowest && start <= held.highest);
            while (found != 0) {
                const int source = 31 - __clz(found);
                found ^= 1u << source;
                row.block[0] = __shfl_sync(0xFFFFFFFF, block, source);
                row.start[0] = __shfl_sync(0xFFFFFFFF, start, source);
                bool active[kKeyBlocks][2];
#pragma unroll
                for (int i = 0; i < 2 * kKeyBlocks; ++i) {  // all loads are in flight before the first vote
                    active[i / 2][i % 2] = row.column_active(0, held.position[i / 2][i % 2]);
                }
                uint64_t bits[kKeyBlocks];
                bool any = false;
#pragma unroll
                for (int w = 0; w < kKeyBlocks; ++w) {
                    const uint32_t low = __ballot_sync(0xFFFFFFFF, active[w][0]);
                    const uint32_t high = __ballot_sync(0xFFFFFFFF, active[w][1]);
                    bits[w] = static_cast<uint64_t>(high) << 32 | low;
                    any |= bits[w] != 0;
                }
                if (any) list(tile.kv_head, (base + source) * Plan::kCluster + share, 0, bits);
            }
        }
    }

    __device__ __forceinline__ void run() {
        for (KeyItems<Plan> items(shape); items.left(); items.advance()) {
            const auto tile = KeyTile<Plan>::at(shape, items.item);
            mark(Entry::kBegin, items.item);
            if constexpr (Plan::kColumns) {
                column_rows(tile);
            } else {
                slash_rows(tile);
            }
            mark(Entry::kEnd, items.item);
        }
        mark(Entry::kStop, 0);
    }
};

// One thread: turns queue entries into copies.
template <typename Plan>
struct KeyLoader {
    static constexpr int kKeyBlocks = Plan::kKeyBlocks;
    using Entry = typename KeyShared<Plan>::Entry;

    const KeyParams& params;
    const KeyMaps& maps;
    KeyShared<Plan>& shared;
    TileDealer<KeyShared<Plan>> dealer;
    RingPosition<Plan::kQueue> listing;
    uint32_t keys_parity = 0;
    int batch = 0;

    __device__ __forceinline__ void begin(int index) {
        const auto tile = KeyTile<Plan>::at(params.shape, index);
        batch = tile.batch;
#pragma unroll
        for (int w = 0; w < kKeyBlocks; ++w) {
            uint64_t* full = &shared.keys_full[w];
            const int row = (tile.first + w) * kBlock;
            mbarrier_wait(&shared.keys_empty[w], keys_parity ^ 1);
            mbarrier_arrive_expect(full, 2 * Plan::kTileBytes);
            load_tile<Plan::kHeadDim>(&maps.k, shared.k[w], row, tile.kv_head, tile.batch, tile.chunk, full);
            load_tile<Plan::kHeadDim>(&maps.v, shared.v[w], row, tile.kv_head, tile.batch, tile.chunk, full);
        }
        keys_parity ^= 1;
    }

    __device__ __forceinline__ void load_rows(const Entry& entry, int s) {
        uint64_t* full = &shared.ring.full[s];
        if (entry.chunk == Entry::kEnd) {
            mbarrier_arrive(full);
            return;
        }
        const int head = entry.chunk;
        const int row = entry.index * kBlock;
        mbarrier_arrive_expect(full, Plan::kStageBytes);
        load_tile<Plan::kHeadDim>(&maps.q, shared.q[s], row, head, batch, 0, full);
        load_tile<Plan::kHeadDim>(&maps.dout, shared.dout[s], row, head, batch, 0, full);
        const int64_t at = (int64_t{batch} * params.shape.heads + head) * params.shape.q_blocks * kBlock + row;
        bulk_load(shared.lse[s], params.lse + at, Plan::kStatisticsBytes, full);
        bulk_load(shared.delta[s], params.delta + at, Plan::kStatisticsBytes, full);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            mbarrier_wait(&shared.listing.full[listing.stage], listing.parity);
            const Entry entry = shared.queue[listing.stage];
            mbarrier_arrive(&shared.listing.empty[listing.stage]);
            listing.advance();
            if (entry.chunk == Entry::kStop) return;
            if (entry.chunk == Entry::kBegin) {
                begin(entry.index);
                continue;
            }
            const int s = dealer.claim();
            shared.loaded[s] = entry;
            load_rows(entry, s);
            dealer.deal(entry);
        }
    }
};

}  // namespace mtraining::sm90
