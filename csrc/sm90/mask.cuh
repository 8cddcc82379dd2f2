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
    return __ldg(reinterpret_cast<const uint32_t*>(words) + (bit >> 5)) >> (bit & 31) & 1;
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

    // Can some block need this one: is it in the past of the same document?
    __device__ __forceinline__ bool reach(int key_block) const {
        bool any = false;
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) any |= key_block <= block[w] && key_block >= start[w];
        return any;
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

    // Can this query block need some of them?
    __device__ __forceinline__ bool reach(int query_block) const {
        bool any = false;
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) any |= block[w] >= 0 && block[w] <= query_block;
        return any;
    }

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

// Calls visit(index, need) for every index in [0, count) whose need is not empty, from the highest index down. An entry
// of the table of blocks is read by fetch(index), one iteration ahead; reach(entry) says cheaply whether it can be
// needed, need(entry) how: one lane asks for each index, `visit` is called by the whole warp.
template <typename Fetch, typename Reach, typename NeedOf, typename Visit>
__device__ __forceinline__ void scan_blocks(int count, Fetch fetch, Reach reach, NeedOf need, Visit visit) {
    constexpr int kUnroll = 4;
    const int lane = threadIdx.x % 32;
    if (count <= 0) return;
    int base = (count - 1) / (32 * kUnroll) * (32 * kUnroll);
    int ahead[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) ahead[u] = fetch(min(base + 32 * u + lane, count - 1));
    for (; base >= 0; base -= 32 * kUnroll) {
        int entry[kUnroll];
        bool any = false;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            entry[u] = ahead[u];
            any |= reach(entry[u]);
            ahead[u] = fetch(max(base - 32 * kUnroll + 32 * u + lane, 0));
        }
        if (!__any_sync(0xFFFFFFFF, any)) continue;
        uint32_t packed = 0;  // a byte for each entry
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const Need of_entry = need(entry[u]);
            if (base + 32 * u + lane < count) packed |= (of_entry.needed | of_entry.diagonal << 4) << 8 * u;
        }
#pragma unroll 1
        for (int u = kUnroll - 1; u >= 0; --u) {
            uint32_t found = __ballot_sync(0xFFFFFFFF, (packed >> 8 * u & 0xFF) != 0);
            while (found != 0) {
                const int source = 31 - __clz(found);
                found ^= 1u << source;
                const uint32_t of_source = __shfl_sync(0xFFFFFFFF, packed, source) >> 8 * u;
                visit(base + 32 * u + source, Need{of_source & 15, of_source >> 4 & 15});
            }
        }
    }
}

// Calls visit(tile, masks) for every tile of 64 slots of `columns` that some block of `rows` attends; masks[w] has the
// bits of the attended slots. Columns are read one iteration ahead.
template <int kBlocks, typename Visit>
__device__ __forceinline__ void scan_columns(const QueryBlocks<kBlocks>& rows, const int32_t* columns, int count,
                                             Visit visit) {
    const auto fetch = [&](int slot) { return slot < count ? __ldg(columns + slot) : -1; };
    const int lane = threadIdx.x % 32;
    int low_ahead = fetch(lane), high_ahead = fetch(lane + 32);
    for (int base = 0; base < count; base += 64) {
        const int low = low_ahead, high = high_ahead;
        low_ahead = fetch(base + 64 + lane);
        high_ahead = fetch(base + 96 + lane);
        if (!__any_sync(0xFFFFFFFF, low >= 0 || high >= 0)) return;  // beyond the last column
        if (!__any_sync(0xFFFFFFFF, rows.reach(low >> 6) || rows.reach(high >> 6))) continue;
        bool active[kBlocks][2];
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {  // all loads are in flight before the first vote
            active[w][0] = rows.column_active(w, low);
            active[w][1] = rows.column_active(w, high);
        }
        uint64_t masks[kBlocks];
        bool any = false;
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {
            const uint32_t low_bits = __ballot_sync(0xFFFFFFFF, active[w][0]);
            const uint32_t high_bits = __ballot_sync(0xFFFFFFFF, active[w][1]);
            masks[w] = static_cast<uint64_t>(high_bits) << 32 | low_bits;
            any |= masks[w] != 0;
        }
        if (any) visit(base / 64, masks);
    }
}

}  // namespace mtraining::sm90
