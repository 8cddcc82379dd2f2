// What the two backward kernels share. The backward runs as two kernels without atomics, hence bit-equal from run to
// run: one owns the keys (dK, dV), one owns the queries (dQ); both recompute S and dP.
#pragma once

#include "mtraining/check.h"
#include "sm80/work_list.cuh"

namespace mtraining::sm80 {

template <typename T_, int D_>
struct BackwardConfig {
    using T = T_;
    static constexpr int D = D_;
    static constexpr int kWarps = 4;  // 16 rows each
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kBlocksPerSm = 2;
    static constexpr int kListRoom = 256;
};

// Operands of the query-major kernel: slash tiles from k, v and column tiles from compact_k, compact_v.
struct QueryGradParams {
    Shape shape;
    Mask mask;
    RowView<const void> q, dout;
    ChunkView<const void> k, v;
    RowView<const void> compact_k, compact_v;
    const float* lse = nullptr;
    const float* delta = nullptr;
    RowView<float> dq;
    float scale = 0;
    bool accumulate = false;
};

// Operands of the key-major kernel. For columns, compact_k and compact_v take the place of k and v: one chunk with a
// key/value head for every query head.
struct KeyGradParams {
    Shape shape;
    Mask mask;
    RowView<const void> q, dout;
    ChunkView<const void> k, v;
    const float* lse = nullptr;
    const float* delta = nullptr;
    ChunkView<float> dk, dv;
    float scale = 0;
};

// c[8][4] = rows [row, row + 16) of A times the transposed 64-row tile B. Both lane addresses are of the tile's origin.
template <typename T, int D>
__device__ __forceinline__ void product_transposed(float (&c)[8][4], uint32_t a_lane, int row, uint32_t b_lane) {
    using Tile = device::Tile<D>;
#pragma unroll
    for (int n = 0; n < 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll 2  // a full unroll keeps every address in a register and spills
    for (int d = 0; d < D / 16; ++d) {
        uint32_t a[4];
        device::load_matrix(a, Tile::moved(a_lane, row, d));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            device::load_matrix(b, Tile::moved(b_lane, 16 * n, d));
            device::mma<T>(c[2 * n], a, b[0], b[1]);
            device::mma<T>(c[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// c[D / 8][4] += A[16 x 64] times the 64-row tile B, where A is given as accumulators and rounded here.
template <typename T, int D>
__device__ __forceinline__ void product_add(float (&c)[D / 8][4], const float (&s)[8][4], uint32_t b_lane) {
    using Tile = device::Tile<D>;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint32_t a[4] = {device::pack<T>(s[2 * k][0], s[2 * k][1]), device::pack<T>(s[2 * k][2], s[2 * k][3]),
                               device::pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                               device::pack<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            uint32_t b[4];
            device::load_matrix_transposed(b, Tile::moved(b_lane, 16 * k, n));
            device::mma<T>(c[2 * n], a, b[0], b[1]);
            device::mma<T>(c[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// lse in units of log2; a row without keys (-inf) gets +inf, so that its probabilities are 0.
__device__ __forceinline__ float backward_lse(float lse) {
    return lse == device::negative_infinity() ? -lse : lse * device::kLog2e;
}

}  // namespace mtraining::sm80
