// Forward kernel: slash tiles and compact vertical tiles in one online-softmax pass.
//
// A warpgroup keeps its queries and its output in registers. In a step it starts the scores of tile n+1 and behind them
// the output product of tile n, and turns scores into weights as soon as the former are there, while the tensor cores
// work at the latter and at the products of the other warpgroup. A step is one chain of instructions of a warp, whose
// length counts: what can be done while the scores are computed (finding the next tile) is done there, and what is rare
// (masks, a raised maximum, a tile that is late) is out of the way.
#pragma once

#include "sm90/row_walk.cuh"
#include "sm90/softmax.cuh"

namespace mtraining::sm90 {

template <typename T, typename Plan>
struct ForwardConsumer {
    static constexpr int kHeadDim = Plan::kHeadDim;
    static constexpr int kNone = TileReader<RowShared<Plan>>::kNone;
    using Query = uint32_t[kHeadDim / 4];
    using Output = float[kHeadDim / 2];
    using Scores = float[32];
    using Weights = uint32_t[16];  // A operand of the output product

    const AttentionForwardParams& params;
    RowShared<Plan>& shared;
    TileReader<RowShared<Plan>> reader;
    int thread;  // of the warpgroup
    OnlineSoftmax softmax;

    __device__ __forceinline__ void start_scores(const Query& query, int stage, Scores& to) {
        multiply_nt<T, kHeadDim>(to, query, smem_address(shared.k[stage]));
        wgmma_commit();
    }

    __device__ __forceinline__ void start_output(Output& output, const Weights& from, int stage) {
        multiply_nn<T, kHeadDim>(output, from, smem_address(shared.v[stage]));
        wgmma_commit();
    }

    __device__ __forceinline__ void mask(Scores& scores, int stage) const {
        const uint64_t columns = reader.columns(stage);
        if (reader.diagonal(stage)) mask_diagonal(scores, thread, -INFINITY);
        if (columns != kAllColumns) mask_columns(scores, thread, columns, -INFINITY);
    }

    // Scores to weights.
    __device__ __forceinline__ void weigh(const Scores& scores, Weights& weights, Output& output) {
        if (softmax.template update<T>(scores, weights)) return;
        wgmma_wait<0>();
        pin(output);
        raise(scores, weights, output);
        pin(output);
    }

    // The same under the true maximum; nothing is in flight.
    __device__ __forceinline__ void raise(const Scores& scores, Weights& weights, Output& output) {
        softmax.template raise<T>(scores, weights);
        softmax.rescale_output(output);
    }

    // The first tile of a run: nothing is in flight.
    __device__ __forceinline__ void begin(const Query& query, Output& output, Weights& to, int first) {
        Scores scores;
        wgmma_fence();
        start_scores(query, first, scores);
        wgmma_wait<0>();
        pin(scores);
        if (reader.masked) mask(scores, first);
        raise(scores, to, output);
    }

    // The output product of tile `now` (weights in `from`) behind the scores of tile `next`, which it waits for.
    __device__ __forceinline__ void multiply(const Query& query, Output& output, Weights& from, Scores& scores, int now,
                                             int next) {
        pin(from);
        pin(output);
        const uint32_t following = load_word(reader.slot());
        wgmma_fence();
        start_scores(query, next, scores);
        start_output(output, from, now);
        reader.look_ahead(following);
        wgmma_wait<1>();
        pin(scores);
    }

    // Waits for the output product of tile `now`.
    __device__ __forceinline__ void settle(Output& output, Weights& from, int now) {
        wgmma_wait<0>();
        pin(output);
        pin(from);
        reader.products_done(now);
    }

    // The output product of the last tile of a run.
    __device__ __forceinline__ void finish(Output& output, Weights& from, int now) {
        pin(from);
        pin(output);
        wgmma_fence();
        start_output(output, from, now);
        settle(output, from, now);
    }

    // One tile after `now`, of any kind, and those that follow as long as they need no mask. Weights of tile `now` are
    // in `even` before and after it. False if there was no tile: `now` says why.
    //
    // The four warps of a warpgroup must come to the same wgmma instruction, not just to one that multiplies the same
    // tiles: with copies chosen by timing the products came out wrong, as if the registers of one warp's instruction
    // were taken for all four. So which of the copies of `multiply` a warp comes to follows from the tickets alone.
    __device__ __forceinline__ bool walk(const Query& query, Output& output, Weights& even, int& now) {
        int none = kNone;  // nothing that waiting for a tile would have to let go of
        int next = reader.next(none);
        if (next < 0) {
            finish(output, even, now);
            now = next;
            return false;
        }
        Scores scores;
        Weights odd;
        const bool masked = reader.masked;
        multiply(query, output, even, scores, now, next);
        if (masked) mask(scores, next);
        weigh(scores, odd, output);
        while (true) {
            settle(output, even, now);
            now = next;
            reader.wait_ahead(none);
            if (!reader.plain_ahead()) {
                pin(odd);
                copy(odd, even);
                pin(even);
                return true;
            }
            next = reader.take_ahead();
            multiply(query, output, odd, scores, now, next);
            weigh(scores, even, output);
            settle(output, odd, now);
            now = next;
            reader.wait_ahead(none);
            if (!reader.plain_ahead()) return true;
            next = reader.take_ahead();
            multiply(query, output, even, scores, now, next);
            weigh(scores, odd, output);
        }
    }

    // One row tile: leaves the unnormalised output and the softmax state. False if the rows met no tile. Tiles come in
    // runs: a run ends with the rows, or where the loader wants the stage of the tile in hand because so many tiles of
    // the other warpgroup follow.
    __device__ __forceinline__ bool attend(const Query& query, Output& output) {
        for (bool any = false;; any = true) {
            int none = kNone;
            int now = reader.next_tile(none);
            if (now == kNone) return any;
            Weights weights;
            begin(query, output, weights, now);
            while (walk(query, output, weights, now)) {
            }
            if (now == kNone) return true;
        }
    }

    // Weights of the old and the new output of a row, and its lse, which is written.
    struct Merge {
        float theirs, mine;
    };

    __device__ __forceinline__ Merge merge_lse(float* lse_at, bool any, int r) const {
        const float sum = quad_sum(softmax.sum[r]);
        float lse = any ? softmax.offset[r] * static_cast<float>(M_LN2) + logf(sum) : -INFINITY;
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

    // Row r of this thread: adds what is there.
    __device__ __forceinline__ void add_partial(const float* partial, float weight, int r, Output& output) const {
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
            const float2 old = *reinterpret_cast<const float2*>(partial + 8 * j);
            output[4 * j + 2 * r] += old.x * weight;
            output[4 * j + 2 * r + 1] += old.y * weight;
        }
    }

    __device__ __forceinline__ void store_partial(float* partial, int r, const Output& output) const {
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
            *reinterpret_cast<float2*>(partial + 8 * j) = {output[4 * j + 2 * r], output[4 * j + 2 * r + 1]};
        }
    }

    __device__ __forceinline__ void store_rounded(T* rounded, int r, const Output& output) const {
        uint32_t words[kHeadDim / 32][4];
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
            words[j / 4][j % 4] = Element<T>::pack(output[4 * j + 2 * r], output[4 * j + 2 * r + 1]);
        }
        quad_transpose(words, thread % 4);
#pragma unroll
        for (int group = 0; group < kHeadDim / 32; ++group) {
            *reinterpret_cast<uint4*>(rounded + 32 * group) = {words[group][0], words[group][1], words[group][2],
                                                               words[group][3]};
        }
    }

    // Normalises, merges with what is there, rounds if final.
    __device__ __forceinline__ void store(const RowTile& tile, bool any, Output& output) const {
        const bool is_final = params.final.data != nullptr;
        const int local = tile.first + reader.warpgroup;
        if (local >= params.shape.q_blocks || (!any && params.accumulate && !is_final)) return;
        const int64_t head_rows =
            (int64_t{tile.batch} * params.shape.heads + tile.head) * params.shape.q_blocks * kBlock;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = local * kBlock + (thread / 32) * 16 + (thread % 32) / 4 + 8 * r;
            const Merge merge = merge_lse(params.lse + head_rows + row, any, r);
#pragma unroll
            for (int i = 2 * r; i < kHeadDim / 2; i += 4) {
                output[i] *= merge.mine;
                output[i + 1] *= merge.mine;
            }
            float* partial = params.partial.data + tile.batch * params.partial.batch_stride +
                             row * params.partial.row_stride + tile.head * params.partial.head_stride +
                             2 * (thread % 4);
            if (merge.theirs != 0.0f) add_partial(partial, merge.theirs, r, output);
            if (is_final) {
                store_rounded(static_cast<T*>(params.final.data) + tile.batch * params.final.batch_stride +
                                  row * params.final.row_stride + tile.head * params.final.head_stride +
                                  8 * (thread % 4),
                              r, output);
            } else {
                store_partial(partial, r, output);
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
    auto& shared = opaque_shared<RowShared<Plan>>();
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
        ForwardConsumer<T, Plan>{params, shared, {shared, warp / 4 - 1}, static_cast<int>(threadIdx.x) % 128}.run();
    }
}

}  // namespace mtraining::sm90
