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
    static constexpr int kListRoom = 128;  // no more: three thread blocks are to fit a multiprocessor of an A100
};

// Where the next tile of one operand lies.
struct alignas(16) NextTile {
    const char* from;
    uint32_t stride;  // of rows, in bytes
    int32_t rows;     // that exist; the others of the tile become zeros
};

template <typename Config>
struct ForwardShared {
    alignas(256) unsigned char q[device::Tile<Config::D>::kBytes];
    alignas(256) unsigned char k[device::Tile<Config::D>::kBytes];
    alignas(256) unsigned char v[device::Tile<Config::D>::kBytes];
    QueryList<Config::kWarps, Config::kListRoom> list;
    TileSource<typename Config::T> source[2][2];  // [columns][V]
    NextTile next[2][2];                          // [slot % 2][V]
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
            shared.source[0][0].set(p.k, place.batch, kv_head);
            shared.source[0][1].set(p.v, place.batch, kv_head);
            shared.source[1][0].set(p.compact_k, place.batch, place.head);
            shared.source[1][1].set(p.compact_v, place.batch, place.head);
        }
    }

    // Thread 0 works out where K of a list entry is, thread 1 V (the others the same, for nothing): of what a copy
    // costs, 64-bit addresses are most.
    __device__ __forceinline__ void find_tile(int slot, uint32_t code) {
        const int operand = threadIdx.x % 2;
        const TileSource<T>& x = shared.source[Item::columns(code)][operand];
        const int first = Item::index(code) * kBlock;
        NextTile next;
        next.from = reinterpret_cast<const char*>(x.data + Item::group(code) * x.group_stride + first * x.row_stride);
        next.stride = static_cast<uint32_t>(x.row_stride) * 2;
        next.rows = Item::columns(code) ? p.shape.columns - first : kBlock;
        if (threadIdx.x < 2) shared.next[slot % 2][operand] = next;
    }

    // The copy of a tile: of every eighth row a thread has 16 bytes, at D = 128 also those 128 bytes further on.
    static constexpr int kCopyRows = kThreads / 8;
    struct Copy {
        const char* from;  // of this thread's first row
        uint32_t stride, to;
        int rows;  // that exist, from this thread's first one on
    };

    __device__ __forceinline__ Copy begin_copy(unsigned char* to, const NextTile& next) {
        const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        const NextTile tile = next;
        return {tile.from + static_cast<uint64_t>(tile.stride) * row + chunk * 16, tile.stride,
                device::shared_address(to) + Tile::offset(row, chunk), tile.rows - row};
    }

    // Row n of this thread's; without kAll it may not exist.
    template <bool kAll>
    __device__ __forceinline__ void copy_row(const Copy& copy, int n) {
        const char* from = copy.from + static_cast<uint64_t>(copy.stride) * (n * kCopyRows);
        const uint32_t to = copy.to + n * kCopyRows * D * 2;
#pragma unroll
        for (int c = 0; c < D / 64; ++c) {
            if (kAll) {
                device::copy_async(to + c * 128, from + c * 128);
            } else {
                device::copy_async(to + c * 128, from + c * 128, n * kCopyRows < copy.rows);
            }
        }
    }

    __device__ __forceinline__ void copy_tile(unsigned char* to, const NextTile& next) {
        const Copy copy = begin_copy(to, next);
        if (next.rows >= kBlock) {
#pragma unroll
            for (int n = 0; n < kBlock / kCopyRows; ++n) copy_row<true>(copy, n);
        } else {
#pragma unroll
            for (int n = 0; n < kBlock / kCopyRows; ++n) copy_row<false>(copy, n);
        }
        device::copy_async_commit();
    }

    // scores = Q K^T of this warp's rows. find(bits) is called where the first products are on their way.
    template <typename Find>
    __device__ __forceinline__ void score(float (&s)[kM][8][4], const Find& find) {
        // The warp's rows are a multiple of 16, which the swizzle does not see.
        const uint32_t q = Tile::lane_address(device::shared_address(shared.q), lane) + first_row * D * 2;
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
            for (int m = 0; m < kM; ++m) device::load_matrix(a[m], Tile::moved(q, 16 * m, d));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                device::load_matrix(b, Tile::moved(k, 16 * n, d));
                if (d == 1 && n == 0) find(b[0]);
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

    // The lower triangle of a diagonal tile.
    __device__ __forceinline__ void mask_triangle(float (&s)[kM][8][4]) {
        const int last = first_row + lane / 4 - 2 * (lane % 4);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int beyond = 8 * n + (e & 1) - 16 * m - 8 * (e >> 1);
                    if (beyond > last) s[m][n][e] = device::negative_infinity();
                }
    }

    // The allowed columns of a column tile.
    __device__ __forceinline__ void mask_columns(float (&s)[kM][8][4], uint64_t mask) {
        const uint64_t own = mask >> (2 * (lane % 4));
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool keep = (own >> (8 * n + (e & 1))) & 1;
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    if (!keep) s[m][n][e] = device::negative_infinity();
                }
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
        uint32_t code = shared.list.code[0];
        find_tile(0, code);
        __syncthreads();
        copy_tile(shared.k, shared.next[0][0]);
        copy_tile(shared.v, shared.next[0][1]);
        device::copy_async_wait<1>();
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            const bool more = t + 1 < count;
            float s[kM][8][4];
            uint32_t next_code;
            score(s, [&](uint32_t bits) {
                next_code = shared.list.code[(more ? t + 1 : t) + (bits & unknown_zero())];
                find_tile(t + 1, next_code);
            });
            device::copy_async_wait<0>();
            __syncthreads();
            if (more) copy_tile(shared.k, shared.next[(t + 1) % 2][0]);
            if (Item::diagonal(code)) {
                mask_triangle(s);
            } else if (Item::columns(code)) {
                const uint64_t mask = shared.list.column_mask(t);
                if (mask != device::kAllRows) mask_columns(s, mask);
            }
            update_maximum(s, scale_log2);
            accumulate(s, scale_log2);
            device::copy_async_wait<0>();
            __syncthreads();
            if (more) copy_tile(shared.v, shared.next[(t + 1) % 2][1]);
            code = next_code;
        }
    }

    // Zero, which the compiler does not know: what adds `bits & unknown_zero()` stays behind what makes `bits`.
    __device__ __forceinline__ uint32_t unknown_zero() const { return static_cast<uint32_t>(p.shape.blocks >> 31); }
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
    while (const int count =
               QueryScan<Config::kWarps, Config::kListRoom>::fill(shared.list, p.shape, p.mask, position)) {
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
    static_assert(3 * (kShared + 1024) <= 164 * 1024, "three thread blocks a multiprocessor of an A100");
    const auto kernel = attention_forward_kernel<Config>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
               "attention_forward (sm_80) set-up");
    const int64_t grid = static_cast<int64_t>(p.shape.batch) * p.shape.heads * p.shape.q_blocks;
    kernel<<<static_cast<unsigned>(grid), Config::kThreads, kShared, stream>>>(p);
    check_cuda(cudaGetLastError(), "attention_forward (sm_80)");
}

}  // namespace mtraining::sm80
