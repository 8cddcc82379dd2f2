// The walk of the kernels that own query rows (forward, dQ): what a CTA works on and how its operands reach shared
// memory.
//
// A CTA is persistent. It works on kRowBlocks neighbouring query blocks of one head, one a consumer warpgroup. The
// scout warp finds the key tiles that any of them needs and lists them in a short queue, running ahead of everything
// else; the loader warp loads each listed tile once; a consumer warpgroup skips the tiles it does not need.
#pragma once

#include "mtraining/params.h"
#include "sm90/device.h"
#include "sm90/mask.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tickets.cuh"
#include "sm90/wgmma.cuh"

namespace mtraining::sm90 {

// kOperands: row operands of a block that stay for the whole walk over its keys (q; q and dout). kRowBuffers: row tiles
// whose operands fit at once; 2 where the consumers read them from shared memory to the end, so that the next ones are
// there.
template <int kHeadDim_, int kOperands_, int kRowBuffers_>
struct RowPlan {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kOperands = kOperands_;
    static constexpr int kRowBuffers = kRowBuffers_;
    static constexpr int kRowBlocks = 2;
    static constexpr int kThreads = 128 * (kRowBlocks + 1);
    // What the consumers do not need lets the scout have more loads in flight.
    static constexpr int kConsumerRegisters = kOperands == 1 ? 208 : 224;
    static constexpr int kProducerRegisters = kOperands == 1 ? 88 : 56;
    static_assert(register_pool(kThreads) >= 128 * (kRowBlocks * kConsumerRegisters + kProducerRegisters));

    static constexpr uint32_t kTileBytes = 64 * kHeadDim * 2;    // 64 rows of one operand
    static constexpr uint32_t kSharedLimit = 227 * 1024 - 3072;  // but queue and barriers
    static constexpr int kFit = (kSharedLimit - kRowBuffers * kRowBlocks * kOperands * kTileBytes) / (2 * kTileBytes);
    static constexpr int kStages = kFit < 8 ? kFit : 8;  // of one key block and its values
    static constexpr int kQueue = 32;
};

struct RowMaps {
    CUtensorMap rows[2];  // q, dout
    CUtensorMap k, v, compact_k, compact_v;
};

template <typename Plan>
struct RowShared {
    static constexpr int kConsumers = Plan::kRowBlocks;
    static constexpr int kRowBlocks = Plan::kRowBlocks;
    static constexpr int kStages = Plan::kStages;
    using Entry = TileEntry<kRowBlocks>;
    alignas(1024) uint8_t rows[Plan::kRowBuffers][kRowBlocks][Plan::kOperands][Plan::kTileBytes];
    alignas(1024) uint8_t k[Plan::kStages][Plan::kTileBytes];
    alignas(1024) uint8_t v[Plan::kStages][Plan::kTileBytes];
    TileEntry<kRowBlocks> queue[Plan::kQueue];
    TileEntry<kRowBlocks> loaded[Plan::kStages];  // what lies in each stage
    RingBarriers<Plan::kQueue> listing;
    RingBarriers<Plan::kStages> ring;
    RingBarriers<Plan::kRowBuffers> row_ring[kRowBlocks];
    TicketLists<kRowBlocks> tickets;

    __device__ void init() {
        tickets.init();
        listing.init(1);
        ring.init(4 * kWarpArrivals * kRowBlocks);
        for (int w = 0; w < kRowBlocks; ++w) row_ring[w].init(4 * kWarpArrivals);
        mbarrier_init_fence();
    }
};

// The rows of one visit: (batch, kv head) outermost, so that the heads that share keys run together; then rows from the
// last (heaviest) to the first; then the heads of the group, each time beginning with another one: heads differ in
// weight, and with a fixed order a CTA would meet the same two of them all the time.
struct RowTile {
    int batch, head, kv_head, first;

    template <int kRowBlocks>
    __device__ static __forceinline__ RowTile at(const Shape& shape, int index) {
        const int group = shape.heads / shape.kv_heads;
        const int steps = (shape.q_blocks + kRowBlocks - 1) / kRowBlocks;
        RowTile tile;
        const int member = (index + index / group) % group;
        index /= group;
        tile.first = (steps - 1 - index % steps) * kRowBlocks;
        index /= steps;
        tile.kv_head = index % shape.kv_heads;
        tile.batch = index / shape.kv_heads;
        tile.head = tile.kv_head * group + member;
        return tile;
    }

    template <int kRowBlocks>
    __host__ __device__ static int count(const Shape& shape) {
        return shape.batch * shape.heads * ((shape.q_blocks + kRowBlocks - 1) / kRowBlocks);
    }
};

__device__ __forceinline__ bool warp_leader() { return threadIdx.x % 32 == 0; }

template <typename Plan>
struct RowScout {
    static constexpr int kRowBlocks = Plan::kRowBlocks;
    using Entry = TileEntry<kRowBlocks>;

    const Shape& shape;
    const Mask& mask;
    RowShared<Plan>& shared;
    RingPosition<Plan::kQueue> position;

    __device__ __forceinline__ void list(int chunk, int index, uint32_t diagonal,
                                         const uint64_t (&columns)[kRowBlocks]) {
        if (warp_leader()) {
            const int s = position.stage;
            mbarrier_wait(&shared.listing.empty[s], position.parity ^ 1);
            Entry& entry = shared.queue[s];
            entry.chunk = chunk;
            entry.index = index;
            entry.diagonal = diagonal;
#pragma unroll
            for (int w = 0; w < kRowBlocks; ++w) entry.columns[w] = columns[w];
            mbarrier_arrive(&shared.listing.full[s]);
        }
        position.advance();
    }

    __device__ __forceinline__ void mark(int kind, int index) {
        const uint64_t none[kRowBlocks] = {};
        list(kind, index, 0, none);
    }

    __device__ __forceinline__ void slash_tiles(const QueryBlocks<kRowBlocks>& rows) {
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
            const int32_t* blocks = mask.kv_blocks + int64_t{chunk} * shape.kv_blocks;
            scan_blocks(
                shape.kv_blocks, [&](int index) { return __ldg(blocks + index); },
                [&](int block) { return rows.reach(block); }, [&](int block) { return rows.need(block); },
                [&](int index, Need need) {
                    uint64_t columns[kRowBlocks];
#pragma unroll
                    for (int w = 0; w < kRowBlocks; ++w) columns[w] = (need.needed >> w & 1) ? kAllColumns : 0;
                    list(chunk, index, need.diagonal, columns);
                });
        }
    }

    __device__ __forceinline__ void run() {
        for (PersistentLoop work; work.item < RowTile::count<kRowBlocks>(shape); work.advance()) {
            const int t = work.item;
            const RowTile tile = RowTile::at<kRowBlocks>(shape, t);
            QueryBlocks<kRowBlocks> rows;
            rows.load(shape, mask, tile.batch, tile.head, tile.first);
            mark(Entry::kBegin, t);
            slash_tiles(rows);
            if (shape.columns > 0) {
                scan_columns(rows, mask.column_list + (int64_t{tile.batch} * shape.heads + tile.head) * shape.columns,
                             shape.columns, [&](int index, const uint64_t (&columns)[kRowBlocks]) {
                                 list(Entry::kColumns, index, 0, columns);
                             });
            }
            mark(Entry::kEnd, t);
        }
        mark(Entry::kStop, 0);
    }
};

// 64 rows of an operand, panel by panel.
template <int kHeadDim>
__device__ __forceinline__ void load_tile(const CUtensorMap* map, uint8_t* to, int row, int head, int batch, int chunk,
                                          uint64_t* barrier) {
#pragma unroll
    for (int panel = 0; panel < kHeadDim / kPanel; ++panel) {
        tma_load(to + panel * (64 * 128), map, barrier, panel * kPanel, row, head, batch, chunk);
    }
}

// One thread: turns queue entries into copies.
template <typename Plan>
struct RowLoader {
    static constexpr int kRowBlocks = Plan::kRowBlocks;
    using Entry = TileEntry<kRowBlocks>;

    const Shape& shape;
    const RowMaps& maps;
    RowShared<Plan>& shared;
    TileDealer<RowShared<Plan>> dealer;
    RingPosition<Plan::kQueue> listing;
    RingPosition<Plan::kRowBuffers> row_position;
    RowTile tile;

    __device__ __forceinline__ void begin(int index) {
        tile = RowTile::at<kRowBlocks>(shape, index);
        const int buffer = row_position.stage;
#pragma unroll
        for (int w = 0; w < kRowBlocks; ++w) {
            uint64_t* full = &shared.row_ring[w].full[buffer];
            mbarrier_wait(&shared.row_ring[w].empty[buffer], row_position.parity ^ 1);
            mbarrier_arrive_expect(full, Plan::kOperands * Plan::kTileBytes);
#pragma unroll
            for (int o = 0; o < Plan::kOperands; ++o) {
                load_tile<Plan::kHeadDim>(&maps.rows[o], shared.rows[buffer][w][o], (tile.first + w) * kBlock,
                                          tile.head, tile.batch, 0, full);
            }
        }
        row_position.advance();
    }

    __device__ __forceinline__ void load_keys(const Entry& entry, int s) {
        uint64_t* full = &shared.ring.full[s];
        if (entry.chunk == Entry::kEnd) {
            mbarrier_arrive(full);
            return;
        }
        const bool compact = entry.chunk == Entry::kColumns;
        const int head = compact ? tile.head : tile.kv_head;
        const int chunk = compact ? 0 : entry.chunk;
        mbarrier_arrive_expect(full, 2 * Plan::kTileBytes);
        const int row = entry.index * kBlock;
        load_tile<Plan::kHeadDim>(compact ? &maps.compact_k : &maps.k, shared.k[s], row, head, tile.batch, chunk, full);
        load_tile<Plan::kHeadDim>(compact ? &maps.compact_v : &maps.v, shared.v[s], row, head, tile.batch, chunk, full);
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
            load_keys(entry, s);
            dealer.deal(entry);
        }
    }
};

}  // namespace mtraining::sm90
