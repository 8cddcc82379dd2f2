// End of the forward kernel: (out, lse) of this launch, merged with those of earlier launches, in fp32.
#pragma once

#include "device/mma.cuh"
#include "sm80/work_list.cuh"

namespace mtraining::sm80 {

// Weights of two partial results by their natural-log lse; an empty one has lse -inf. Survives any gap.
struct Merge {
    float lse;
    float old_weight;
    float new_weight;

    __device__ __forceinline__ Merge(float old_lse, float new_lse) {
        const float top = fmaxf(old_lse, new_lse);
        if (top == device::negative_infinity()) {
            lse = top;
            old_weight = new_weight = 0;
            return;
        }
        const float a = expf(old_lse - top);
        const float b = expf(new_lse - top);
        lse = top + logf(a + b);
        old_weight = a / (a + b);
        new_weight = b / (a + b);
    }
};

// Writes the rows first_row + 16 m + lane / 4 + {0, 8} of the accumulators: to `final` once rounded, otherwise to
// `partial`; always to lse. `maximum` is of the unscaled scores, `sum` the thread's share of the row sum.
template <typename T, int D, int kM>
__device__ __forceinline__ void store_rows(const AttentionForwardParams& p, const QueryPlace& place, int first_row,
                                           float (&out)[kM][D / 8][4], float (&maximum)[kM][2], float (&sum)[kM][2]) {
    const int lane = threadIdx.x % 32;
    const int batch = place.batch, head = place.head;
    const int64_t batch_head = static_cast<int64_t>(batch) * p.shape.heads + head;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = sum[m][r];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const int64_t row = static_cast<int64_t>(place.q_block) * kBlock + first_row + 16 * m + lane / 4 + 8 * r;
            float* lse = p.lse + batch_head * p.shape.q_blocks * kBlock + row;
            const float new_lse = total > 0 ? fmaf(maximum[m][r], p.scale, logf(total)) : device::negative_infinity();
            const int64_t column = 2 * (lane % 4);
            float* partial = p.partial.data ? p.partial.data + batch * p.partial.batch_stride +
                                                  row * p.partial.row_stride + head * p.partial.head_stride + column
                                            : nullptr;
            if (p.accumulate) {
                const Merge merge(*lse, new_lse);
                __syncwarp();  // all four threads of the row have read lse
                if (lane % 4 == 0) *lse = merge.lse;
                const float weight = total > 0 ? merge.new_weight / total : 0.0f;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    float* value = &out[m][n][2 * r];
                    value[0] *= weight;
                    value[1] *= weight;
                    // A weight of zero also discards what an empty partial holds.
                    if (merge.old_weight > 0) {
                        const float2 old = *reinterpret_cast<const float2*>(partial + 8 * n);
                        value[0] = fmaf(old.x, merge.old_weight, value[0]);
                        value[1] = fmaf(old.y, merge.old_weight, value[1]);
                    }
                }
            } else {
                if (lane % 4 == 0) *lse = new_lse;
                const float weight = total > 0 ? 1.0f / total : 0.0f;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    out[m][n][2 * r] *= weight;
                    out[m][n][2 * r + 1] *= weight;
                }
            }
            if (p.final.data) {
                T* final = static_cast<T*>(p.final.data) + batch * p.final.batch_stride + row * p.final.row_stride +
                           head * p.final.head_stride + column;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    *reinterpret_cast<uint32_t*>(final + 8 * n) =
                        device::pack<T>(out[m][n][2 * r], out[m][n][2 * r + 1]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    *reinterpret_cast<float2*>(partial + 8 * n) = make_float2(out[m][n][2 * r], out[m][n][2 * r + 1]);
                }
            }
        }
}

}  // namespace mtraining::sm80
