// Which tiles a set of blocks meets, found by one warp while it feeds the copy engine.
//
// A CTA owns kBlocks neighbouring blocks, one a consumer warpgroup, and loads the union of what they need; each tile
// comes with the set of warpgroups that need it. All functions are called by the 32 lanes of one warp together.
#pragma once

#include <cstdint>

#include "mtraining/params.h"

namespace mtraining::sm90 {

constexpr int kNoBlock = -1;
constexpr uint64_t kAllColumns = ~uint64_t{0};

// What a tile means to the warpgroups: bit w of `needed`: warpgroup w needs it; bit w of `diagonal`: as a triangle.
struct Need {
    uint32_t needed;
    uint32_t diagonal;
};

// Callers pass bit 0 where no distance applies, rather than branch: all loads of a scan are then in flight together.
__device__ __forceinline__ bool slash_bit(const int64_t* words, int bit) {
    return (__ldg(words + (bit >> 6)) >> (bit & 63)) & 1;
}

// Query blocks of the warpgroups of a CTA.
template <int kBlocks>
struct QueryBlocks {
    int block[kBlocks];  // global; kNoBlock beyond the last
    int start[kBlocks];  // doc_start of it
    const int64_t* words;

    __device__ __forceinline__ void load(const Shape& shape, const Mask& mask, int batch, int head, int first) {
        words = mask.slash_words + (int64_t{batch} * shape.heads + head) * ((shape.blocks + 63) / 64);
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {
            const bool real = first + w < shape.q_blocks;
            block[w] = real ? __ldg(mask.q_blocks + first + w) : kNoBlock;
            start[w] = real ? __ldg(mask.doc_start + block[w]) : 0;
        }
    }

    __device__ __forceinline__ Need need(int key_block) const {
        Need result{0, 0};
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {
            const bool candidate = key_block <= block[w] && key_block >= start[w];
            const bool hit = slash_bit(words, candidate ? start[w] + block[w] - key_block : 0) & candidate;
            result.needed |= static_cast<uint32_t>(hit) << w;
            result.diagonal |= static_cast<uint32_t>(hit && key_block == block[w]) << w;
        }
        return result;
    }

    // Is key position `column` (-1: none) a vertical line of warpgroup w's block?
    __device__ __forceinline__ bool column_active(int w, int column) const {
        const int key_block = column >> 6;
        const bool candidate = column >= 0 && key_block < block[w] && key_block >= start[w];
        return !slash_bit(words, candidate ? start[w] + block[w] - key_block : 0) & candidate;
    }
};

// Key blocks of the warpgroups of a CTA, for the transposed walk.
template <int kBlocks>
struct KeyBlocks {
    int block[kBlocks];

    __device__ __forceinline__ Need need(const int64_t* words, int query_block, int start) const {
        Need result{0, 0};
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {
            const bool candidate = block[w] >= start && block[w] <= query_block;
            const bool hit = slash_bit(words, candidate ? start + query_block - block[w] : 0) & candidate;
            result.needed |= static_cast<uint32_t>(hit) << w;
            result.diagonal |= static_cast<uint32_t>(hit && query_block == block[w]) << w;
        }
        return result;
    }
};

// Calls visit(index, need) for every index in [0, count) whose need(index) is not empty, from the highest index down.
// `need` is evaluated by one lane for each index, `visit` by the whole warp. Four loads are in flight a lane.
template <typename NeedOf, typename Visit>
__device__ __forceinline__ void scan_blocks(int count, NeedOf need_of, Visit visit) {
    constexpr int kUnroll = 4;
    const int lane = threadIdx.x % 32;
    for (int base = (count - 1) / (32 * kUnroll) * (32 * kUnroll); base >= 0; base -= 32 * kUnroll) {
        Need need[kUnroll];
        uint32_t found[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int index = base + 32 * u + lane;
            need[u] = index < count ? need_of(index) : Need{0, 0};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) found[u] = __ballot_sync(0xFFFFFFFF, need[u].needed != 0);
#pragma unroll
        for (int u = kUnroll - 1; u >= 0; --u) {
            const uint32_t packed = need[u].needed | need[u].diagonal << 16;
            while (found[u] != 0) {
                const int source = 31 - __clz(found[u]);
                found[u] ^= 1u << source;
                const uint32_t of_source = __shfl_sync(0xFFFFFFFF, packed, source);
                visit(base + 32 * u + source, Need{of_source & 0xFFFF, of_source >> 16});
            }
        }
    }
}

// Calls visit(tile, masks) for every tile of 64 slots of `columns` that some block of `rows` attends; masks[w] has the
// bits of the attended slots.
template <int kBlocks, typename Visit>
__device__ __forceinline__ void scan_columns(const QueryBlocks<kBlocks>& rows, const int32_t* columns, int count,
                                             Visit visit) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < count; base += 64) {
        const int low = base + lane < count ? __ldg(columns + base + lane) : -1;
        const int high = base + lane + 32 < count ? __ldg(columns + base + lane + 32) : -1;
        if (__ballot_sync(0xFFFFFFFF, low >= 0 || high >= 0) == 0) return;  // beyond the last column
        uint64_t masks[kBlocks];
        bool any = false;
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {
            const uint32_t low_bits = __ballot_sync(0xFFFFFFFF, rows.column_active(w, low));
            const uint32_t high_bits = __ballot_sync(0xFFFFFFFF, rows.column_active(w, high));
            masks[w] = static_cast<uint64_t>(high_bits) << 32 | low_bits;
            any |= masks[w] != 0;
        }
        if (any) visit(base / 64, masks);
    }
}

}  // namespace mtraining::sm90
