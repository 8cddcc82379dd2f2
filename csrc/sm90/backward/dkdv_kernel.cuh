// dK and dV of the keys: key-major, summed over the query heads of the group in registers, without atomics.
//
// Everything is transposed, so that P and dS are A operands straight from the accumulators: S^T = k q^T, dP^T = v
// dout^T, dv += P^T dout, dk += dS^T q. The exponentials run while dP^T is computed; the rest of the arithmetic of one
// warpgroup runs during the products of the other.
#pragma once

#include "sm90/key_walk.cuh"
#include "sm90/softmax.cuh"

namespace mtraining::sm90 {

template <typename T, typename Plan>
struct DkdvConsumer {
    static constexpr int kHeadDim = Plan::kHeadDim;
    static constexpr int kNone = TileReader<KeyShared<Plan>>::kNone;
    using Gradient = float[kHeadDim / 2];

    const KeyParams& params;
    KeyShared<Plan>& shared;
    TileReader<KeyShared<Plan>> reader;
    int thread;  // of the warpgroup
    float scale_log2;

    // Transposed scores to P^T in place.
    __device__ __forceinline__ void weigh(float (&scores)[32], int stage) {
        const float* lse = shared.lse[stage] + 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 of_columns = *reinterpret_cast<const float2*>(lse + 8 * j);
            const float lse2[2] = {lse_log2(of_columns.x), lse_log2(of_columns.y)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[4 * j + i] = exp2_approx(fmaf(scores[4 * j + i], scale_log2, -lse2[i % 2]));
            }
        }
        const uint64_t keys = reader.columns(stage);
        if (reader.diagonal(stage)) mask_diagonal_transposed(scores, thread, 0.0f);
        if (keys != kAllColumns) mask_rows(scores, thread, keys, 0.0f);
    }

    // dP^T to dS^T in place. (The other way round ptxas does not find the registers for all operands of a step.)
    __device__ __forceinline__ void differentiate(const float (&weights)[32], float (&dp)[32], int stage) {
        const float* delta = shared.delta[stage] + 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 of_columns = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float difference = dp[4 * j + i] - (i % 2 ? of_columns.y : of_columns.x);
                dp[4 * j + i] = weights[4 * j + i] * difference;
            }
        }
    }

    // dk lacks the factor `scale`.
    __device__ __forceinline__ void walk(Gradient& dk, Gradient& dv) {
        const uint32_t k = tile_address(shared.k[reader.warpgroup]), v = tile_address(shared.v[reader.warpgroup]);
        int held = kNone;
        int now = reader.next_tile(held);
        while (now != kNone) {
            now = __shfl_sync(0xFFFFFFFF, now, 0);  // descriptors made of it are kept in uniform registers
            const uint32_t q = tile_address(shared.q[now]), dout = tile_address(shared.dout[now]);
            float scores[32], dp[32];
            uint32_t operand_p[16], operand_ds[16];
            wgmma_fence();
            multiply_nt<T, kHeadDim>(scores, k, q);
            wgmma_commit();
            multiply_nt<T, kHeadDim>(dp, v, dout);
            wgmma_commit();
            wgmma_wait<1>();
            pin(scores);
            weigh(scores, now);
            pin(scores);
            wgmma_wait<0>();
            pin(dp);
            to_operand<T>(scores, operand_p);
            differentiate(scores, dp, now);
            to_operand<T>(dp, operand_ds);
            pin(operand_p);
            pin(operand_ds);
            pin(dv);
            pin(dk);
            wgmma_fence();
            multiply_nn<T, kHeadDim>(dv, operand_p, dout);
            multiply_nn<T, kHeadDim>(dk, operand_ds, q);
            wgmma_commit();
            held = now;
            const int following = reader.next_tile(held);
            wgmma_wait<0>();  // the tensor cores work in order: waiting here delays nothing and frees the operands
            pin(dk);
            pin(dv);
            reader.done(held);
            held = kNone;
            now = following;
        }
    }

    // Where this thread's elements 0 of row half `r` go; null beyond the last row.
    __device__ __forceinline__ float* place(const KeyTile<Plan>& tile, const ChunkView<float>& view, int r) const {
        const int row = (tile.first + reader.warpgroup) * kBlock + (thread / 32) * 16 + (thread % 32) / 4 + 8 * r;
        if (row >= params.key_rows) return nullptr;
        return view.data + tile.chunk * view.chunk_stride + tile.batch * view.batch_stride + row * view.row_stride +
               tile.kv_head * view.head_stride + 2 * (thread % 4);
    }

    __device__ __forceinline__ void store(const KeyTile<Plan>& tile, const ChunkView<float>& view,
                                          const Gradient& gradient, float factor) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* to = place(tile, view, r);
            if (to == nullptr) continue;
#pragma unroll
            for (int j = 0; j < kHeadDim / 8; ++j) {
                *reinterpret_cast<float2*>(to + 8 * j) = {gradient[4 * j + 2 * r] * factor,
                                                          gradient[4 * j + 2 * r + 1] * factor};
            }
        }
    }

    // A gradient as one warpgroup of one CTA found it, in the ring's memory, whose tiles have all been used.
    using Part = float[kHeadDim / 2][128];

    // Adds up a part over the CTAs of the cluster, always in the same order, and writes this CTA's share of the
    // columns.
    __device__ __forceinline__ void store_sum(const KeyTile<Plan>& tile, const ChunkView<float>& view, const Part& part,
                                              float factor) const {
        constexpr int kShare = kHeadDim / 8 / Plan::kCluster;  // groups of 8 columns
        const int first = static_cast<int>(blockIdx.x) % Plan::kCluster * kShare;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* to = place(tile, view, r);
#pragma unroll
            for (int j = 0; j < kShare; ++j) {
                float2 sum = {0.0f, 0.0f};
#pragma unroll
                for (int cta = 0; cta < Plan::kCluster; ++cta) {
                    sum.x += load_from_cluster(&part[4 * (first + j) + 2 * r][thread], cta);
                    sum.y += load_from_cluster(&part[4 * (first + j) + 2 * r + 1][thread], cta);
                }
                if (to != nullptr) {
                    *reinterpret_cast<float2*>(to + 8 * (first + j)) = {sum.x * factor, sum.y * factor};
                }
            }
        }
    }

    // The end of an item of columns.
    __device__ __forceinline__ void combine(const KeyTile<Plan>& tile, const Gradient& dk, const Gradient& dv) {
        static_assert(2 * sizeof(Part) <= sizeof(shared.q) && Plan::kKeyBlocks == 2);
        Part* parts = reinterpret_cast<Part*>(reader.warpgroup == 0 ? shared.q : shared.dout);
        named_barrier(1, 128 * Plan::kKeyBlocks);  // both warpgroups have worked off their tiles
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) {
            parts[0][i][thread] = dk[i];
            parts[1][i][thread] = dv[i];
        }
        cluster_barrier();
        store_sum(tile, params.dk, parts[0], params.scale);
        store_sum(tile, params.dv, parts[1], 1.0f);
        cluster_barrier();  // no CTA ends before its memory has been read
    }

    __device__ __forceinline__ void run() {
        uint32_t parity = 0;
        scale_log2 = params.scale * static_cast<float>(M_LOG2E);
        for (KeyItems<Plan> items(params.shape); items.left(); items.advance()) {
            Gradient dk, dv;
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
            mbarrier_wait(&shared.keys_full[reader.warpgroup], parity);
            parity ^= 1;
            walk(dk, dv);
            const auto tile = KeyTile<Plan>::at(params.shape, items.item);
            if constexpr (Plan::kColumns) {
                combine(tile, dk, dv);
            } else {
                release(&shared.keys_empty[reader.warpgroup]);
                store(tile, params.dv, dv, 1.0f);
                store(tile, params.dk, dk, params.scale);
            }
        }
    }
};

template <typename T, typename Plan>
__global__ __launch_bounds__(Plan::kThreads, 1) void dkdv_kernel(const __grid_constant__ KeyParams params,
                                                                 const __grid_constant__ KeyMaps maps) {
    auto& shared = dynamic_shared<KeyShared<Plan>>();
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 4) {
        registers_release<Plan::kProducerRegisters>();
        if (warp == 0 && elect_lane()) KeyLoader<Plan>{params, maps, shared, TileDealer<KeyShared<Plan>>(shared)}.run();
        if (warp == 1) KeyScout<Plan>{params.shape, params.mask, shared}.run();
    } else {
        registers_acquire<Plan::kConsumerRegisters>();
        DkdvConsumer<T, Plan>{params, shared, {shared, warp / 4 - 1}, static_cast<int>(threadIdx.x) % 128}.run();
    }
}

}  // namespace mtraining::sm90
