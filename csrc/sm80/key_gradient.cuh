// dK and dV: a thread block of four warps owns one key tile and walks over the query blocks that attend to it, for all
// query heads of the group, so that the sum over the group happens in registers and in a fixed order:
// S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO, dP^T = V dO^T, dK += P^T (dP^T - delta) Q.
#pragma once

#include "sm80/backward_common.cuh"
#include "sm80/key_scan.cuh"

namespace mtraining::sm80 {

template <typename Config, bool kColumns>
struct KeyGradShared {
    struct Stage {
        alignas(256) unsigned char q[device::Tile<Config::D>::kBytes];
        alignas(256) unsigned char dout[device::Tile<Config::D>::kBytes];
        alignas(16) float lse[kBlock];
        alignas(16) float delta[kBlock];
    };
    alignas(256) unsigned char k[device::Tile<Config::D>::kBytes];
    alignas(256) unsigned char v[device::Tile<Config::D>::kBytes];
    Stage stages[2];
    KeyList<Config::kWarps, kColumns> list;
    int32_t column_block[kBlock];
    TileSource<typename Config::T> q_source, dout_source;
    const float* lse;  // of the first head of the group
    const float* delta;
};

// The key tile of a thread block. Early keys have the most queries and go first. Key blocks come one head after
// another, so that its queries stay in the L2 cache; columns, whose few tiles differ more in work, all heads at once.
template <bool kColumns>
struct KeyPlace {
    int kv_head, batch, chunk, kv_block;

    __device__ __forceinline__ KeyPlace(const Shape& shape, uint32_t index) {
        if (kColumns) {
            kv_head = index % shape.kv_heads;
            index /= shape.kv_heads;
            batch = index % shape.batch;
            kv_block = index / shape.batch;
            chunk = 0;
        } else {
            chunk = index % shape.chunks;
            index /= shape.chunks;
            kv_block = index % shape.kv_blocks;
            index /= shape.kv_blocks;
            kv_head = index % shape.kv_heads;
            batch = index / shape.kv_heads;
        }
    }
};

template <typename Config, bool kColumns>
struct KeyGrad {
    using T = typename Config::T;
    static constexpr int D = Config::D;
    using Tile = device::Tile<D>;
    using Shared = KeyGradShared<Config, kColumns>;

    const KeyGradParams& p;
    Shared& shared;
    const int lane, first_row;

    float dk[D / 8][4], dv[D / 8][4];

    __device__ KeyGrad(const KeyGradParams& params, Shared& smem)
        : p(params), shared(smem), lane(threadIdx.x % 32), first_row((threadIdx.x / 32) * 16) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            dk[n][0] = dk[n][1] = dk[n][2] = dk[n][3] = 0;
            dv[n][0] = dv[n][1] = dv[n][2] = dv[n][3] = 0;
        }
    }

    // K and V on their way, and where the query tiles are. Returns the rows of the tile that hold a key.
    __device__ __forceinline__ uint64_t begin(const KeyPlace<kColumns>& place) {
        const uint64_t rows = kColumns ? load_columns(place) : device::kAllRows;
        const uint32_t code = Item::encode(place.kv_block, place.chunk, false, false);
        TileSource<T> source;
        source.set(p.k, place.batch, place.kv_head);
        source.template copy<D, Config::kThreads>(shared.k, code, rows);
        source.set(p.v, place.batch, place.kv_head);
        source.template copy<D, Config::kThreads>(shared.v, code, rows);
        if (threadIdx.x == 0) {
            const int head = place.kv_head * (p.shape.heads / p.shape.kv_heads);
            const int64_t first =
                (static_cast<int64_t>(place.batch) * p.shape.heads + head) * p.shape.q_blocks * kBlock;
            shared.q_source.set(p.q, place.batch, head);
            shared.dout_source.set(p.dout, place.batch, head);
            shared.lse = p.lse + first;
            shared.delta = p.delta + first;
        }
        return rows;
    }

    // The columns of this tile: their blocks into shared memory, and which slots hold one.
    __device__ __forceinline__ uint64_t load_columns(const KeyPlace<kColumns>& place) {
        if (threadIdx.x < kBlock) {
            const int slot = place.kv_block * kBlock + threadIdx.x;
            const int64_t list = (static_cast<int64_t>(place.batch) * p.shape.heads + place.kv_head) * p.shape.columns;
            const int column = slot < p.shape.columns ? __ldg(p.mask.column_list + list + slot) : -1;
            shared.column_block[threadIdx.x] = column >> 6;
        }
        __syncthreads();
        const uint32_t low = __ballot_sync(0xffffffffu, shared.column_block[lane] >= 0);
        const uint32_t high = __ballot_sync(0xffffffffu, shared.column_block[lane + 32] >= 0);
        return (static_cast<uint64_t>(high) << 32) | low;
    }

    __device__ __forceinline__ void copy_queries(int slot) {
        const uint32_t code = shared.list.code[slot];
        auto& stage = shared.stages[slot % 2];
        shared.q_source.template copy<D, Config::kThreads>(stage.q, code, device::kAllRows);
        shared.dout_source.template copy<D, Config::kThreads>(stage.dout, code, device::kAllRows);
        if (threadIdx.x < 32) {  // 16 chunks of lse, 16 of delta
            const int i = 4 * (threadIdx.x % 16);
            const bool lse = threadIdx.x < 16;
            const int64_t block = static_cast<int64_t>(Item::group(code)) * p.shape.q_blocks + Item::index(code);
            device::copy_async(device::shared_address((lse ? stage.lse : stage.delta) + i),
                               (lse ? shared.lse : shared.delta) + block * kBlock + i);
        }
        device::copy_async_commit();
    }

    __device__ __forceinline__ void step(int slot, float scale_log2) {
        auto& stage = shared.stages[slot % 2];
        const uint32_t q = device::shared_address(stage.q);
        const uint32_t dout = device::shared_address(stage.dout);
        float s[8][4];
        product_transposed<T, D>(s, Tile::lane_address(device::shared_address(shared.k), lane), first_row,
                                 Tile::lane_address_b(q, lane));
        const int pair = 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float2 lse = *reinterpret_cast<const float2*>(stage.lse + 8 * n + pair);
            const float low = backward_lse(lse.x), high = backward_lse(lse.y);
            s[n][0] = device::exp2_fast(fmaf(s[n][0], scale_log2, -low));
            s[n][1] = device::exp2_fast(fmaf(s[n][1], scale_log2, -high));
            s[n][2] = device::exp2_fast(fmaf(s[n][2], scale_log2, -low));
            s[n][3] = device::exp2_fast(fmaf(s[n][3], scale_log2, -high));
        }
        const uint32_t code = shared.list.code[slot];
        const uint64_t mask = shared.list.mask(slot);
        if (Item::diagonal(code) || mask != device::kAllRows) apply_mask(s, Item::diagonal(code), mask);
        product_add<T, D>(dv, s, Tile::lane_address(dout, lane));
        float dp[8][4];
        product_transposed<T, D>(dp, Tile::lane_address(device::shared_address(shared.v), lane), first_row,
                                 Tile::lane_address_b(dout, lane));
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float2 delta = *reinterpret_cast<const float2*>(stage.delta + 8 * n + pair);
            s[n][0] *= dp[n][0] - delta.x;
            s[n][1] *= dp[n][1] - delta.y;
            s[n][2] *= dp[n][2] - delta.x;
            s[n][3] *= dp[n][3] - delta.y;
        }
        product_add<T, D>(dk, s, Tile::lane_address(q, lane));
    }

    // Rows of the tile are keys, columns are queries. Probabilities of masked pairs become 0.
    __device__ __forceinline__ void apply_mask(float (&s)[8][4], bool diagonal, uint64_t mask) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int query = 8 * n + 2 * (lane % 4) + (e & 1);
                const int key = first_row + lane / 4 + 8 * (e >> 1);
                if (!((mask >> key) & 1) || (diagonal && key > query)) s[n][e] = 0;
            }
    }

    __device__ __forceinline__ void walk(int count, float scale_log2) {
        copy_queries(0);
        for (int t = 0; t < count; ++t) {
            device::copy_async_wait<0>();
            __syncthreads();  // query tile t has landed, and the other stage is free
            if (t + 1 < count) copy_queries(t + 1);
            step(t, scale_log2);
        }
        __syncthreads();
    }

    // Takes its place anew, so that no address lives through the walk.
    __device__ __forceinline__ void store(const KeyPlace<kColumns>& place, const ChunkView<float>& to,
                                          const float (&x)[D / 8][4], float factor) {
        const int rows = kColumns ? p.shape.columns : p.shape.kv_blocks * kBlock;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = place.kv_block * kBlock + first_row + lane / 4 + 8 * r;
            if (row >= rows) continue;
            float* at = to.data + place.chunk * to.chunk_stride + place.batch * to.batch_stride +
                        place.kv_head * to.head_stride + row * to.row_stride + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                *reinterpret_cast<float2*>(at + 8 * n) = make_float2(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
            }
        }
    }
};

template <typename Config, bool kColumns>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    key_gradient_kernel(const __grid_constant__ KeyGradParams p) {
    extern __shared__ __align__(256) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<KeyGradShared<Config, kColumns>*>(dynamic_shared);
    const KeyPlace<kColumns> place(p.shape, blockIdx.x);
    KeyGrad<Config, kColumns> work(p, shared);
    const uint64_t rows = work.begin(place);
    const int key_block = kColumns ? 0 : __ldg(p.mask.kv_blocks + place.chunk * p.shape.kv_blocks + place.kv_block);
    const int group = p.shape.heads / p.shape.kv_heads;
    const int first_batch_head = place.batch * p.shape.heads + place.kv_head * group;
    const float scale_log2 = p.scale * device::kLog2e;
    int position = rows == 0 ? p.shape.q_blocks : 0;  // a tile without columns has no work
    while (const int count = KeyScan<Config::kWarps, kColumns>::fill(shared.list, p.shape, p.mask, first_batch_head,
                                                                     group, key_block, shared.column_block, position)) {
        work.walk(count, scale_log2);
    }
    device::copy_async_wait<0>();
    const KeyPlace<kColumns> again(p.shape, device::block_index());
    work.store(again, p.dk, work.dk, p.scale);
    work.store(again, p.dv, work.dv, 1.0f);
}

template <typename T, int D, bool kColumns>
void launch_key_gradient(const KeyGradParams& p, cudaStream_t stream) {
    using Config = BackwardConfig<T, D>;
    constexpr int kShared = sizeof(KeyGradShared<Config, kColumns>);
    const auto kernel = key_gradient_kernel<Config, kColumns>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
               "key_gradient (sm_80) set-up");
    const int64_t grid = static_cast<int64_t>(p.shape.batch) * p.shape.kv_heads * p.shape.chunks * p.shape.kv_blocks;
    kernel<<<static_cast<unsigned>(grid), Config::kThreads, kShared, stream>>>(p);
    check_cuda(cudaGetLastError(), "key_gradient (sm_80)");
}

}  // namespace mtraining::sm80
