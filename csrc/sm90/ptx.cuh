// Thin wrappers of the sm_90a instructions that the kernels use: shared-memory barriers, TMA copies, register
// reallocation and ordering. One function an instruction; names follow the PTX manual.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mtraining::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier
// ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives `count` times at once.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

// Arrives and announces `bytes` that TMA copies will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// Whether the phase is over now; does not wait.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#ifdef MTRAINING_DEBUG_WAITS  // a wait that never ends becomes an error
    const int64_t start = clock64();
    while (!mbarrier_try_wait(barrier, parity)) {
        if (clock64() - start > int64_t{1} << 31) __trap();  // about a second
    }
#else
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#endif
}

// --- words in shared memory that one thread writes and others poll. They order nothing else.

__device__ __forceinline__ void store_word(uint32_t* to, uint32_t value) {
    asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(smem_address(to)), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(smem_address(from)) : "memory");
    return value;
}

// --- TMA
// --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of a tensor (dim, row, head, batch, chunk) into shared memory; completes on `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int dim, int row,
                                         int head, int batch, int chunk) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(smem_address(to)),
        "l"(map), "r"(smem_address(barrier)), "r"(dim), "r"(row), "r"(head), "r"(batch), "r"(chunk)
        : "memory");
}

// `bytes` (a multiple of 16) of linear memory into shared memory; completes on `barrier`.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(from), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

// Adds `count` fp32 of shared memory to linear memory, in an order that is not defined between copies.
__device__ __forceinline__ void bulk_reduce_add(float* to, const float* from, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(smem_address(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary shared-memory writes of this thread before later reads by the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Adds two floats to global memory (8-byte boundary) without reading them first; subnormal sums become 0.
__device__ __forceinline__ void global_add(float* to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// --- clusters
// ---------------------------------------------------------------------------------------------------------

// Every thread of a cluster that has not ended; memory written before is visible after, in all of its CTAs.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;\n" ::
            : "memory");
}

// A float of the shared memory of CTA `rank` of the cluster, at the place where `mine` is in this CTA.
__device__ __forceinline__ float load_from_cluster(const float* mine, uint32_t rank) {
    float value;
    asm volatile(
        "{\n.reg .u32 there;\n"
        "mapa.shared::cluster.u32 there, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [there];\n}\n"
        : "=f"(value)
        : "r"(smem_address(mine)), "r"(rank)
        : "memory");
    return value;
}

// --- registers and barriers
// -------------------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- one lane of a warp

// True in one lane, the same at every call. The compiler knows that the branch has one thread and issues a TMA copy in
// it once; under a comparison of the lane number it builds a loop over the active threads round each copy.
__device__ __forceinline__ bool elect_lane() {
    uint32_t elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xFFFFFFFF;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(elected));
    return elected != 0;
}

// --- arithmetic
// -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace mtraining::sm90
