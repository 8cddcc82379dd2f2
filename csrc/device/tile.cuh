// A 64 x D tile of 16-bit elements in shared memory. Chunks of 16 bytes are XOR-swizzled by the row, so that neither
// ldmatrix nor cp.async meets a bank conflict.
#pragma once

#include "device/mma.cuh"
#include "mtraining/params.h"

namespace mtraining::device {

template <int D>
struct Tile {
    static constexpr int kBytes = kBlock * D * 2;
    static constexpr int kChunks = D / 8;

    __device__ static __forceinline__ uint32_t offset(int row, int chunk) {
        return static_cast<uint32_t>(row * D * 2 + ((chunk ^ (row & 7)) << 4));
    }

    // Addresses of a lane for ldmatrix, for rows [0, 16) and columns [0, 16) of a tile at the shared address `base`,
    // which is a multiple of 256. Operand: `lane_address` for A (rows = rows) and for B of a product with the tile
    // itself (k = rows, loaded transposed); `lane_address_b` for B of a product with the transposed tile (n = rows).
    __device__ static __forceinline__ uint32_t lane_address(uint32_t base, int lane) {
        return base + offset(lane & 15, lane >> 4);
    }
    __device__ static __forceinline__ uint32_t lane_address_b(uint32_t base, int lane) {
        return base + offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    }

    // The same lane `row` rows (a multiple of 16) further down and `k` groups of 16 columns to the right. The swizzle
    // makes the step to the right an exclusive or, so one register serves all.
    __device__ static __forceinline__ uint32_t moved(uint32_t address, int row, int k) {
        return (address ^ static_cast<uint32_t>(k << 5)) + static_cast<uint32_t>(row * D * 2);
    }

    // Starts copying 64 rows; rows whose bit of `rows` is clear become zeros and are not read. The tile must span less
    // than 2^31 bytes (kLargestRowStride): with 32-bit offsets an address takes one instruction, of many.
    template <int kThreads, typename T>
    __device__ static __forceinline__ void copy(uint32_t base, const T* source, int64_t row_stride, uint64_t rows,
                                                int thread) {
        static_assert(kThreads % kChunks == 0 && sizeof(T) == 2);
        constexpr int kStep = kThreads / kChunks;  // rows copied at once
        static_assert(kStep % 8 == 0 || kStep == 4);
        const int chunk = thread % kChunks;
        const int first = thread / kChunks;
        const int stride = static_cast<int>(row_stride) * 2;
        const char* from = reinterpret_cast<const char*>(source);
        const uint32_t own = first * stride + chunk * 16;
        // Rows that are kStep apart share their swizzle, or with kStep == 4 those that are 8 apart.
        const uint32_t even = base + first * D * 2 + ((chunk ^ (first & 7)) << 4);
        const uint32_t odd = even ^ (kStep == 4 ? 64 : 0);
        if (rows == ~uint64_t{0}) {
            const char* next = from + own;
            const int64_t jump = static_cast<int64_t>(kStep * stride);
#pragma unroll
            for (int step = 0; step < kBlock / kStep; ++step) {
                const uint32_t to = (step % 2 ? odd : even) + step * kStep * D * 2;
                copy_async(to, next);
                next += jump;
            }
        } else {
#pragma unroll 4
            for (int step = 0; step < kBlock / kStep; ++step) {
                const uint32_t to = (step % 2 ? odd : even) + step * kStep * D * 2;
                const bool valid = (rows >> (first + step * kStep)) & 1;
                copy_async(to, from + (valid ? own + static_cast<uint32_t>(step * kStep * stride) : 0), valid);
            }
        }
    }
};

// Largest row stride, in elements, that Tile::copy serves.
constexpr int64_t kLargestRowStride = (int64_t{1} << 24) - 1;

constexpr uint64_t kAllRows = ~uint64_t{0};

}  // namespace mtraining::device
