// Launching persistent kernels: one CTA a multiprocessor at most.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "mtraining/check.h"

namespace mtraining::sm90 {

// Registers that a CTA of `threads` threads owns, and setmaxnreg can hand round, when it has a multiprocessor to
// itself: the compiler gives each thread a multiple of 8. Asking for more than this makes setmaxnreg.inc wait for ever.
constexpr int register_pool(int threads) { return 65536 / threads / 8 * 8 * threads; }

inline int multiprocessors() {
    int device = 0, count = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

// The dynamic shared memory of the CTA as a structure. Its TMA tiles want 1024-byte boundaries, which the start of
// shared memory is when a kernel has no static part.
template <typename Shared>
__device__ __forceinline__ Shared& dynamic_shared() {
    extern __shared__ __align__(1024) uint8_t raw[];
    return *reinterpret_cast<Shared*>(raw);
}

// The same, with an address that the compiler cannot look through: otherwise it makes it anew at every use, from a
// special register (the number of the CTA in its cluster) that takes tens of cycles to read. All threads of a warp call
// it.
template <typename Shared>
__device__ __forceinline__ Shared& opaque_shared() {
    auto address = static_cast<uint32_t>(__cvta_generic_to_shared(&dynamic_shared<Shared>()));
    asm volatile("" : "+r"(address));
    return *reinterpret_cast<Shared*>(__cvta_shared_to_generic(__shfl_sync(0xFFFFFFFF, address, 0)));
}

// The items of one CTA of a persistent grid. Items are ordered by falling weight; dealing them out forwards and
// backwards in turn gives those who got the heavier items of one round the lighter ones of the next.
struct PersistentLoop {
    int item = static_cast<int>(blockIdx.x);

    __device__ __forceinline__ void advance() {
        const int grid = static_cast<int>(gridDim.x);
        item = 2 * grid * (item / grid + 1) - 1 - item;
    }
};

template <typename Kernel>
void allow_shared(Kernel kernel, size_t bytes, const char* name) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               name);
}

// `tiles` pieces of work; the kernel strides over them.
template <typename Kernel, typename... Args>
void launch_persistent(Kernel kernel, int tiles, int threads, size_t shared_bytes, cudaStream_t stream,
                       const char* name, const Args&... args) {
    if (tiles == 0) return;
    allow_shared(kernel, shared_bytes, name);
    kernel<<<std::min(tiles, multiprocessors()), threads, shared_bytes, stream>>>(args...);
    check_cuda(cudaGetLastError(), name);
}

// A cluster of kCluster CTAs for each of `tiles` pieces of work, started in their order.
template <int kCluster, typename Kernel, typename... Args>
void launch_clusters(Kernel kernel, int tiles, int threads, size_t shared_bytes, cudaStream_t stream, const char* name,
                     const Args&... args) {
    if (tiles == 0) return;
    allow_shared(kernel, shared_bytes, name);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(tiles) * kCluster);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, args...), name);
    check_cuda(cudaGetLastError(), name);
}

}  // namespace mtraining::sm90
