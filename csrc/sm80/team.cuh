// Warps that work on one row block together. A thread block holds one team or two; each has a barrier of its own.
#pragma once

#include <cstdint>

namespace mtraining::sm80 {

template <int kWarps>
struct Team {
    static constexpr int kThreads = 32 * kWarps;

    __device__ static __forceinline__ int index() { return threadIdx.x / kThreads; }
    __device__ static __forceinline__ int thread() { return threadIdx.x % kThreads; }
    __device__ static __forceinline__ int warp() { return thread() / 32; }
    // Barriers 1 and 2: a thread block has at most two teams. Constant numbers need no register.
    __device__ static __forceinline__ void sync() {
        if (threadIdx.x < kThreads) {
            asm volatile("bar.sync 1, %0;\n" ::"n"(kThreads) : "memory");
        } else {
            asm volatile("bar.sync 2, %0;\n" ::"n"(kThreads) : "memory");
        }
    }
};

}  // namespace mtraining::sm80
