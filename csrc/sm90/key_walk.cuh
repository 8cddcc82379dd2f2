// The walk of the kernel that owns keys (dK, dV): the transpose of row_walk.cuh.
//
// A CTA works on kKeyBlocks neighbouring key blocks of one kv head (or tiles of compact columns of one query head), one
// a consumer warpgroup. The scout lists the query blocks of every head of the group that any of them meets; the loader
// brings q, dout, lse and delta of each once.
#pragma once

#include "sm90/row_walk.cuh"

namespace mtraining::sm90 {

template <int kHeadDim_>
struct KeyPlan {
    static constexpr int kHeadDim = kHeadDim_;
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

// Both backward operators in one form. For vertical tiles: one chunk, kv_heads == heads, kv_blocks = tiles of the
// compact columns, and mask.column_list is given.
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
    using Entry = TileEntry<kKeyBlocks>;
    alignas(1024) uint8_t k[kKeyBlocks][Plan::kTileBytes];
    alignas(1024) uint8_t v[kKeyBlocks][Plan::kTileBytes];
    alignas(1024) uint8_t q[Plan::kStages][Plan::kTileBytes];
    alignas(1024) uint8_t dout[Plan::kStages][Plan::kTileBytes];
    alignas(16) float lse[Plan::kStages][64];
    alignas(16) float delta[Plan::kStages][64];
    TileEntry<kKeyBlocks> queue[Plan::kQueue];
    TileEntry<kKeyBlocks> loaded[Plan::kStages];
    RingBarriers<Plan::kQueue> listing;
    RingBarriers<Plan::kStages> ring;
    uint64_t keys_full[kKeyBlocks], keys_empty[kKeyBlocks];
    TicketLists<kKeyBlocks> tickets;

    __device__ void init() {
        tickets.init();
        listing.init(1);
        ring.init(4 * kKeyBlocks);
        for (int w = 0; w < kKeyBlocks; ++w) {
            mbarrier_init(&keys_full[w], 1);
            mbarrier_init(&keys_empty[w], 4);
        }
        mbarrier_init_fence();
    }
};

// The keys of one visit, heaviest (first keys) to lightest. Slash: (batch, kv head) outermost, so that CTAs that run
// together share queries. Vertical: tiles of all heads by weight, since they are few and each has its own queries.
struct KeyTile {
    int batch, kv_head, chunk, first;

    template <int kKeyBlocks>
    __device__ static __forceinline__ KeyTile at(const Shape& shape, bool vertical, int index) {
        const int steps = (shape.kv_blocks + kKeyBlocks - 1) / kKeyBlocks;
        const int heads = shape.batch * shape.kv_heads;
        KeyTile tile;
        tile.chunk = index % shape.chunks;
        index /= shape.chunks;
        tile.first = (vertical ? index / heads : index % steps) * kKeyBlocks;
        index = vertical ? index % heads : index / steps;
        tile.kv_head = index % shape.kv_heads;
        tile.batch = index / shape.kv_heads;
        return tile;
    }

    template <int kKeyBlocks>
    __host__ __device__ static int count(const Shape& shape) {
        return shape.batch * shape.kv_heads * shape.chunks * ((shape.kv_blocks + kKeyBlocks - 1) / kKeyBlocks);
    }
};

template <typename Plan>
struct KeyScout {
    static constexpr int kKeyBlocks = Plan::kKeyBlocks;
    using Entry = TileEntry<kKeyBlocks>;

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

    __device__ __forceinline__ void slash_rows(const KeyTile& tile) {
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

    // Rows that attend some of the columns; the lanes hold the columns.
    __device__ __forceinline__ void vertical_rows(const KeyTile& tile) {
        const int lane = threadIdx.x % 32;
        const int32_t* columns = mask.column_list + (int64_t{tile.batch} * shape.heads + tile.kv_head) * shape.columns;
        int held[kKeyBlocks][2];
#pragma unroll
        for (int w = 0; w < kKeyBlocks; ++w) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int slot = (tile.first + w) * 64 + half * 32 + lane;
                held[w][half] = slot < shape.columns ? __ldg(columns + slot) : -1;
            }
        }
        QueryBlocks<1> row;
        row.words = words(tile.batch, tile.kv_head);
        for (int index = shape.q_blocks - 1; index >= 0; --index) {
            row.block[0] = __ldg(mask.q_blocks + index);
            row.start[0] = __ldg(mask.doc_start + row.block[0]);
            uint64_t bits[kKeyBlocks];
            bool any = false;
#pragma unroll
            for (int w = 0; w < kKeyBlocks; ++w) {
                const uint32_t low = __ballot_sync(0xFFFFFFFF, row.column_active(0, held[w][0]));
                const uint32_t high = __ballot_sync(0xFFFFFFFF, row.column_active(0, held[w][1]));
                bits[w] = static_cast<uint64_t>(high) << 32 | low;
                any |= bits[w] != 0;
            }
            if (any) list(tile.kv_head, index, 0, bits);
        }
    }

    __device__ __forceinline__ void run() {
        for (PersistentLoop work; work.item < KeyTile::count<kKeyBlocks>(shape); work.advance()) {
            const int t = work.item;
            const KeyTile tile = KeyTile::at<kKeyBlocks>(shape, mask.column_list != nullptr, t);
            mark(Entry::kBegin, t);
            if (mask.column_list != nullptr) {
                vertical_rows(tile);
            } else {
                slash_rows(tile);
            }
            mark(Entry::kEnd, t);
        }
        mark(Entry::kStop, 0);
    }
};

// One thread: turns queue entries into copies.
template <typename Plan>
struct KeyLoader {
    static constexpr int kKeyBlocks = Plan::kKeyBlocks;
    using Entry = TileEntry<kKeyBlocks>;

    const KeyParams& params;
    const KeyMaps& maps;
    KeyShared<Plan>& shared;
    TileDealer<KeyShared<Plan>> dealer;
    RingPosition<Plan::kQueue> listing;
    uint32_t keys_parity = 0;
    int batch = 0;

    __device__ __forceinline__ void begin(int index) {
        const KeyTile tile = KeyTile::at<kKeyBlocks>(params.shape, params.mask.column_list != nullptr, index);
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
