// A ring of shared-memory stages between the producer warp and the consumer warpgroups.
#pragma once

#include <cstdint>

#include "sm90/ptx.cuh"

namespace mtraining::sm90 {

// Arrivals by which a warp releases a stage. racecheck does not see that __syncwarp orders the reads of all lanes
// before the arrival of one; in a build for it every lane arrives for itself.
#ifdef MTRAINING_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// Position in the ring: stage number and the parity of its current use.
template <int kStages>
struct RingPosition {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// `full` completes when a stage is loaded (one arrival and the bytes), `empty` after the arrivals of those who read it:
// kWarpArrivals of every consumer warp, or one of a single reading thread.
template <int kStages>
struct RingBarriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];

    __device__ void init(int readers) {
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], readers);
        }
    }
};

// One warp's share of releasing a stage; its lanes have read all they need.
__device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % (32 / kWarpArrivals) == 0) mbarrier_arrive(empty);
}

}  // namespace mtraining::sm90
