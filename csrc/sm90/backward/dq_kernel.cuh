// dQ of the rows: query-major, without atomics, for slash tiles and compact vertical tiles alike.
//
// A warpgroup keeps dq in registers, and q and dout as well (as A operands) at head_dim 128; at 64 they stay in shared
// memory, because ptxas 13.0 gives their registers to dS although the next tile needs them. Of each tile it recomputes
// P = exp(q k^T - lse) while the tensor cores compute dP = dout v^T, and dS = P (dP - delta) feeds dq += dS k.
#pragma once

#include "sm90/row_walk.cuh"
#include "sm90/softmax.cuh"

namespace mtraining::sm90 {

// What both backward operators give to this kernel.
struct DqParams {
    Shape shape;
    Mask mask;
    const float* lse;
    const float* delta;
    RowView<float> dq;
    float scale;
    bool accumulate;
};

template <typename T, typename Plan>
struct DqConsumer {
    static constexpr int kHeadDim = Plan::kHeadDim;
    static constexpr int kNone = TileReader<RowShared<Plan>>::kNone;
    using Rows = uint32_t[kHeadDim / 4];
    using Gradient = float[kHeadDim / 2];
    static constexpr bool kRowsInRegisters = kHeadDim == 128;

    const DqParams& params;
    RowShared<Plan>& shared;
    TileReader<RowShared<Plan>> reader;
    int thread;  // of the warpgroup
    float scale_log2;
    float lse2[2], delta[2];  // of this thread's rows

    __device__ __forceinline__ int row(const RowTile& tile, int r) const {
        return (tile.first + reader.warpgroup) * kBlock + (thread / 32) * 16 + (thread % 32) / 4 + 8 * r;
    }

    __device__ __forceinline__ void load_statistics(const RowTile& tile) {
        const int64_t rows = int64_t{params.shape.q_blocks} * kBlock;
        const int64_t base = (int64_t{tile.batch} * params.shape.heads + tile.head) * rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool real = row(tile, r) < rows;
            lse2[r] = lse_log2(real ? __ldg(params.lse + base + row(tile, r)) : -INFINITY);
            delta[r] = real ? __ldg(params.delta + base + row(tile, r)) : 0.0f;
        }
    }

    // Scores to P in place.
    __device__ __forceinline__ void weigh(float (&scores)[32], int stage) {
#pragma unroll
        for (int i = 0; i < 32; ++i) scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -lse2[(i / 2) % 2]));
        const uint64_t columns = reader.columns(stage);
        if (reader.diagonal(stage)) mask_diagonal(scores, thread, 0.0f);
        if (columns != kAllColumns) mask_columns(scores, thread, columns, 0.0f);
    }

    // False if the rows met no tile. dq lacks the factor `scale`.
    template <typename Operand>
    __device__ __forceinline__ bool walk(const Operand& q, const Operand& dout, Gradient& dq) {
        int held = kNone;
        int now = reader.next_tile(held);
        if (now == kNone) return false;
        while (now != kNone) {
            now = __shfl_sync(0xFFFFFFFF, now, 0);  // descriptors made of it are kept in uniform registers
            float scores[32], dp[32];
            uint32_t operand[16];
            wgmma_fence();
            multiply_nt<T, kHeadDim>(scores, q, smem_address(shared.k[now]));
            wgmma_commit();
            multiply_nt<T, kHeadDim>(dp, dout, smem_address(shared.v[now]));
            wgmma_commit();
            wgmma_wait<1>();
            pin(scores);
            weigh(scores, now);
            pin(scores);
            wgmma_wait<0>();
            pin(dp);
#pragma unroll
            for (int i = 0; i < 32; ++i) scores[i] *= dp[i] - delta[(i / 2) % 2];
            to_operand<T>(scores, operand);
            pin(operand);
            pin(dq);
            wgmma_fence();
            multiply_nn<T, kHeadDim>(dq, operand, smem_address(shared.k[now]));
            wgmma_commit();
            held = now;
            const int following = reader.next_tile(held);
            wgmma_wait<0>();  // the tensor cores work in order: waiting here delays nothing and frees the operand
            pin(dq);
            reader.done(held);
            held = kNone;
            now = following;
        }
        return true;
    }

    __device__ __forceinline__ void store(const RowTile& tile, bool any, const Gradient& dq) const {
        if (tile.first + reader.warpgroup >= params.shape.q_blocks || (!any && params.accumulate)) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* to = params.dq.data + tile.batch * params.dq.batch_stride + row(tile, r) * params.dq.row_stride +
                        tile.head * params.dq.head_stride + 2 * (thread % 4);
#pragma unroll
            for (int j = 0; j < kHeadDim / 8; ++j) {
                const float2 value = {dq[4 * j + 2 * r] * params.scale, dq[4 * j + 2 * r + 1] * params.scale};
                if (params.accumulate) {  // the only addition to this element in this launch
                    global_add(to + 8 * j, value.x, value.y);
                } else {
                    *reinterpret_cast<float2*>(to + 8 * j) = value;
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        RingPosition<Plan::kRowBuffers> rows;
        scale_log2 = params.scale * static_cast<float>(M_LOG2E);
        for (PersistentLoop work; work.item < RowTile::count<Plan::kRowBlocks>(params.shape); work.advance()) {
            Gradient dq;
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.0f;
            load_statistics(RowTile::at<Plan::kRowBlocks>(params.shape, work.item));
            auto& row_ring = shared.row_ring[reader.warpgroup];
            mbarrier_wait(&row_ring.full[rows.stage], rows.parity);
            const uint32_t q_tile = smem_address(shared.rows[rows.stage][reader.warpgroup][0]);
            const uint32_t dout_tile = smem_address(shared.rows[rows.stage][reader.warpgroup][1]);
            bool any;
            if constexpr (kRowsInRegisters) {
                Rows q, dout;
                load_operand<kHeadDim>(q_tile, thread, q);
                load_operand<kHeadDim>(dout_tile, thread, dout);
                release(&row_ring.empty[rows.stage]);
                any = walk(q, dout, dq);
            } else {
                any = walk(q_tile, dout_tile, dq);
                release(&row_ring.empty[rows.stage]);
            }
            rows.advance();
            store(RowTile::at<Plan::kRowBlocks>(params.shape, work.item), any, dq);
        }
    }
};

template <typename T, typename Plan>
__global__ __launch_bounds__(Plan::kThreads, 1) void dq_kernel(const __grid_constant__ DqParams params,
                                                               const __grid_constant__ RowMaps maps) {
    auto& shared = dynamic_shared<RowShared<Plan>>();
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 4) {
        registers_release<Plan::kProducerRegisters>();
        if (warp == 0 && elect_lane())
            RowLoader<Plan>{params.shape, maps, shared, TileDealer<RowShared<Plan>>(shared)}.run();
        if (warp == 1) RowScout<Plan>{params.shape, params.mask, shared}.run();
    } else {
        registers_acquire<Plan::kConsumerRegisters>();
        DqConsumer<T, Plan>{params, shared, {shared, warp / 4 - 1}, static_cast<int>(threadIdx.x) % 128}.run();
    }
}

}  // namespace mtraining::sm90
