// Masks and the online softmax on the accumulators of a 64 x 64 tile of scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "sm90/ptx.cuh"

namespace mtraining::sm90 {

// Masks write `fill`: -infinity into scores, 0 into weights.

// Keeps the lower triangle: row r of the block attends columns 0 ... r.
__device__ __forceinline__ void mask_diagonal(float (&scores)[32], int thread, float fill) {
    const int row = (thread / 32) * 16 + (thread % 32) / 4;
    const int column = 2 * (thread % 4);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (8 * (i / 4) + column + i % 2 > row + 8 * ((i / 2) % 2)) scores[i] = fill;
    }
}

// The same for transposed scores: rows are keys, columns queries.
__device__ __forceinline__ void mask_diagonal_transposed(float (&scores)[32], int thread, float fill) {
    const int row = (thread / 32) * 16 + (thread % 32) / 4;
    const int column = 2 * (thread % 4);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (row + 8 * ((i / 2) % 2) > 8 * (i / 4) + column + i % 2) scores[i] = fill;
    }
}

// Keeps the rows whose bit is set.
__device__ __forceinline__ void mask_rows(float (&scores)[32], int thread, uint64_t rows, float fill) {
    const uint64_t shifted = rows >> ((thread / 32) * 16 + (thread % 32) / 4);
    const bool keep[2] = {(shifted & 1) != 0, (shifted >> 8 & 1) != 0};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (!keep[(i / 2) % 2]) scores[i] = fill;
    }
}

// Keeps the columns whose bit is set.
__device__ __forceinline__ void mask_columns(float (&scores)[32], int thread, uint64_t columns, float fill) {
    const uint64_t shifted = columns >> (2 * (thread % 4));
    const uint32_t half[2] = {static_cast<uint32_t>(shifted), static_cast<uint32_t>(shifted >> 32)};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int bit = 8 * (i / 4) + i % 2;
        if (!(half[bit / 32] >> (bit % 32) & 1)) scores[i] = fill;
    }
}

// log2 of the softmax denominator, such that exp2(score - it) is 0 for a row without any work (lse = -inf).
__device__ __forceinline__ float lse_log2(float lse) {
    return lse == -INFINITY ? INFINITY : lse * static_cast<float>(M_LOG2E);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Running maximum and sum of a thread's two rows. The maximum may lag behind the true one by kSlack powers of two: then
// the weights stay below 2^kSlack and nothing has to be rescaled. The lag cancels when the sum divides the output.
struct OnlineSoftmax {
    static constexpr float kSlack = 8.0f;

    float scale_log2;  // softmax scale * log2(e)
    float maximum[2];
    float sum[2];     // over this thread's columns
    float factor[2];  // what `update` asks the output to be multiplied with

    __device__ __forceinline__ void reset(float scale_log2_) {
        scale_log2 = scale_log2_;
        maximum[0] = maximum[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
        factor[0] = factor[1] = 1.0f;
    }

    // Turns scores into weights. Returns whether the output must be multiplied with `factor` (the same in all lanes).
    // Every row of the tile has a score that is not masked.
    __device__ __forceinline__ bool update(float (&scores)[32]) {
        float part[4] = {scores[0], scores[1], scores[2], scores[3]};  // short chains
#pragma unroll
        for (int i = 4; i < 32; ++i) part[i % 4] = fmaxf(part[i % 4], scores[i]);
        const float top[2] = {quad_max(fmaxf(part[0], part[1])), quad_max(fmaxf(part[2], part[3]))};
        const bool grows = (top[0] - maximum[0]) * scale_log2 > kSlack || (top[1] - maximum[1]) * scale_log2 > kSlack;
        const bool rescale = __any_sync(0xFFFFFFFF, grows);
        if (rescale) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float next = fmaxf(maximum[r], top[r]);
                factor[r] = exp2_approx((maximum[r] - next) * scale_log2);
                maximum[r] = next;
                sum[r] *= factor[r];
            }
        }
        const float offset[2] = {maximum[0] * scale_log2, maximum[1] * scale_log2};
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int r = (i / 2) % 2;
            scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -offset[r]));
            sum[r] += scores[i];
        }
        return rescale;
    }

    template <int kCount>
    __device__ __forceinline__ void rescale_output(float (&output)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) output[i] *= factor[(i / 2) % 2];
    }
};

}  // namespace mtraining::sm90
