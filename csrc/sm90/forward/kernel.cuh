// Forward kernel: slash tiles and compact vertical tiles in one online-softmax pass.
//
// A warpgroup keeps its queries and its output in registers. While it does the softmax of tile n, the tensor cores
// compute the scores of tile n+1 and the output product of tile n-1: what it waits for was started a whole tile
// earlier.
#pragma once

#include "sm90/row_walk.cuh"
#include "sm90/softmax.cuh"

namespace mtraining::sm90 {

template <typename T, typename Plan>
struct ForwardConsumer {
    static constexpr int kHeadDim = Plan::kHeadDim;
    static constexpr int kNone = TileReader<RowShared<Plan>>::kNone, kBlocked = kNone - 2;
    using Query = uint32_t[kHeadDim / 4];
    using Output = float[kHeadDim / 2];

    // Scores of a tile and the weights made of them. Tiles alternate between two.
    struct Buffers {
        float scores[32];
        uint32_t weights[16];
    };

    const AttentionForwardParams& params;
    RowShared<Plan>& shared;
    TileReader<RowShared<Plan>> reader;
    int thread;  // of the warpgroup
    OnlineSoftmax softmax;
    // Stages of tiles n-2 (its output product runs), n-1 (its weights are made) and n (its scores are being computed),
    // or kNone.
    int older, before, now;

    __device__ __forceinline__ void start_scores(const Query& query, int stage, Buffers& to) {
        multiply_nt<T, kHeadDim>(to.scores, query, smem_address(shared.k[stage]));
        wgmma_commit();
    }

    __device__ __forceinline__ void start_output(Output& output, Buffers& from, int stage) {
        multiply_nn<T, kHeadDim>(output, from.weights, smem_address(shared.v[stage]));
        wgmma_commit();
    }

    __device__ __forceinline__ bool weigh(Buffers& mine) {
        pin(mine.scores);
        const uint64_t columns = reader.columns(now);
        if (reader.diagonal(now)) mask_diagonal(mine.scores, thread, -INFINITY);
        if (columns != kAllColumns) mask_columns(mine.scores, thread, columns, -INFINITY);
        const bool rescale = softmax.update(mine.scores);
        to_operand<T>(mine.scores, mine.weights);
        return rescale;
    }

    // The stage of the next tile; kNone at the end of the rows. kBlocked: tile n is in the way of the loader, because
    // so many tiles were skipped since; it must be worked off first.
    __device__ __forceinline__ int next_tile() {
        while (true) {
            if (reader.blocked_by(before)) {
                wgmma_wait<0>();
                reader.done(before);
                before = kNone;
            }
            if (reader.blocked_by(now)) return kBlocked;
            const int stage = reader.look();
            if (stage != reader.kSkipped) return stage;
        }
    }

    __device__ __forceinline__ void rescale_output(Output& output) {
        wgmma_wait<0>();
        pin(output);
        softmax.rescale_output(output);
        pin(output);
    }

    // Starts the output product of tile n-1 (weights in `from`), waits for the scores of tile n; returns what follows
    // it.
    __device__ __forceinline__ int begin_step(Output& output, Buffers& from) {
        pin(from.weights);
        pin(output);
        wgmma_fence();
        start_output(output, from, before);
        wgmma_wait<1>();
        reader.done(older);
        return next_tile();
    }

    // Starts the scores of tile n+1 in `other` and weighs tile n in `mine`.
    __device__ __forceinline__ void end_step(const Query& query, int next, Output& output, Buffers& mine,
                                             Buffers& other) {
        wgmma_fence();
        start_scores(query, next, other);
        if (weigh(mine)) rescale_output(output);
        older = before;
        before = now;
        now = next;
    }

    // Works tile n off, the last of its run.
    __device__ __forceinline__ void finish(Output& output, Buffers& mine) {
        const bool rescale = weigh(mine);
        wgmma_wait<0>();
        pin(output);
        if (rescale) softmax.rescale_output(output);
        pin(mine.weights);
        pin(output);
        wgmma_fence();
        start_output(output, mine, now);
        wgmma_wait<0>();
        pin(output);
        reader.done(before);
        reader.done(now);
    }

    // One row tile: leaves the unnormalised output and the softmax state. False if the rows met no tile. Tiles come in
    // runs: a run ends with the rows, or where the pipeline has to be emptied because so many tiles were skipped.
    __device__ __forceinline__ bool attend(const Query& query, Output& output) {
        bool any = false;
        while (true) {
            before = now = kNone;
            now = next_tile();
            if (now == kNone) return any;
            any = true;
            Buffers even, odd;
            wgmma_fence();
            start_scores(query, now, even);
            int next = next_tile();
            if (next < 0) {
                wgmma_wait<0>();
                finish(output, even);
            } else {
                wgmma_fence();
                start_scores(query, next, odd);
                wgmma_wait<1>();
                if (weigh(even)) softmax.rescale_output(output);
                older = kNone;
                before = now;
                now = next;
                while (true) {
                    next = begin_step(output, even);
                    if (next < 0) {
                        finish(output, odd);
                        break;
                    }
                    end_step(query, next, output, odd, even);
                    next = begin_step(output, odd);
                    if (next < 0) {
                        finish(output, even);
                        break;
                    }
                    end_step(query, next, output, even, odd);
                }
            }
            if (next == kNone) return true;
        }
    }

    // Weights of the old and the new output of a row, and its lse, which is written.
    struct Merge {
        float theirs, mine;
    };

    __device__ __forceinline__ Merge merge_lse(float* lse_at, bool any, int r) const {
        const float sum = quad_sum(softmax.sum[r]);
        float lse = any ? softmax.maximum[r] * params.scale + logf(sum) : -INFINITY;
        Merge merge{0.0f, any ? 1.0f / sum : 0.0f};
        if (params.accumulate) {
            const float old = *lse_at;
            const float top = fmaxf(old, lse);
            if (top != -INFINITY) {
                const float weight_old = expf(old - top), weight_new = expf(lse - top);
                const float total = weight_old + weight_new;
                merge.theirs = weight_old / total;
                merge.mine *= weight_new / total;
                lse = top + logf(total);
            }
            __syncwarp();  // all lanes of the row have read it
        }
        if (thread % 4 == 0) *lse_at = lse;
        return merge;
    }

    // Normalises, merges with what is there, rounds if final.
    __device__ __forceinline__ void store(const RowTile& tile, bool any, const Output& output) const {
        const bool is_final = params.final.data != nullptr;
        const int local = tile.first + reader.warpgroup;
        if (local >= params.shape.q_blocks || (!any && params.accumulate && !is_final)) return;
        const int64_t head_rows =
            (int64_t{tile.batch} * params.shape.heads + tile.head) * params.shape.q_blocks * kBlock;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = local * kBlock + (thread / 32) * 16 + (thread % 32) / 4 + 8 * r;
            const Merge merge = merge_lse(params.lse + head_rows + row, any, r);
            float* partial = params.partial.data + tile.batch * params.partial.batch_stride +
                             row * params.partial.row_stride + tile.head * params.partial.head_stride +
                             2 * (thread % 4);
            T* rounded = static_cast<T*>(params.final.data) + tile.batch * params.final.batch_stride +
                         row * params.final.row_stride + tile.head * params.final.head_stride + 8 * (thread % 4);
#pragma unroll
            for (int group = 0; group < kHeadDim / 32; ++group) {
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int j = 4 * group + k;
                    float2 value = {output[4 * j + 2 * r] * merge.mine, output[4 * j + 2 * r + 1] * merge.mine};
                    float2* at = reinterpret_cast<float2*>(partial + 8 * j);
                    if (merge.theirs != 0.0f) {
                        const float2 old = *at;
                        value.x += old.x * merge.theirs;
                        value.y += old.y * merge.theirs;
                    }
                    if (!is_final) *at = value;
                    words[k] = Element<T>::pack(value.x, value.y);
                }
                if (is_final) {
                    quad_transpose(words, thread % 4);
                    *reinterpret_cast<uint4*>(rounded + 32 * group) = {words[0], words[1], words[2], words[3]};
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        RingPosition<Plan::kRowBuffers> rows;
        for (PersistentLoop work; work.item < RowTile::count<Plan::kRowBlocks>(params.shape); work.advance()) {
            Output output;
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) output[i] = 0.0f;
            softmax.reset(params.scale * static_cast<float>(M_LOG2E));
            Query query;
            mbarrier_wait(&shared.row_ring[reader.warpgroup].full[rows.stage], rows.parity);
            load_operand<kHeadDim>(smem_address(shared.rows[rows.stage][reader.warpgroup][0]), thread, query);
            release(&shared.row_ring[reader.warpgroup].empty[rows.stage]);
            rows.advance();
            const bool any = attend(query, output);
            store(RowTile::at<Plan::kRowBlocks>(params.shape, work.item), any, output);
        }
    }
};

template <typename T, typename Plan>
__global__ __launch_bounds__(Plan::kThreads,
                             1) void forward_kernel(const __grid_constant__ AttentionForwardParams params,
                                                    const __grid_constant__ RowMaps maps) {
    auto& shared = dynamic_shared<RowShared<Plan>>();
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 4) {
        registers_release<Plan::kProducerRegisters>();
        if (warp == 0 && warp_leader()) RowLoader<Plan>{params.shape, maps, shared}.run();
        if (warp == 1) RowScout<Plan>{params.shape, params.mask, shared}.run();
    } else {
        registers_acquire<Plan::kConsumerRegisters>();
        ForwardConsumer<T, Plan>{params, shared, {shared, warp / 4 - 1}, static_cast<int>(threadIdx.x) % 128}.run();
    }
}

}  // namespace mtraining::sm90
