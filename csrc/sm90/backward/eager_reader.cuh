// A consumer warpgroup's view of the ring that can look for its next tile while the tensor cores work on this one.
#pragma once

#include "sm90/row_walk.cuh"

namespace mtraining::sm90 {

template <typename Shared>
struct EagerReader : TileReader<Shared> {
    using Base = TileReader<Shared>;
    static constexpr int kUnknown = -3;

    // What `columns` and `diagonal` say of a tile.
    struct Cut {
        uint64_t slots;
        bool diagonal;
    };

    // The stage of the next tile if it is there already, else kUnknown: then `next_tile` is to be called. Warps of a
    // warpgroup may find different answers; the tiles that they multiply are the same.
    __device__ __forceinline__ int look_ahead() {
        const uint32_t ticket = load_acquire(&this->shared.tickets.slots[this->warpgroup][this->number % kSlots]);
        const bool dealt = (ticket ^ this->number << 8) < 16;  // and not special
        const int stage = ticket & 7;
        const bool loaded = dealt && mbarrier_test_wait(&this->shared.ring.full[stage], ticket >> 3 & 1);
        if (!__all_sync(0xFFFFFFFF, loaded)) return kUnknown;
        ++this->number;
        return stage;
    }

    __device__ __forceinline__ Cut cut(int stage) const { return {this->columns(stage), this->diagonal(stage)}; }

   private:
    static constexpr uint32_t kSlots = Base::Tickets::kSlots;
};

}  // namespace mtraining::sm90
