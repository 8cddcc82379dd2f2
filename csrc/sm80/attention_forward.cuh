// Forward: a thread block of two warps owns one query block of one head; each warp holds 32 rows. One online-softmax
// loop runs over the slash tiles and then over the column tiles; the epilogue merges with what earlier launches left.
//
// 32 rows a warp halve the shared-memory reads per product against 16, which otherwise bound mma.sync on Hopper; four
// such thread blocks (48 KiB each at D = 128) share a multiprocessor.
#pragma once

#include "mtraining/check.h"
#include "sm80/epilogue.cuh"
#include "sm80/query_scan.cuh"

namespace mtraining::sm80 {

template <typename T_, int D_>
struct ForwardConfig {
    using T = T_;
    static constexpr int D = D_;
    static constexpr int kWarps = 2;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRowTiles = 2;  // 16-row tiles of a warp
    static constexpr int kBlocksPerSm = 4;
    // Rows are rescaled only when their maximum grows by more than 2^8: until then the old maximum serves, and the
    // probabilities stay below 2^8, harmless in either input type with fp32 sums.
    static constexpr float kRescale = 8.0f;
};

template <typename Config>
struct ForwardShared {
    alignas(256) unsigned char q[device::Tile<Config::D>::kBytes];
    alignas(256) unsigned char k[device::Tile<Config::D>::kBytes];
    alignas(256) unsigned char v[device::Tile<Config::D>::kBytes];
    QueryList<Config::kWarps> list;
    TileSource<typename Config::T> k_source[2], v_source[2];  // [1]: columns
};

template <typename Config>
struct Forward {
    using T = typename Config::T;
    static constexpr int D = Config::D;
    using Tile = device::Tile<D>;
    static constexpr int kThreads = Config::kThreads;
    static constexpr int kM = Config::kRowTiles;
    using Shared = ForwardShared<Config>;
    // Steps of Q K^T unrolled at once. All of them are faster, but for sm_80 ptxas then spills the addresses.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr int kScoreSteps = D / 16;
#else
    static constexpr int kScoreSteps = 4;
#endif

    const AttentionForwardParams& p;
    Shared& shared;
    const int lane, first_row;

    float out[kM][D / 8][4];
    float maximum[kM][2];  // of the unscaled scores
    float sum[kM][2];      // this thread's columns

    __device__ Forward(const AttentionForwardParams& params, Shared& smem)
        : p(params), shared(smem), lane(threadIdx.x % 32), first_row((threadIdx.x / 32) * 16 * kM) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            maximum[m][0] = maximum[m][1] = device::negative_infinity();
            sum[m][0] = sum[m][1] = 0;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0;
        }
    }

    // Q on its way, and where the tiles are.
    __device__ __forceinline__ void begin(const QueryPlace& place) {
        TileSource<T> q;
        q.set(p.q, place.batch, place.head);
        q.template copy<D, kThreads>(shared.q, Item::encode(place.q_block, 0, false, false), device::kAllRows);
        if (threadIdx.x == 0) {
            const int kv_head = place.head / (p.shape.heads / p.shape.kv_heads);
            shared.k_source[0].set(p.k, place.batch, kv_head);
            shared.v_source[0].set(p.v, place.batch, kv_head);
            shared.k_source[1].set(p.compact_k, place.batch, place.head);
            shared.v_source[1].set(p.compact_v, place.batch, place.head);
        }
    }

    __device__ __forceinline__ void copy_tile(unsigned char* to, const TileSource<T> (&source)[2], int slot) {
        const uint32_t code = shared.list.code[slot];
        source[Item::columns(code)].template copy<D, kThreads>(to, code, Item::rows(code, p.shape.columns));
        device::copy_async_commit();
    }

    __device__ __forceinline__ void copy_k(int slot) { copy_tile(shared.k, shared.k_source, slot); }
    __device__ __forceinline__ void copy_v(int slot) { copy_tile(shared.v, shared.v_source, slot); }

    // scores = Q K^T of this warp's rows
    __device__ __forceinline__ void score(float (&s)[kM][8][4]) {
        const uint32_t q = Tile::lane_address(device::shared_address(shared.q), lane);
        const uint32_t k = Tile::lane_address_b(device::shared_address(shared.k), lane);
        if constexpr (kScoreSteps < D / 16) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
        }
#pragma unroll kScoreSteps
        for (int d = 0; d < D / 16; ++d) {
            uint32_t a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) device::load_matrix(a[m], Tile::moved(q, first_row + 16 * m, d));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                device::load_matrix(b, Tile::moved(k, 16 * n, d));
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    if (kScoreSteps == D / 16 && d == 0) {
                        device::mma_first<T>(s[m][2 * n], a[m], b[0], b[1]);
                        device::mma_first<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
                    } else {
                        device::mma<T>(s[m][2 * n], a[m], b[0], b[1]);
                        device::mma<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
    }

    // The lower triangle of a diagonal tile, the allowed columns of a column tile.
    __device__ __forceinline__ void apply_mask(float (&s)[kM][8][4], bool diagonal, uint64_t mask) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int column = 8 * n + 2 * (lane % 4) + (e & 1);
                    const int row = first_row + 16 * m + lane / 4 + 8 * (e >> 1);
                    const bool keep = ((mask >> column) & 1) && (!diagonal || column <= row);
                    if (!keep) s[m][n][e] = device::negative_infinity();
                }
    }

    // Raises the running maximum for these scores where it matters, and rescales sum and out with it. Each thread looks
    // at its own columns; the four threads of a row talk only when one of them asks for a new maximum.
    __device__ __forceinline__ void update_maximum(const float (&s)[kM][8][4], float scale_log2) {
        float top[kM][2];
        bool rescale = false;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[m][r] = maximum[m][r];
#pragma unroll
                for (int n = 0; n < 8; ++n) top[m][r] = fmaxf(top[m][r], fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                rescale |= (top[m][r] - maximum[m][r]) * scale_log2 > Config::kRescale;
            }
        if (!__any_sync(0xffffffffu, rescale)) return;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float grown = fmaxf(top[m][r], __shfl_xor_sync(0xffffffffu, top[m][r], 1));
                grown = fmaxf(grown, __shfl_xor_sync(0xffffffffu, grown, 2));
                const float factor = device::exp2_fast((maximum[m][r] - grown) * scale_log2);
                maximum[m][r] = grown;
                sum[m][r] *= factor;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    out[m][n][2 * r] *= factor;
                    out[m][n][2 * r + 1] *= factor;
                }
            }
    }

    // Probabilities of 16 keys relative to the running maximum, as A operands; their sums.
    __device__ __forceinline__ void probabilities(uint32_t (&a)[kM][4], const float (&s)[kM][8][4], int k,
                                                  float scale_log2) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float offset = maximum[m][r] * scale_log2;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* x = s[m][2 * k + half];
                    const float low = device::exp2_fast(fmaf(x[2 * r], scale_log2, -offset));
                    const float high = device::exp2_fast(fmaf(x[2 * r + 1], scale_log2, -offset));
                    sum[m][r] += low + high;
                    a[m][2 * half + r] = device::pack<T>(low, high);
                }
            }
    }

    // out += P V, 16 keys at a time: the exponentials of the next 16 fill the gaps between these products.
    __device__ __forceinline__ void accumulate(const float (&s)[kM][8][4], float scale_log2) {
        const uint32_t v = Tile::lane_address(device::shared_address(shared.v), lane);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t a[kM][4];
            probabilities(a, s, k, scale_log2);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                device::load_matrix_transposed(b, Tile::moved(v, 16 * k, n));
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    device::mma<T>(out[m][2 * n], a[m], b[0], b[1]);
                    device::mma<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // One buffer for K, one for V: the next K is on its way during the softmax and P V, the next V during Q K^T. Two
    // barriers a tile: after Q K^T (K is free, V has landed), after P V (V is free, the next K has landed).
    __device__ __forceinline__ void walk(int count, float scale_log2) {
        copy_k(0);
        copy_v(0);
        device::copy_async_wait<1>();
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            const bool more = t + 1 < count;
            float s[kM][8][4];
            score(s);
            device::copy_async_wait<0>();
            __syncthreads();
            if (more) copy_k(t + 1);
            const uint32_t code = shared.list.code[t];
            const uint64_t mask = shared.list.mask(t);
            if (Item::diagonal(code) || mask != device::kAllRows) apply_mask(s, Item::diagonal(code), mask);
            update_maximum(s, scale_log2);
            accumulate(s, scale_log2);
            device::copy_async_wait<0>();
            __syncthreads();
            if (more) copy_v(t + 1);
        }
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_forward_kernel(const __grid_constant__ AttentionForwardParams p) {
    extern __shared__ __align__(256) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<ForwardShared<Config>*>(dynamic_shared);
    const QueryPlace place(p.shape, blockIdx.x);
    Forward<Config> work(p, shared);
    const float scale_log2 = p.scale * device::kLog2e;
    work.begin(place);
    int position = 0;
    bool any = false;
    while (const int count = QueryScan<Config::kWarps>::fill(shared.list, p.shape, p.mask, position)) {
        work.walk(count, scale_log2);
        any = true;
    }
    device::copy_async_wait<0>();
    if (!any && p.accumulate && !p.final.data) return;  // nothing to merge
    const QueryPlace again(p.shape, device::block_index());
    store_rows<typename Config::T, Config::D, Config::kRowTiles>(p, again, work.first_row, work.out, work.maximum,
                                                                 work.sum);
}

template <typename T, int D>
void launch_attention_forward(const AttentionForwardParams& p, cudaStream_t stream) {
    using Config = ForwardConfig<T, D>;
    constexpr int kShared = sizeof(ForwardShared<Config>);
    const auto kernel = attention_forward_kernel<Config>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
               "attention_forward (sm_80) set-up");
    const int64_t grid = static_cast<int64_t>(p.shape.batch) * p.shape.heads * p.shape.q_blocks;
    kernel<<<static_cast<unsigned>(grid), Config::kThreads, kShared, stream>>>(p);
    check_cuda(cudaGetLastError(), "attention_forward (sm_80)");
}

}  // namespace mtraining::sm80
