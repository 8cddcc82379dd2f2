// Masks and the online softmax on the accumulators of a 64 x 64 tile of scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "sm90/wgmma.cuh"

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

// Running maximum and sum of a thread's two rows. The maximum may lag behind the true one: it is raised only when the
// sum of a thread's weights of a row passes kLimit, which after the first tiles is rare. So weights wait for no
// maximum, and nothing is compared, exchanged or rescaled in the common case. The lag cancels when the sum divides the
// output.
struct OnlineSoftmax {
    static constexpr float kLimit = 256.0f;  // far below the largest fp16 number: weights are rounded to the input type

    float scale_log2;  // softmax scale * log2(e)
    float offset[2];   // maximum * scale_log2
    float sum[2];      // over this thread's columns
    float factor[2];   // what the output has to be multiplied with after the maximum was raised

    __device__ __forceinline__ void reset(float scale_log2_) {
        scale_log2 = scale_log2_;
        offset[0] = offset[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
        factor[0] = factor[1] = 1.0f;
    }

    // Weights under the current maximum, and their sums.
    template <typename T>
    __device__ __forceinline__ void weigh(const float (&scores)[32], uint32_t (&weights)[16], float (&total)[2]) const {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // short chains
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const int r = (i / 2) % 2;
            const float low = exp2_approx(fmaf(scores[i], scale_log2, -offset[r]));
            const float high = exp2_approx(fmaf(scores[i + 1], scale_log2, -offset[r]));
            part[2 * r] += low;
            part[2 * r + 1] += high;
            weights[i / 2] = Element<T>::pack(low, high);
        }
        total[0] = part[0] + part[1];
        total[1] = part[2] + part[3];
    }

    // Turns scores into weights under the true maximum; the output must be multiplied with `factor`. Every row of the
    // tile has a score that is not masked.
    template <typename T>
    __device__ __forceinline__ void raise(const float (&scores)[32], uint32_t (&weights)[16]) {
        float top[2] = {scores[0], scores[2]};
#pragma unroll
        for (int i = 0; i < 32; ++i) top[(i / 2) % 2] = fmaxf(top[(i / 2) % 2], scores[i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float next = fmaxf(offset[r], quad_max(top[r]) * scale_log2);
            factor[r] = exp2_approx(offset[r] - next);
            offset[r] = next;
        }
        float total[2];
        weigh<T>(scores, weights, total);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + total[r];
    }

    // Turns scores into weights under the current maximum. False, the same in all lanes, if that has to be raised: then
    // nothing has changed but `weights`. Sums that are no number count as too large.
    template <typename T>
    __device__ __forceinline__ bool update(const float (&scores)[32], uint32_t (&weights)[16]) {
        float total[2];
        weigh<T>(scores, weights, total);
        if (!__all_sync(0xFFFFFFFF, total[0] <= kLimit && total[1] <= kLimit)) return false;
        sum[0] += total[0];
        sum[1] += total[1];
        return true;
    }

    template <int kCount>
    __device__ __forceinline__ void rescale_output(float (&output)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) output[i] *= factor[(i / 2) % 2];
    }
};

}  // namespace mtraining::sm90
