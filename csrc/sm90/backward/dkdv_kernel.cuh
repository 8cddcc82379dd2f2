// dK and dV of the keys: key-major, summed over the query heads of the group in registers, without atomics.
//
// Everything is transposed, so that P and dS are A operands straight from the accumulators: S^T = k q^T, dP^T = v
// dout^T, dv += P^T dout, dk += dS^T q. The exponentials run while dP^T is computed; the rest of the arithmetic of one
// warpgroup runs during the products of the other.
#pragma once

#include "sm90/backward/eager_reader.cuh"
#include "sm90/key_walk.cuh"
#include "sm90/softmax.cuh"

namespace mtraining::sm90 {

template <typename T, typename Plan>
struct DkdvConsumer {
    static constexpr int kHeadDim = Plan::kHeadDim;
    using Reader = EagerReader<KeyShared<Plan>>;
    using Cut = typename Reader::Cut;
    static constexpr int kNone = Reader::kNone;
    static constexpr int kEarly = KEARLY;  // denominators loaded while the scores are computed
    using Gradient = float[kHeadDim / 2];

    const KeyParams& params;
    KeyShared<Plan>& shared;
    Reader reader;
    int thread;  // of the warpgroup
    float scale_log2;

    // log2 of the softmax denominators of this thread's columns (queries) 8 j, 8 j + 1 from `first` on.
    template <int kCount>
    __device__ __forceinline__ void load_lse(float (&lse2)[kCount], int first, int stage) const {
        const float* lse = shared.lse[stage] + 2 * (thread % 4) + 8 * first;
#pragma unroll
        for (int j = 0; j < kCount / 2; ++j) {
            const float2 of_columns = *reinterpret_cast<const float2*>(lse + 8 * j);
            lse2[2 * j] = lse_log2(of_columns.x);
            lse2[2 * j + 1] = lse_log2(of_columns.y);
        }
    }

    // Transposed scores to P^T in place; `early` are the denominators of the first columns.
    __device__ __forceinline__ void weigh(float (&scores)[32], const float (&early)[kEarly], int stage) {
        float late[16 - kEarly];
        load_lse(late, kEarly / 2, stage);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int column = 2 * (i / 4) + i % 2;
            const float lse2 = column < kEarly ? early[column % kEarly] : late[(column - kEarly + 16) % (16 - kEarly)];
            scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -lse2));
        }
        const Cut cut = reader.cut(stage);
        if (cut.diagonal) mask_diagonal_transposed(scores, thread, 0.0f);
        if (cut.slots != kAllColumns) mask_rows(scores, thread, cut.slots, 0.0f);
    }

    // P^T to dS^T in place.
    __device__ __forceinline__ void differentiate(float (&weights)[32], const float (&dp)[32], int stage) {
        const float* delta = shared.delta[stage] + 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 of_columns = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[4 * j + i] *= dp[4 * j + i] - (i % 2 ? of_columns.y : of_columns.x);
        }
    }

    __device__ __forceinline__ void start_scores(float (&scores)[32], int stage) {
        const int mine = Plan::kSplitRows ? 0 : reader.warpgroup;
        wgmma_fence();
        multiply_nt<T, kHeadDim>(scores, tile_address(shared.k[mine]), tile_address(shared.q[stage]));
        wgmma_commit();
    }

    // The loop body: P^T and dS^T of the tile in `stage`, whose scores are under way, and the start of the products that
    // add them to dv and dk. Returns the next tile, if it can be told without waiting.
    __device__ __forceinline__ int add_tile(float (&scores)[32], Gradient& dk, Gradient& dv, int stage) {
        const int mine = Plan::kSplitRows ? 0 : reader.warpgroup;
        const uint32_t q = tile_address(shared.q[stage]), dout = tile_address(shared.dout[stage]);
        float dp[32], early[kEarly];
        uint32_t operand_p[16], operand_ds[16];
        wgmma_fence();
        multiply_nt<T, kHeadDim>(dp, tile_address(shared.v[mine]), dout);
        wgmma_commit();
        load_lse(early, 0, stage);
        const int following = reader.look_ahead();
        pin(early);
        wgmma_wait<1>();
        pin(scores);
        weigh(scores, early, stage);
        pin(scores);
        wgmma_wait<0>();
        pin(dp);
        to_operand<T>(scores, operand_p);
        differentiate(scores, dp, stage);
        to_operand<T>(scores, operand_ds);
        pin(operand_p);
        pin(operand_ds);
        pin(dv);
        pin(dk);
        wgmma_fence();
        multiply_nn<T, kHeadDim>(dv, operand_p, dout);
        multiply_nn<T, kHeadDim>(dk, operand_ds, q);
        wgmma_commit();
        return following;
    }

    // dk lacks the factor `scale`. The scores of the next tile are started behind the products of this one.
    __device__ __forceinline__ void walk(Gradient& dk, Gradient& dv) {
        int held = kNone;
        int now = reader.next_tile(held);
        if (now == kNone) return;
        float scores[32];
        start_scores(scores, now);
        while (true) {
            int following = add_tile(scores, dk, dv, now);
            held = now;
            if (following == reader.kUnknown) following = reader.next_tile(held);
            if (following == kNone) break;
            start_scores(scores, following);
            wgmma_wait<1>();
            pin(dk);
            pin(dv);
            reader.done(held);
            held = kNone;
            now = following;
        }
        wgmma_wait<0>();
        pin(dk);
        pin(dv);
        reader.done(held);
    }

    // Adds up what the warpgroups of the cluster found of the same keys, always in the same order: the two of a CTA, then
    // the CTAs. Returns whether this warpgroup has the sums, which travel in the ring's memory: its tiles have all been
    // used.
    __device__ __forceinline__ bool combine(Gradient& dk, Gradient& dv) {
        using Part = float[kHeadDim / 2][128];
        static_assert(2 * sizeof(Part) <= sizeof(shared.q) && Plan::kConsumers == 2 && Plan::kCluster == 2);
        Part* parts = reinterpret_cast<Part*>(shared.q);
        const bool first_cta = blockIdx.x % Plan::kCluster == 0, first = reader.warpgroup == 0;
        named_barrier(1, 128 * Plan::kConsumers);  // both have worked off their tiles
        if (!first) write_parts(parts, dk, dv);
        named_barrier(1, 128 * Plan::kConsumers);
        if (first) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) {
                dk[i] += parts[0][i][thread];
                dv[i] += parts[1][i][thread];
            }
            if (!first_cta) write_parts(parts, dk, dv);
        }
        cluster_barrier();
        if (first && first_cta) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) {
                dk[i] += load_from_cluster(&parts[0][i][thread], 1);
                dv[i] += load_from_cluster(&parts[1][i][thread], 1);
            }
        }
        cluster_barrier();  // no CTA ends before its memory has been read
        return first && first_cta;
    }

    template <typename Part>
    __device__ __forceinline__ void write_parts(Part* parts, const Gradient& dk, const Gradient& dv) const {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) {
            parts[0][i][thread] = dk[i];
            parts[1][i][thread] = dv[i];
        }
    }

    __device__ __forceinline__ void store(const KeyTile<Plan>& tile, const ChunkView<float>& view,
                                          const Gradient& gradient, float factor) const {
        const int block = tile.first + (Plan::kSplitRows ? 0 : reader.warpgroup);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = block * kBlock + (thread / 32) * 16 + (thread % 32) / 4 + 8 * r;
            if (row >= params.key_rows) continue;
            float* to = view.data + tile.chunk * view.chunk_stride + tile.batch * view.batch_stride +
                        row * view.row_stride + tile.kv_head * view.head_stride + 2 * (thread % 4);
#pragma unroll
            for (int j = 0; j < kHeadDim / 8; ++j) {
                *reinterpret_cast<float2*>(to + 8 * j) = {gradient[4 * j + 2 * r] * factor,
                                                          gradient[4 * j + 2 * r + 1] * factor};
            }
        }
    }

    __device__ __forceinline__ void run() {
        uint32_t parity = 0;
        scale_log2 = params.scale * static_cast<float>(M_LOG2E);
        const int mine = Plan::kSplitRows ? 0 : reader.warpgroup;
        for (KeyItems<Plan> items(params.shape); items.left(); items.advance()) {
            Gradient dk, dv;
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
            mbarrier_wait(&shared.keys_full[mine], parity);
            parity ^= 1;
            walk(dk, dv);
            const auto tile = KeyTile<Plan>::at(params.shape, items.item);
            if constexpr (Plan::kSplitRows) {
                if (!combine(dk, dv)) return;
            } else {
                release(&shared.keys_empty[mine]);
            }
            store(tile, params.dv, dv, 1.0f);
            store(tile, params.dk, dk, params.scale);
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
        if (warp == 0 && warp_leader())
            KeyLoader<Plan>{params, maps, shared, TileDealer<KeyShared<Plan>>(shared)}.run();
        if (warp == 1) KeyScout<Plan>{params.shape, params.mask, shared}.run();
    } else {
        registers_acquire<Plan::kConsumerRegisters>();
        DkdvConsumer<T, Plan>{params, shared, {{shared, warp / 4 - 1}}, static_cast<int>(threadIdx.x) % 128}.run();
    }
}

}  // namespace mtraining::sm90
