// dQ: a thread block of four warps owns one query block of one head and walks over the tiles it attends to:
// S = Q K^T, P = exp(S - lse), dP = dO V^T, dQ += P (dP - delta) K. Q and dO stay in registers.
#pragma once

#include "sm80/backward_common.cuh"
#include "sm80/query_scan.cuh"

namespace mtraining::sm80 {

template <typename Config>
struct QueryGradShared {
    struct Stage {
        alignas(256) unsigned char k[device::Tile<Config::D>::kBytes];
        alignas(256) unsigned char v[device::Tile<Config::D>::kBytes];
    };
    Stage stages[2];
    QueryList<Config::kWarps, Config::kListRoom> list;
    TileSource<typename Config::T> k_source[2], v_source[2];  // [1]: columns
};

template <typename Config>
struct QueryGrad {
    using T = typename Config::T;
    static constexpr int D = Config::D;
    using Tile = device::Tile<D>;
    using Shared = QueryGradShared<Config>;

    const QueryGradParams& p;
    Shared& shared;
    const int lane, first_row;

    float dq[D / 8][4];
    uint32_t q[D / 16][4], dout[D / 16][4];
    float lse[2], delta[2];

    __device__ QueryGrad(const QueryGradParams& params, Shared& smem)
        : p(params), shared(smem), lane(threadIdx.x % 32), first_row((threadIdx.x / 32) * 16) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0;
    }

    // Q and dO through the first stage's buffers into registers; where the tiles are.
    __device__ __forceinline__ void begin(const QueryPlace& place) {
        const int kv_head = place.head / (p.shape.heads / p.shape.kv_heads);
        auto& stage = shared.stages[0];
        const uint32_t code = Item::encode(place.q_block, 0, false, false);
        TileSource<T> source;
        source.set(p.q, place.batch, place.head);
        source.template copy<D, Config::kThreads>(stage.k, code, device::kAllRows);
        source.set(p.dout, place.batch, place.head);
        source.template copy<D, Config::kThreads>(stage.v, code, device::kAllRows);
        device::copy_async_commit();
        if (threadIdx.x == 0) {
            shared.k_source[0].set(p.k, place.batch, kv_head);
            shared.v_source[0].set(p.v, place.batch, kv_head);
            shared.k_source[1].set(p.compact_k, place.batch, place.head);
            shared.v_source[1].set(p.compact_v, place.batch, place.head);
        }
        const int64_t batch_head = static_cast<int64_t>(place.batch) * p.shape.heads + place.head;
        const int64_t row = (batch_head * p.shape.q_blocks + place.q_block) * kBlock + first_row + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lse[r] = backward_lse(p.lse[row + 8 * r]);
            delta[r] = p.delta[row + 8 * r];
        }
        device::copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            const uint32_t k = Tile::lane_address(device::shared_address(stage.k), lane);
            const uint32_t v = Tile::lane_address(device::shared_address(stage.v), lane);
            device::load_matrix(q[d], Tile::moved(k, first_row, d));
            device::load_matrix(dout[d], Tile::moved(v, first_row, d));
        }
        __syncthreads();
    }

    __device__ __forceinline__ void copy_tiles(int slot) {
        const uint32_t code = shared.list.code[slot];
        const uint64_t rows = Item::rows(code, p.shape.columns);
        auto& stage = shared.stages[slot % 2];
        const bool columns = Item::columns(code);
        shared.k_source[columns].template copy<D, Config::kThreads>(stage.k, code, rows);
        shared.v_source[columns].template copy<D, Config::kThreads>(stage.v, code, rows);
        device::copy_async_commit();
    }

    __device__ __forceinline__ void product(float (&c)[8][4], const uint32_t (&a)[D / 16][4], uint32_t b_lane) {
#pragma unroll
        for (int n = 0; n < 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                device::load_matrix(b, Tile::moved(b_lane, 16 * n, d));
                device::mma<T>(c[2 * n], a[d], b[0], b[1]);
                device::mma<T>(c[2 * n + 1], a[d], b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void step(int slot, float scale_log2) {
        auto& stage = shared.stages[slot % 2];
        const uint32_t k = device::shared_address(stage.k);
        const uint32_t v = device::shared_address(stage.v);
        float s[8][4];
        product(s, q, Tile::lane_address_b(k, lane));
        const uint32_t code = shared.list.code[slot];
        const uint64_t mask = shared.list.mask(slot);
        if (Item::diagonal(code) || mask != device::kAllRows) apply_mask(s, Item::diagonal(code), mask);
        // No branch from here on: the exponentials fill the gaps between the products of dP.
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = device::exp2_fast(fmaf(s[n][e], scale_log2, -lse[e >> 1]));
        float dp[8][4];
        product(dp, dout, Tile::lane_address_b(v, lane));
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e] - delta[e >> 1];
        product_add<T, D>(dq, s, Tile::lane_address(k, lane));
    }

    __device__ __forceinline__ void apply_mask(float (&s)[8][4], bool diagonal, uint64_t mask) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 8 * n + 2 * (lane % 4) + (e & 1);
                const int row = first_row + lane / 4 + 8 * (e >> 1);
                const bool keep = ((mask >> column) & 1) && !(diagonal && column > row);
                if (!keep) s[n][e] = device::negative_infinity();
            }
    }

    __device__ __forceinline__ void walk(int count, float scale_log2) {
        copy_tiles(0);
        for (int t = 0; t < count; ++t) {
            device::copy_async_wait<0>();
            __syncthreads();  // tile t has landed, and the other stage is free
            if (t + 1 < count) copy_tiles(t + 1);
            step(t, scale_log2);
        }
        __syncthreads();
    }

    // Works its place out again, so that no address lives through the walk.
    __device__ __forceinline__ void store() {
        const QueryPlace place(p.shape, device::block_index());
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t row = static_cast<int64_t>(place.q_block) * kBlock + first_row + lane / 4 + 8 * r;
            float* to = p.dq.data + place.batch * p.dq.batch_stride + row * p.dq.row_stride +
                        place.head * p.dq.head_stride + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                float2 value = make_float2(dq[n][2 * r] * p.scale, dq[n][2 * r + 1] * p.scale);
                if (p.accumulate) {
                    const float2 old = *reinterpret_cast<const float2*>(to + 8 * n);
                    value.x += old.x;
                    value.y += old.y;
                }
                *reinterpret_cast<float2*>(to + 8 * n) = value;
            }
        }
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    query_gradient_kernel(const __grid_constant__ QueryGradParams p) {
    extern __shared__ __align__(256) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<QueryGradShared<Config>*>(dynamic_shared);
    const QueryPlace place(p.shape, blockIdx.x);
    QueryGrad<Config> work(p, shared);
    work.begin(place);
    const float scale_log2 = p.scale * device::kLog2e;
    int position = 0;
    bool any = false;
    while (const int count =
               QueryScan<Config::kWarps, Config::kListRoom>::fill(shared.list, p.shape, p.mask, position)) {
        work.walk(count, scale_log2);
        any = true;
    }
    if (any || !p.accumulate) work.store();
}

template <typename T, int D>
void launch_query_gradient(const QueryGradParams& p, cudaStream_t stream) {
    using Config = BackwardConfig<T, D>;
    constexpr int kShared = sizeof(QueryGradShared<Config>);
    const auto kernel = query_gradient_kernel<Config>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
               "query_gradient (sm_80) set-up");
    const int64_t grid = static_cast<int64_t>(p.shape.batch) * p.shape.heads * p.shape.q_blocks;
    kernel<<<static_cast<unsigned>(grid), Config::kThreads, kShared, stream>>>(p);
    check_cuda(cudaGetLastError(), "query_gradient (sm_80)");
}

}  // namespace mtraining::sm80
