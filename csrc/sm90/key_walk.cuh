// The walk of the kernel that owns keys (dK, dV): the transpose of row_walk.cuh.
//
// Key blocks: a CTA works on two neighbouring key blocks of one kv head, one a consumer warpgroup. The scout lists the
// query blocks of every head of the group that any of them meets; the loader brings q, dout, lse and delta of each once.
//
// Tiles of compact columns of one query head are few and of very different weight: one is the work of a whole cluster,
// whose warpgroups deal its rows out among themselves and add up what they found.
#pragma once

#include <climits>

#include "sm90/row_walk.cuh"

namespace mtraining::sm90 {

// kSplitRows: the warpgroups of a cluster share one tile of keys and deal its rows out, instead of a tile each.
template <int kHeadDim_, bool kSplitRows_>
struct KeyPlan {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kSplitRows = kSplitRows_;
    static constexpr int kConsumers = 2;                   // warpgroups
    static constexpr int kKeyBlocks = kSplitRows ? 1 : 2;  // of a CTA
    static constexpr int kCluster = kSplitRows ? 2 : 1;    // CTAs
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kConsumerRegisters = 224;
    static constexpr int kProducerRegisters = 56;
    static_assert(register_pool(kThreads) >= 128 * (kConsumers * kConsumerRegisters + kProducerRegisters));

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

// Both backward operators in one form. For vertical tiles (kSplitRows): one chunk, kv_heads == heads, kv_blocks = tiles
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
    static constexpr int kConsumers = Plan::kConsumers;
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
            mbarrier_init(&keys_empty[w], 4 * kWarpArrivals * kConsumers / kKeyBlocks);
        }
        mbarrier_init_fence();
    }
};

// The keys of one visit, heaviest (first keys) to lightest. Key blocks: (batch, kv head) outermost, so that CTAs that run
// together share queries. Column tiles: those of all heads by weight, since they are few and each head has queries of
// its own.
template <typename Plan>
struct KeyTile {
    int batch, kv_head, chunk, first;

    __device__ static __forceinline__ KeyTile at(const Shape& shape, int index) {
        const int heads = shape.batch * shape.kv_heads;
        KeyTile tile;
        tile.chunk = index % shape.chunks;
        index /= shape.chunks;
        tile.first = (Plan::kSplitRows ? index / heads : index % steps(shape)) * Plan::kKeyBlocks;
        index = Plan::kSplitRows ? index % heads : index / steps(shape);
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

// The items of one CTA. With kSplitRows that is one, its cluster's: clusters are launched heaviest first as
// multiprocessors fall free, which deals items of very different weight out evenly.
template <typename Plan>
struct KeyItems {
    int count, item;
    PersistentLoop loop;

    __device__ __forceinline__ explicit KeyItems(const Shape& shape) : count(KeyTile<Plan>::count(shape)) {
        item = Plan::kSplitRows ? static_cast<int>(blockIdx.x) / Plan::kCluster : loop.item;
    }

    __device__ __forceinline__ bool left() const { return item < count; }

    __device__ __forceinline__ void advance() {
        loop.advance();
        item = Plan::kSplitRows ? count : loop.item;
    }
};

template <typename Plan>
struct KeyScout {
    static constexpr int kKeyBlocks = Plan::kKeyBlocks;
    static constexpr int kConsumers = Plan::kConsumers;
    using Entry = typename KeyShared<Plan>::Entry;

    const Shape& shape;
    const Mask& mask;
    KeyShared<Plan>& shared;
    RingPosition<Plan::kQueue> position;

    __device__ __forceinline__ void list(int head, int index, uint32_t diagonal, const uint64_t (&keys)[kConsumers]) {
        if (warp_leader()) {
            const int s = position.stage;
            mbarrier_wait(&shared.listing.empty[s], position.parity ^ 1);
            Entry& entry = shared.queue[s];
            entry.chunk = head;
            entry.index = index;
            entry.diagonal = diagonal;
#pragma unroll
            for (int w = 0; w < kConsumers; ++w) entry.columns[w] = keys[w];
            mbarrier_arrive(&shared.listing.full[s]);
        }
        position.advance();
    }

    __device__ __forceinline__ void mark(int kind, int index) {
        const uint64_t none[kConsumers] = {};
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
                shape.q_blocks,
                [&](int index) {
                    const int block = __ldg(mask.q_blocks + index);
                    return keys.need(bits, block, __ldg(mask.doc_start + block));
                },
                [&](int index, Need need) {
                    uint64_t all[kConsumers];
#pragma unroll
                    for (int w = 0; w < kConsumers; ++w) all[w] = (need.needed >> w & 1) ? kAllColumns : 0;
                    list(head, index, need.diagonal, all);
                });
        }
    }

    // This CTA's share of the rows that attend some of the columns (which the lanes hold), one warpgroup after the
    // other. CTA r of the cluster takes the rows r, r + kCluster, ... Most rows lie before all of the columns or
    // after some: 32 are looked at together.
    __device__ __forceinline__ void column_rows(const KeyTile<Plan>& tile) {
        const int lane = threadIdx.x % 32;
        const int32_t* columns = mask.column_list + (int64_t{tile.batch} * shape.heads + tile.kv_head) * shape.columns;
        int held[2], lowest = INT_MAX, highest = -1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = tile.first * 64 + half * 32 + lane;
            held[half] = slot < shape.columns ? __ldg(columns + slot) : -1;
            if (held[half] >= 0) lowest = min(lowest, held[half] >> 6);
            highest = max(highest, held[half] >> 6);
        }
        lowest = __reduce_min_sync(0xFFFFFFFF, lowest);
        highest = __reduce_max_sync(0xFFFFFFFF, highest);
        QueryBlocks<1> row;
        row.words = words(tile.batch, tile.kv_head);
        int turn = 0;
        const int share = static_cast<int>(blockIdx.x) % Plan::kCluster;
        const int rows = (shape.q_blocks - share + Plan::kCluster - 1) / Plan::kCluster;
        for (int base = (rows - 1) / 32 * 32; rows > 0 && base >= 0; base -= 32) {
            const bool real = base + lane < rows;
            const int block = real ? __ldg(mask.q_blocks + (base + lane) * Plan::kCluster + share) : 0;
            const int start = real ? __ldg(mask.doc_start + block) : 0;
            uint32_t found = __ballot_sync(0xFFFFFFFF, real && block > lowest && start <= highest);
            while (found != 0) {
                const int source = 31 - __clz(found);
                found ^= 1u << source;
                row.block[0] = __shfl_sync(0xFFFFFFFF, block, source);
                row.start[0] = __shfl_sync(0xFFFFFFFF, start, source);
                const bool low_active = row.column_active(0, held[0]), high_active = row.column_active(0, held[1]);
                const uint32_t low = __ballot_sync(0xFFFFFFFF, low_active);
                const uint32_t high = __ballot_sync(0xFFFFFFFF, high_active);
                const uint64_t bits = static_cast<uint64_t>(high) << 32 | low;
                if (bits == 0) continue;
                const uint64_t one[kConsumers] = {turn == 0 ? bits : 0, turn == 1 ? bits : 0};
                list(tile.kv_head, (base + source) * Plan::kCluster + share, 0, one);
                turn ^= 1;
            }
        }
    }

    __device__ __forceinline__ void run() {
        for (KeyItems<Plan> items(shape); items.left(); items.advance()) {
            const auto tile = KeyTile<Plan>::at(shape, items.item);
            mark(Entry::kBegin, items.item);
            if constexpr (Plan::kSplitRows) {
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
