// From the list of tiles to the warpgroups: entries that the scout lists, and tickets that tell a consumer warpgroup
// which stages of the ring hold its tiles.
#pragma once

#include <cstdint>

#include "sm90/mask.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/wgmma.cuh"

namespace mtraining::sm90 {

// An entry of the queue: a key tile of a chunk (chunk >= 0), a tile of compact columns, or a mark.
template <int kBlocks>
struct TileEntry {
    static constexpr int kColumns = -1, kBegin = -2, kEnd = -3,
                         kStop = -4;  // compact tile, first and last of a row tile, end
    int chunk;
    int index;                  // of the key block, compact tile, or (kBegin) row tile
    uint32_t diagonal;          // bit w: a triangle for warpgroup w
    uint64_t columns[kBlocks];  // attended slots for warpgroup w; 0: it skips the tile
};

// The loader's messages to a consumer warpgroup: which stages hold its tiles, in order. A ticket is a word:
// number << 8 | masked << 7 | special << 4 | parity of the stage's use << 3 | stage. A stage holds at most one ticket
// that is not read yet, and at most one kDrain follows each, so the slots never run over. What else the loader writes
// about a tile (`loaded`) is ordered by the barrier `full` of its stage.
template <int kConsumers>
struct TicketLists {
    static constexpr uint32_t kSlots = 32;
    static constexpr uint32_t kEnd = 1, kDrain = 2;  // special: the row tile ends; let go of all stages
    static constexpr uint32_t kMasked = 1 << 7;      // not every pair of the tile is attended
    uint32_t slots[kConsumers][kSlots];

    __device__ void init() {
        for (int w = 0; w < kConsumers; ++w) {
            for (uint32_t i = 0; i < kSlots; ++i) slots[w][i] = 0xFFFFFFFF;
        }
    }
};

// The loader's side of the ring: claims stages and tells the warpgroups that need a tile.
template <typename Shared>
struct TileDealer {
    static constexpr int kConsumers = Shared::kConsumers;
    using Entry = typename Shared::Entry;
    using Tickets = TicketLists<kConsumers>;

    Shared& shared;
    RingPosition<Shared::kStages> position;
    uint32_t number[kConsumers];  // of the next ticket
    int last[kConsumers];         // stage of the last ticket, or -1 if the warpgroup lets go of it by itself

    __device__ __forceinline__ explicit TileDealer(Shared& shared_) : shared(shared_) {
#pragma unroll
        for (int w = 0; w < kConsumers; ++w) {
            number[w] = 0;
            last[w] = -1;
        }
    }

    __device__ __forceinline__ void push(int w, uint32_t word) {
        store_word(&shared.tickets.slots[w][number[w] % Tickets::kSlots], number[w] << 8 | word);
        ++number[w];
    }

    // The next stage, once everybody let go of it. A warpgroup that got nothing since it took the tile in this stage
    // may be waiting for its next tile with this one still in hand.
    __device__ __forceinline__ int claim() {
        const int s = position.stage;
#pragma unroll
        for (int w = 0; w < kConsumers; ++w) {
            if (last[w] != s) continue;
            push(w, Tickets::kDrain << 4);
            last[w] = -1;
        }
        mbarrier_wait(&shared.ring.empty[s], position.parity ^ 1);
        return s;
    }

    // Hands out the claimed stage, whose copies are under way.
    __device__ __forceinline__ void deal(const Entry& entry) {
        const int s = position.stage;
        const bool end = entry.chunk == Entry::kEnd;
#pragma unroll
        for (int w = 0; w < kConsumers; ++w) {
            if (end || entry.columns[w] != 0) {
                const bool masked = entry.columns[w] != kAllColumns || (entry.diagonal >> w & 1) != 0;
                push(w, (end ? Tickets::kEnd << 4 : masked ? Tickets::kMasked : 0) | position.parity << 3 | s);
                last[w] = end ? -1 : s;
            } else {
                mbarrier_arrive(&shared.ring.empty[s], 4 * kWarpArrivals);
            }
        }
        position.advance();
    }
};

// A consumer warpgroup's view of the ring.
template <typename Shared>
struct TileReader {
    using Entry = typename Shared::Entry;
    using Tickets = TicketLists<Shared::kConsumers>;

    static constexpr int kNone = -1, kBlocked = -2;
    static constexpr uint32_t kUnread = 0xFFFFFFFF;

    Shared& shared;
    int warpgroup;
    uint32_t number = 0;       // of the next ticket
    uint32_t ahead = kUnread;  // the next ticket, if `look_ahead` found its tile
    bool masked = false;       // the tile that `next` returned

    __device__ __forceinline__ const uint32_t* slot() const {
        return &shared.tickets.slots[warpgroup][number % Tickets::kSlots];
    }
    // Is it the next ticket?
    __device__ __forceinline__ bool is_next(uint32_t ticket) const { return (ticket ^ number << 8) < 256; }
    __device__ __forceinline__ static bool is_tile(uint32_t ticket) { return (ticket >> 4 & 7) == 0; }
    __device__ __forceinline__ uint64_t* full(uint32_t ticket) const { return &shared.ring.full[ticket & 7]; }

    // Looks for the next ticket and its tile without waiting; for moments in which the warp would wait anyway. `ticket`
    // was read from `slot()` a while before.
    __device__ __forceinline__ void look_ahead(uint32_t ticket) {
        const bool there = is_next(ticket);
        const bool arrived = mbarrier_test_wait(full(there ? ticket : 0), ticket >> 3 & 1);
        ahead = __shfl_sync(0xFFFFFFFF, __all_sync(0xFFFFFFFF, there && arrived) ? ticket : kUnread, 0);
    }

    // Waits for the next ticket and its tile, if `look_ahead` did not find them. Lets go of `held`, once the tensor
    // cores are done with it, rather than wait with it in hand.
    __device__ __forceinline__ void wait_ahead(int& held) {
        if (ahead != kUnread) return;
        uint32_t ticket = load_word(slot());
        // Votes tell the compiler that all lanes go the same way.
        if (__any_sync(0xFFFFFFFF, !is_next(ticket) || !is_tile(ticket)) && held != kNone) {
            wgmma_wait<0>();
            done(held);
            held = kNone;
        }
        while (__any_sync(0xFFFFFFFF, !is_next(ticket))) ticket = load_word(slot());
        if (__any_sync(0xFFFFFFFF, (ticket >> 4 & 7) != Tickets::kDrain)) {
            while (!__all_sync(0xFFFFFFFF, mbarrier_try_wait(full(ticket), ticket >> 3 & 1))) {
            }
        }
        ahead = __shfl_sync(0xFFFFFFFF, ticket, 0);
    }

    // Is the ticket ahead one of a tile of which every pair is attended? Follows from the tickets alone.
    __device__ __forceinline__ bool plain_ahead() const { return (ahead & 0xF0) == 0; }

    // Takes the ticket ahead, which is there.
    __device__ __forceinline__ int take_ahead() {
        ++number;
        return ahead & 7;
    }

    // The stage of the next tile of this warpgroup; kNone at the end of the row tile; kBlocked: the loader waits for a
    // stage that this warpgroup holds.
    __device__ __forceinline__ int next(int& held) {
        wait_ahead(held);
        const uint32_t ticket = ahead;
        ahead = kUnread;
        ++number;
        masked = (ticket & Tickets::kMasked) != 0;
        if (__all_sync(0xFFFFFFFF, is_tile(ticket))) return ticket & 7;
        if (__any_sync(0xFFFFFFFF, (ticket >> 4 & 7) == Tickets::kDrain)) return kBlocked;
        done(ticket & 7);
        return kNone;
    }

    // The same for a warpgroup that holds nothing else.
    __device__ __forceinline__ int next_tile(int& held) {
        int stage;
        do {
            stage = next(held);
        } while (stage == kBlocked);
        return stage;
    }

    __device__ __forceinline__ uint64_t columns(int stage) const { return shared.loaded[stage].columns[warpgroup]; }
    __device__ __forceinline__ bool diagonal(int stage) const { return shared.loaded[stage].diagonal >> warpgroup & 1; }
    __device__ __forceinline__ void done(int stage) {
        if (stage != kNone) release(&shared.ring.empty[stage]);
    }
    // The same right after a wait for the products, which has brought the lanes together.
    __device__ __forceinline__ void products_done(int stage) {
        if (threadIdx.x % (32 / kWarpArrivals) == 0) mbarrier_arrive(&shared.ring.empty[stage]);
    }
};

}  // namespace mtraining::sm90
