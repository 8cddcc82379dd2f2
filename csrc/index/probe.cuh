// Probe attention: three passes over the scores of the probe rows, which are never stored. Pass 1 finds the row maxima,
// pass 2 the row sums, pass 3 the masses of columns and slash lines (docs/design.md, "Mass").
//
// A thread block of four warps takes two query heads of one group, 32 rows of a 64-row tile a warp, and a range of key
// blocks: one copy of the keys serves both heads. Scores are 64 x 64 products in one fixed order of summation and all
// further sums are of integers, so a key has the same mass wherever its block lies.
#pragma once

#include "device/tile.cuh"
#include "index/probe.h"
#include "index/weights.cuh"
#include "mtraining/check.h"

namespace mtraining::probe {

constexpr int kThreads = 128;
constexpr int kHeads = 2;  // of a thread block
constexpr int kM = 2;      // 16-row tiles of a warp

template <int D, Pass kPass>
struct Shared {
    struct ColumnSums {
        int64_t warp[4][kBlock];
        int64_t total[4];
    };
    // Two buffers of keys, and the queries until they are in registers. Where masses stay in shared memory there is no
    // room for the latter: they come first, through the buffers of the keys.
    static constexpr bool kSharesTiles = kPass == Pass::kSelect;
    static constexpr int kTiles = kSharesTiles ? 2 : 2 + kHeads;
    alignas(256) unsigned char tiles[kTiles][device::Tile<D>::kBytes];
    ColumnSums sums[2];  // of masses, one for each buffer of keys

    __device__ __forceinline__ uint32_t k(int buffer) const { return device::shared_address(tiles[buffer]); }
    __device__ __forceinline__ uint32_t q(int head) const {
        return device::shared_address(tiles[kTiles - kHeads + head]);
    }
};

// Where a thread block works.
struct Place {
    int batch, kv_head, first_head, first_block, end_block;
    bool second;  // the second head exists

    // Pair number `pair` of a batch entry and two heads, the `member`th range of key blocks.
    __device__ __forceinline__ Place(const ProbeParams& p, int pair, int member, int range) {
        const int group = p.heads / p.kv_heads;
        const int pairs = (group + kHeads - 1) / kHeads;
        const int in_group = pair % pairs;
        pair /= pairs;
        kv_head = pair % p.kv_heads;
        batch = pair / p.kv_heads;
        first_block = member * range;
        end_block = min(first_block + range, p.kv_blocks);
        first_head = kv_head * group + in_group * kHeads;
        second = in_group * kHeads + 1 < group;
    }

    // Query head `which` of the thread block; without a second one the first is computed twice and stored once.
    __device__ __forceinline__ int head(int which) const { return first_head + (second ? which : 0); }
};

template <typename T, int D, Pass kPass>
struct Probe {
    using Tile = device::Tile<D>;

    using SharedMemory = Shared<D, kPass>;
    static constexpr bool kMasses = kPass == Pass::kMass || kPass == Pass::kSelect;

    const ProbeParams& p;
    SharedMemory& shared;
    const Place place;
    const int lane, warp, first_row;
    const int which;  // head of this warp within the thread block
    const bool active;

    uint32_t q[kM][D / 16][4];
    float maximum[kM][2];  // pass 1: so far; else: of the row, +inf where it is no probe
    double factor[kM][2];  // pass 3: 2^32 / row sum
    double sum[kM][2];     // pass 2: exact, below 2^53
    // Masses of the columns of place.first_block ... and of the slash lines: of the first head, and how far the
    // second's are from it.
    int64_t* column_mass = nullptr;
    int64_t column_stride = 0;

    __device__ Probe(const ProbeParams& params, SharedMemory& smem, const Place& where)
        : p(params),
          shared(smem),
          place(where),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32),
          first_row(warp % 2 * 16 * kM),
          which(warp / 2),
          active(which == 0 || where.second) {}

    __device__ __forceinline__ int row_of(int m, int r) const { return first_row + 16 * m + lane / 4 + 8 * r; }

    __device__ __forceinline__ int64_t entry(int tile, int row) const {
        return ((static_cast<int64_t>(place.batch) * p.heads + place.head(which)) * p.tiles + tile) * kBlock + row;
    }

    __device__ __forceinline__ void copy_queries(int tile) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const T* source = static_cast<const T*>(p.probe_q.data) + place.batch * p.probe_q.batch_stride +
                              tile * p.tile_stride + place.head(h) * p.probe_q.head_stride;
            Tile::template copy<kThreads>(shared.q(h), source, p.probe_q.row_stride, device::kAllRows, threadIdx.x);
        }
    }

    __device__ __forceinline__ void copy_keys(int buffer, int block) {
        const T* source = static_cast<const T*>(p.k.data) + place.batch * p.k.batch_stride +
                          place.kv_head * p.k.head_stride + static_cast<int64_t>(block) * kBlock * p.k.row_stride;
        Tile::template copy<kThreads>(shared.k(buffer), source, p.k.row_stride, device::kAllRows, threadIdx.x);
        device::copy_async_commit();
    }

    __device__ __forceinline__ void begin_tile(int tile) {
        const uint32_t base = Tile::lane_address(shared.q(which), lane);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int d = 0; d < D / 16; ++d) device::load_matrix(q[m][d], Tile::moved(base, first_row + 16 * m, d));
        const int first = __ldg(p.probe_rows + 2 * tile), end = __ldg(p.probe_rows + 2 * tile + 1);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(m, r);
                const bool probe = row >= first && row < end;
                sum[m][r] = 0;
                if constexpr (kPass == Pass::kMax) {
                    maximum[m][r] = device::negative_infinity();
                } else {
                    const float known = p.row_max[entry(tile, row)];
                    maximum[m][r] = probe ? known : -device::negative_infinity();
                }
                if constexpr (kMasses) {
                    const int64_t total = p.row_sum[entry(tile, row)];
                    factor[m][r] = total > 0 ? __ddiv_rn(4294967296.0, static_cast<double>(total)) : 0.0;
                }
            }
    }

    __device__ __forceinline__ void score(float (&s)[kM][8][4], int buffer, bool diagonal) {
        const uint32_t k = Tile::lane_address_b(shared.k(buffer), lane);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                device::load_matrix(b, Tile::moved(k, 16 * n, d));
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    device::mma<T>(s[m][2 * n], q[m][d], b[0], b[1]);
                    device::mma<T>(s[m][2 * n + 1], q[m][d], b[2], b[3]);
                }
            }
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[m][n][e] = __fmul_rn(s[m][n][e], p.scale);
                    if (diagonal && 8 * n + 2 * (lane % 4) + (e & 1) > row_of(m, e >> 1)) {
                        s[m][n][e] = device::negative_infinity();
                    }
                }
    }

    __device__ __forceinline__ void visit(int buffer, bool diagonal) {
        float s[kM][8][4];
        score(s, buffer, diagonal);
        if constexpr (kPass == Pass::kMax) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) maximum[m][e >> 1] = fmaxf(maximum[m][e >> 1], s[m][n][e]);
        } else if constexpr (kPass == Pass::kSum) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    WeightSum weights;
#pragma unroll
                    for (int n = 0; n < 8; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) weights.add(raw_weight(s[m][n][2 * r + e], maximum[m][r]));
                    sum[m][r] += weights.total();
                }
        } else {
            add_masses(s, buffer);
        }
    }

    // Keeps one half of 2 kHalf sums, chosen by a bit of the lane, and adds the partner's share of it.
    template <int kHalf>
    __device__ __forceinline__ void exchange(int64_t (&columns)[16], int bit) {
        const bool upper = lane & bit;
#pragma unroll
        for (int c = 0; c < kHalf; ++c) {
            const int64_t give = upper ? columns[c] : columns[c + kHalf];
            const int64_t keep = upper ? columns[c + kHalf] : columns[c];
            columns[c] = keep + __shfl_xor_sync(0xffffffffu, give, bit);
        }
    }

    // Column sums of the warp's 32 rows into shared memory. A mass is rint(weight * factor): adding 1.5 * 2^52 rounds
    // the product to an integer and leaves it in the low bits of the double, where integers can add it up.
    __device__ __forceinline__ void add_masses(const float (&s)[kM][8][4], int buffer) {
        constexpr double kRound = 6755399441055744.0;
        constexpr int kRows = 2 * kM;
        const int64_t offset = kRows * __double_as_longlong(kRound);
        int64_t columns[16];
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            int64_t bits = 0;
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const double w = weight_as_double(raw_weight(s[m][c / 2][2 * r + c % 2], maximum[m][r]));
                    bits += __double_as_longlong(__dadd_rn(__dmul_rn(w, factor[m][r]), kRound));
                }
            columns[c] = bits - offset;
        }
        // The eight lanes of a column (lane % 4 alike) share out the 16 sums: two each in the end.
        exchange<8>(columns, 16);
        exchange<4>(columns, 8);
        exchange<2>(columns, 4);
        // columns[0..1]: those of n-tile lane / 4, in the bit order of the exchanges.
        auto& sums = shared.sums[buffer];
        const int column = 8 * (lane / 4) + 2 * (lane % 4);
        sums.warp[warp][column] = columns[0];
        sums.warp[warp][column + 1] = columns[1];
        int64_t total = columns[0] + columns[1];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
        if (lane == 0) sums.total[warp] = total;
    }

    // With one tile each key block is visited once at most, and masses need no zeros to begin with.
    __device__ __forceinline__ bool visits_once() const { return kPass == Pass::kMass && p.tiles == 1; }

    // Zeros for the key blocks that the only tile does not meet.
    __device__ __forceinline__ void clear_others() {
        const int probe_block = __ldg(p.probe_blocks), document = __ldg(p.doc_start + probe_block);
        const int h = threadIdx.x / kBlock, column = threadIdx.x % kBlock;
        if (h == 1 && !place.second) return;
        for (int j = place.first_block; j < place.end_block; ++j) {
            const int block = __ldg(p.kv_table + j);
            if (block >= document && block <= probe_block) continue;
            column_mass[h * column_stride + (j - place.first_block) * kBlock + column] = 0;
        }
    }

    // Adds the sums of a visited key block to the results: thread t has column t % 64 of head t / 64. No other thread
    // block has these columns; slash lines are shared.
    __device__ __forceinline__ void store_masses(int buffer, int block, int line) {
        const int h = threadIdx.x / kBlock, column = threadIdx.x % kBlock;
        if (h == 1 && !place.second) return;
        const auto& sums = shared.sums[buffer];
        int64_t& mass = column_mass[h * column_stride + (block - place.first_block) * kBlock + column];
        mass = (visits_once() ? 0 : mass) + sums.warp[2 * h][column] + sums.warp[2 * h + 1][column];
        if (column == 0) {
            const int64_t row = static_cast<int64_t>(place.batch) * p.heads + place.head(h);
            atomicAdd(reinterpret_cast<unsigned long long*>(p.slash_mass) + row * p.blocks + line,
                      static_cast<unsigned long long>(sums.total[2 * h] + sums.total[2 * h + 1]));
        }
    }

    __device__ __forceinline__ void end_tile(int tile) {
        if constexpr (kMasses) return;
        const int first = __ldg(p.probe_rows + 2 * tile), end = __ldg(p.probe_rows + 2 * tile + 1);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(m, r);
                const bool writes = active && lane % 4 == 0 && row >= first && row < end;
                if constexpr (kPass == Pass::kMax) {
                    float top = maximum[m][r];
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                    if (writes) atomic_max(p.row_max + entry(tile, row), top);
                } else {
                    double total = sum[m][r];
                    total += __shfl_xor_sync(0xffffffffu, total, 1);
                    total += __shfl_xor_sync(0xffffffffu, total, 2);
                    if (writes) {
                        atomicAdd(reinterpret_cast<unsigned long long*>(p.row_sum) + entry(tile, row),
                                  static_cast<unsigned long long>(total));
                    }
                }
            }
    }
    // All tiles and key blocks of the thread block.
    __device__ __forceinline__ void walk() {
        if (visits_once()) clear_others();
        // Probe tiles that meet any of the key blocks: every warp looks at all of these.
        int first_tile = p.tiles, end_tile = 0;
        for (int j = place.first_block + lane; j < place.end_block; j += 32) {
            const int block = __ldg(p.kv_table + j);
            first_tile = min(first_tile, __ldg(p.block_probes + 2 * block));
            end_tile = max(end_tile, __ldg(p.block_probes + 2 * block + 1));
        }
        first_tile = __reduce_min_sync(0xffffffffu, first_tile);
        end_tile = __reduce_max_sync(0xffffffffu, end_tile);
        for (int tile = first_tile; tile < end_tile; ++tile) walk_tile(tile);
    }

    __device__ __forceinline__ void walk_tile(int tile) {
        const int probe_block = __ldg(p.probe_blocks + tile);
        const int document = __ldg(p.doc_start + probe_block);
        // The next key block from `j` on that the tile meets.
        const auto next = [&](int j) {
            while (j < place.end_block) {
                const int block = __ldg(p.kv_table + j);
                if (block >= document && block <= probe_block) break;
                ++j;
            }
            return j;
        };
        const auto store = [&](int buffer, int j) {
            store_masses(buffer, j, document + probe_block - __ldg(p.kv_table + j));
        };
        int j = next(place.first_block);
        if (j >= place.end_block) return;
        copy_queries(tile);
        if (SharedMemory::kSharesTiles) {
            device::copy_async_commit();
        } else {
            copy_keys(0, j);
        }
        device::copy_async_wait<0>();
        __syncthreads();
        begin_tile(tile);
        if (SharedMemory::kSharesTiles) {
            __syncthreads();  // everyone has the queries
            copy_keys(0, j);
        }
        int previous = -1, buffer = 0;
        for (; j < place.end_block; buffer ^= 1) {
            const int following = next(j + 1);
            device::copy_async_wait<0>();
            __syncthreads();  // keys j have landed; everyone is done with the other buffer
            if (following < place.end_block) copy_keys(buffer ^ 1, following);
            if (kMasses && previous >= 0) store(buffer ^ 1, previous);
            visit(buffer, __ldg(p.kv_table + j) == probe_block);
            previous = j;
            j = following;
        }
        if (kMasses) {
            __syncthreads();
            store(buffer ^ 1, previous);
        }
        end_tile(tile);
        __syncthreads();
    }
};

template <typename T, int D, Pass kPass>
__global__ void __launch_bounds__(kThreads, 2)
    probe_kernel(const __grid_constant__ ProbeParams p, int pairs, int range) {
    extern __shared__ __align__(256) unsigned char dynamic_shared[];
    const Place place(p, blockIdx.x % pairs, blockIdx.x / pairs, range);
    Probe<T, D, kPass> probe(p, *reinterpret_cast<Shared<D, kPass>*>(dynamic_shared), place);
    if constexpr (kPass == Pass::kMass) {
        const int64_t row = static_cast<int64_t>(place.batch) * p.heads + place.first_head;
        probe.column_stride = static_cast<int64_t>(p.kv_blocks) * kBlock;
        probe.column_mass =
            p.column_mass + row * probe.column_stride + static_cast<int64_t>(place.first_block) * kBlock;
    }
    probe.walk();
}

// Pairs of a batch entry and two heads of a group.
inline int64_t pair_count(const ProbeParams& p) {
    const int pairs = (p.heads / p.kv_heads + kHeads - 1) / kHeads;
    return static_cast<int64_t>(p.batch) * p.kv_heads * pairs;
}

template <typename T, int D, Pass kPass>
void launch(const ProbeParams& p, cudaStream_t stream) {
    constexpr int kShared = sizeof(Shared<D, kPass>);
    const auto kernel = probe_kernel<T, D, kPass>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "probe set-up");
    const int64_t pairs = pair_count(p);
    // Long ranges load the queries less often, short ones fill the device: aim at about four rounds of thread blocks.
    constexpr int64_t kThreadBlocks = 1024, kLongestRange = 32;
    int64_t range = pairs * p.kv_blocks / kThreadBlocks;
    range = range < 1 ? 1 : (range > kLongestRange ? kLongestRange : range);
    const int64_t grid = pairs * ((p.kv_blocks + range - 1) / range);
    check(grid <= 0x7fffffff, "probe: batch * heads * key blocks is too large");
    kernel<<<static_cast<unsigned>(grid), kThreads, kShared, stream>>>(p, static_cast<int>(pairs),
                                                                       static_cast<int>(range));
    check_cuda(cudaGetLastError(), "probe");
}

}  // namespace mtraining::probe
