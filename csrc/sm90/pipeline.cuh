// A ring of shared-memory stages between the producer warp and the consumer warpgroups.
#pragma once

#include <cstdint>

#include "sm90/ptx.cuh"

namespace mtraining::sm90 {

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

// `full` completes when a stage is loaded (one arrival and the bytes), `empty` when every consumer warp has released
// it.
template <int kStages>
struct RingBarriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];

    __device__ void init(int consumer_warps) {
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], consumer_warps);
        }
    }
};

// One warp's share of releasing a stage; its lanes have read all they need.
__device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

}  // namespace mtraining::sm90
