// wgmma: one warpgroup (128 threads) multiplies a 64 x 16 tile of A by a 16 x N tile of B from shared memory and adds
// it to fp32 accumulators in registers. A comes from shared memory (ss) or registers (rs).
//
// Accumulator layout (M = 64): thread t of the warpgroup holds rows 16*(t/32) + (t%32)/4 (+8), and of each 8 columns
// 2*(t%4), 2*(t%4) + 1: element 4*j + 2*h + e is (row + 8*h, column 8*j + 2*(t%4) + e).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sm90/ptx.cuh"

namespace mtraining::sm90 {

// --- operands
// --------------------------------------------------------------------------------------------------------- Tiles lie
// in shared memory as TMA writes them with 128-byte swizzle: panels of 64 elements (128 bytes) a row, 8 rows an atom of
// 1024 bytes. A panel starts at a multiple of 1024 bytes.

constexpr int kPanel = 64;             // elements a row of a panel
constexpr uint32_t kAtomBytes = 1024;  // 8 rows of a panel

// Only the low word of a descriptor differs between the steps of a tile, by a constant.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading_bytes, uint32_t offset) {
    const uint32_t low = ((address >> 4) | (leading_bytes >> 4) << 16) + (offset >> 4);
    constexpr uint32_t kHigh = (kAtomBytes >> 4) | 1u << 30;  // distance of atoms; 128-byte swizzle
    return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Address of a tile as descriptors take it: in a cluster, addresses carry the number of the CTA above 24 bits.
__device__ __forceinline__ uint32_t tile_address(const void* tile) { return smem_address(tile) & 0x3FFFF; }

// Step `k` (16 elements of the reduced dimension, which is the contiguous one) of a tile of `kRows` rows.
template <int kRows>
__device__ __forceinline__ uint64_t k_major(uint32_t tile, int k) {
    return descriptor(tile, 16, (k / 4) * (kRows * 128) + (k % 4) * 32);
}

// Step `k` (16 rows) of a tile of `kRows` rows whose rows are the reduced dimension.
template <int kRows>
__device__ __forceinline__ uint64_t mn_major(uint32_t tile, int k) {
    return descriptor(tile, kRows * 128, k * (2 * kAtomBytes));
}

// --- ordering
// ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of these registers across the fences around it.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void copy(const uint32_t (&from)[kCount], uint32_t (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = from[i];
}

// --- instructions
// -----------------------------------------------------------------------------------------------------

#define MTRAINING_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MTRAINING_F16(d, i) MTRAINING_F4(d, i), MTRAINING_F4(d, i + 4), MTRAINING_F4(d, i + 8), MTRAINING_F4(d, i + 12)
#define MTRAINING_F32(d) MTRAINING_F16(d, 0), MTRAINING_F16(d, 16)
#define MTRAINING_F64(d) MTRAINING_F16(d, 0), MTRAINING_F16(d, 16), MTRAINING_F16(d, 32), MTRAINING_F16(d, 48)

#define MTRAINING_WGMMA_N64(CLASS, TYPE)                                                                              \
    template <bool kTransposeA, bool kTransposeB>                                                                     \
    __device__ __forceinline__ void wgmma_ss(CLASS, float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {        \
        asm volatile(                                                                                                 \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                               \
            " "                                                                                                       \
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                       \
            "%32, %33, p, 1, 1, %35, %36;\n}\n"                                                                       \
            : MTRAINING_F32(d)                                                                                        \
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB));                 \
    }                                                                                                                 \
    template <bool kTransposeB>                                                                                       \
    __device__ __forceinline__ void wgmma_rs(CLASS, float (&d)[32], const uint32_t* a, uint64_t b, bool accumulate) { \
        asm volatile(                                                                                                 \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                               \
            " "                                                                                                       \
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                       \
            "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                                           \
            : MTRAINING_F32(d)                                                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),                  \
              "n"(kTransposeB));                                                                                      \
    }

#define MTRAINING_WGMMA_N128(CLASS, TYPE)                                                                             \
    template <bool kTransposeA, bool kTransposeB>                                                                     \
    __device__ __forceinline__ void wgmma_ss(CLASS, float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {        \
        asm volatile(                                                                                                 \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                              \
            " "                                                                                                       \
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                        \
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                        \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                       \
            "%64, %65, p, 1, 1, %67, %68;\n}\n"                                                                       \
            : MTRAINING_F64(d)                                                                                        \
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB));                 \
    }                                                                                                                 \
    template <bool kTransposeB>                                                                                       \
    __device__ __forceinline__ void wgmma_rs(CLASS, float (&d)[64], const uint32_t* a, uint64_t b, bool accumulate) { \
        asm volatile(                                                                                                 \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                              \
            " "                                                                                                       \
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                        \
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                        \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                       \
            "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                                           \
            : MTRAINING_F64(d)                                                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),                  \
              "n"(kTransposeB));                                                                                      \
    }

struct BFloat16Tag {};
struct Float16Tag {};
MTRAINING_WGMMA_N64(BFloat16Tag, "bf16")
MTRAINING_WGMMA_N64(Float16Tag, "f16")
MTRAINING_WGMMA_N128(BFloat16Tag, "bf16")
MTRAINING_WGMMA_N128(Float16Tag, "f16")

#undef MTRAINING_WGMMA_N64
#undef MTRAINING_WGMMA_N128
#undef MTRAINING_F64
#undef MTRAINING_F32
#undef MTRAINING_F16
#undef MTRAINING_F4

// --- element types
// ----------------------------------------------------------------------------------------------------

template <typename T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
    using Tag = BFloat16Tag;
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<uint32_t&>(pair);
    }
};

template <>
struct Element<__half> {
    using Tag = Float16Tag;
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<uint32_t&>(pair);
    }
};

// Accumulators of a 64 x 64 tile as A operand of a product that reduces over its columns (4 steps of 16).
template <typename T>
__device__ __forceinline__ void to_operand(const float (&tile)[32], uint32_t (&operand)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = Element<T>::pack(tile[2 * i], tile[2 * i + 1]);
}

// Among the four lanes of a quad, in every group of four words: lane t gives word k to lane k and gets, as word k, lane
// k's word t. Turns the accumulator layout (two columns of each 8 a lane) into 8 columns a lane for 16-byte stores.
template <int kGroups>
__device__ __forceinline__ void quad_transpose(uint32_t (&words)[kGroups][4], int lane) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (k & bit) continue;
                uint32_t& low = words[group][k];
                uint32_t& high = words[group][k + bit];
                const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, upper ? low : high, bit);
                (upper ? low : high) = received;
            }
        }
    }
}

// 64 x D tile in shared memory as A operand in registers: 4 registers a step of 16. When it returns the tile has been
// read: the copy engine may write there again once the caller has said so.
template <int kDim>
__device__ __forceinline__ void load_operand(uint32_t tile, int thread, uint32_t (&operand)[kDim / 4]) {
    const int lane = thread % 32;
    const int row = (thread / 32) * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        const int chunk = (k % 4) * 2 + lane / 16;
        const uint32_t address = tile + (k / 4) * (64 * 128) + row * 128 + ((chunk ^ (row & 7)) << 4);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(operand[4 * k]), "=r"(operand[4 * k + 1]), "=r"(operand[4 * k + 2]),
                       "=r"(operand[4 * k + 3])
                     : "r"(address)
                     : "memory");
    }
    fence_async_proxy();
}

// --- products of whole tiles (64 rows of A; started, not waited for)
// --------------------------------------------------

// d (+)= A B^T over head_dim: A in registers or shared memory [64][kDim], B in shared memory [64][kDim].
template <typename T, int kDim>
__device__ __forceinline__ void multiply_nt(float (&d)[32], const uint32_t (&a)[kDim / 4], uint32_t b) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        wgmma_rs<false>(typename Element<T>::Tag{}, d, a + 4 * k, k_major<64>(b, k), k > 0);
    }
}

template <typename T, int kDim>
__device__ __forceinline__ void multiply_nt(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        wgmma_ss<false, false>(typename Element<T>::Tag{}, d, k_major<64>(a, k), k_major<64>(b, k), k > 0);
    }
}

// d += A B over 64: A [64][64] in registers, B in shared memory [64][kDim].
template <typename T, int kDim>
__device__ __forceinline__ void multiply_nn(float (&d)[kDim / 2], const uint32_t (&a)[16], uint32_t b) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma_rs<true>(typename Element<T>::Tag{}, d, a + 4 * k, mn_major<64>(b, k), true);
    }
}

}  // namespace mtraining::sm90
