// dQ: a thread block of four warps owns one query block of one head and walks over the tiles it attends to:
// S = Q K^T, P = exp(S - lse), dP = dO V^T, dQ += P (dP - delta) K. Q and dO stay in registers.
#pragma once

#include "sm80/backward_common.cuh"

namespace mtraining::sm80 {

template <typename Config>
struct QueryGradShared {
    struct Stage {
        alignas(256) unsigned char k[device::Tile<Config::D>::kBytes];
        alignas(256) unsigned char v[device::Tile<Config::D>::kBytes];
    };
    Stage stages[2];
    WorkList<Config::kWarps> list;
};

template <typename Config>
struct QueryGrad {
    using T = typename Config::T;
    static constexpr int D = Config::D;
    using Tile = device::Tile<D>;
    using Shared = QueryGradShared<Config>;

    const QueryGradParams& p;
    Shared& shared;
    const int batch, head, q_block;
    const int lane, first_row;

    float dq[D / 8][4];
    uint32_t q[D / 16][4], dout[D / 16][4];
    float lse[2], delta[2];

    __device__ QueryGrad(const QueryGradParams& params, Shared& smem, int b, int h, int block)
        : p(params), shared(smem), batch(b), head(h), q_block(block), lane(threadIdx.x % 32),
          first_row((threadIdx.x / 32) * 16) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0;
    }

    __device__ __forceinline__ const T* rows(const RowView<const void>& x) const {
        return static_cast<const T*>(x.data) + batch * x.batch_stride + head * x.head_stride +
               static_cast<int64_t>(q_block) * kBlock * x.row_stride;
    }

    // Through the first stage's buffers into registers.
    __device__ __forceinline__ void load_rows() {
        const uint32_t k = device::shared_address(shared.stages[0].k);
        const uint32_t v = device::shared_address(shared.stages[0].v);
        Tile::template copy<Config::kThreads>(k, rows(p.q), p.q.row_stride, device::kAllRows, threadIdx.x);
        Tile::template copy<Config::kThreads>(v, rows(p.dout), p.dout.row_stride, device::kAllRows, threadIdx.x);
        device::copy_async_commit();
        const int64_t row = ((static_cast<int64_t>(batch) * p.shape.heads + head) * p.shape.q_blocks + q_block) * kBlock +
                            first_row + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lse[r] = backward_lse(p.lse[row + 8 * r]);
            delta[r] = p.delta[row + 8 * r];
        }
        device::copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            device::load_matrix(q[d], Tile::moved(Tile::lane_address(k, lane), first_row, d));
            device::load_matrix(dout[d], Tile::moved(Tile::lane_address(v, lane), first_row, d));
        }
        __syncthreads();
    }

    __device__ __forceinline__ void copy_tiles(int slot) {
        const uint32_t code = shared.list.code[slot];
        const uint64_t mask = shared.list.mask[slot];
        const int row = Item::index(code) * kBlock;
        auto& stage = shared.stages[slot % 2];
        const uint32_t k = device::shared_address(stage.k);
        const uint32_t v = device::shared_address(stage.v);
        if (Item::columns(code)) {
            copy_rows(k, p.compact_k, row, mask);
            copy_rows(v, p.compact_v, row, mask);
        } else {
            const int kv_head = head / (p.shape.heads / p.shape.kv_heads);
            copy_rows(k, p.k, Item::group(code), kv_head, row);
            copy_rows(v, p.v, Item::group(code), kv_head, row);
        }
        device::copy_async_commit();
    }

    __device__ __forceinline__ void copy_rows(uint32_t to, const RowView<const void>& x, int row, uint64_t mask) {
        const T* source =
            static_cast<const T*>(x.data) + batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
        Tile::template copy<Config::kThreads>(to, source, x.row_stride, mask, threadIdx.x);
    }

    __device__ __forceinline__ void copy_rows(uint32_t to, const ChunkView<const void>& x, int chunk, int kv_head,
                                              int row) {
        const T* source = static_cast<const T*>(x.data) + chunk * x.chunk_stride + batch * x.batch_stride +
                          kv_head * x.head_stride + row * x.row_stride;
        Tile::template copy<Config::kThreads>(to, source, x.row_stride, device::kAllRows, threadIdx.x);
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
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = device::exp2_fast(fmaf(s[n][e], scale_log2, -lse[e >> 1]));
        const uint32_t code = shared.list.code[slot];
        const uint64_t mask = shared.list.mask[slot];
        if (Item::diagonal(code) || mask != device::kAllRows) apply_mask(s, Item::diagonal(code), mask);
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
                if (!((mask >> column) & 1) || (diagonal && column > row)) s[n][e] = 0;
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
        const uint32_t index = device::block_index();
        const int heads = p.shape.heads, rows = p.shape.batch * heads;
        const int batch = index % rows / heads, head = index % heads, q_block = p.shape.q_blocks - 1 - index / rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t row = static_cast<int64_t>(q_block) * kBlock + first_row + lane / 4 + 8 * r;
            float* to = p.dq.data + batch * p.dq.batch_stride + row * p.dq.row_stride + head * p.dq.head_stride +
                        2 * (lane % 4);
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
    const int rows = p.shape.batch * p.shape.heads;
    const int batch_head = blockIdx.x % rows;
    const int q_block = p.shape.q_blocks - 1 - blockIdx.x / rows;  // late query blocks, the heaviest, first
    QueryGrad<Config> work(p, shared, batch_head / p.shape.heads, batch_head % p.shape.heads, q_block);
    work.load_rows();
    const float scale_log2 = p.scale * device::kLog2e;
    int position = 0;
    while (const int count = QueryScan<Config::kWarps>::fill(shared.list, p.shape, p.mask, batch_head, q_block, position)) {
        work.walk(count, scale_log2);
    }
    work.store();
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
