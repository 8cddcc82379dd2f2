// The query blocks that meet one key block, or one tile of 64 columns: the transpose of QueryScan.
#pragma once

#include "sm80/work_list.cuh"

namespace mtraining::sm80 {

// A column tile has a mask for every query block, and takes long to find it.
template <int kWarps, bool kColumns>
using KeyList = WorkList<kWarps, kColumns ? 256 : 1024, kColumns ? 512 : 0, 256>;

// kColumns: the tile is 64 columns of one query head; otherwise a key block shared by the query heads of a group.
template <int kWarps, bool kColumns>
struct KeyScan {
    using List = KeyList<kWarps, kColumns>;
    static constexpr int kUnroll = List::kUnroll;

    SlashBits bits;  // of the first query head of the group
    const Mask& mask;
    int q_blocks;
    int candidates;               // query blocks times heads of the group
    int key_block;                // global; not used for columns
    const int32_t* column_block;  // shared memory [64]: block of each column, -1 for none
    int position;

    // Refills the list and moves `position` on; 0 when nothing is left. All threads call it.
    __device__ static __forceinline__ int fill(List& list, const Shape& shape, const Mask& mask, int first_batch_head,
                                               int group, int key_block, const int32_t* column_block, int& position) {
        KeyScan scan{SlashBits(shape, mask, first_batch_head),
                     mask,
                     shape.q_blocks,
                     shape.q_blocks * group,
                     key_block,
                     column_block,
                     position};
        int count = 0;
        while (scan.position < scan.candidates && List::has_room(count)) count = scan.scan(list, count);
        position = scan.position;
        return count;
    }

private:
    __device__ __forceinline__ int scan(List& list, int count) {
        const int first = position + (threadIdx.x / 32) * 32 * kUnroll + threadIdx.x % 32;
        int member[kUnroll], q_block[kUnroll], block[kUnroll], document[kUnroll];
        const Divider heads(q_blocks);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            heads.split(min(first + 32 * u, candidates - 1), &member[u], &q_block[u]);
            block[u] = __ldg(mask.q_blocks + q_block[u]);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) document[u] = __ldg(mask.doc_start + block[u]);
        uint64_t masks[kUnroll];  // kColumns
        uint32_t active = 0;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const bool valid = first + 32 * u < candidates;
            const int64_t* row = bits.row(mask, member[u], q_block[u]);
            if constexpr (kColumns) {
                masks[u] = valid ? allowed_columns(row, block[u], document[u]) : 0;
                active |= masks[u] != 0 ? 1u << u : 0;
            } else {
                const bool reached = valid && key_block <= block[u] && key_block >= document[u];
                const int bit = SlashBits::bit(mask, block[u], document[u], block[u] - key_block);
                active |= test_bit(row, bit, reached) ? 1u << u : 0;
            }
        }
        position += List::kStep;
        return list.template append<kUnroll>(count, active, [&](int slot, int u) {
            list.code[slot] = Item::encode(q_block[u], member[u], !kColumns && block[u] == key_block, kColumns);
            if constexpr (kColumns) list.masks[slot % List::kMasks] = masks[u];
        });
    }

    __device__ __forceinline__ uint64_t allowed_columns(const int64_t* row, int block, int document) const {
        uint64_t result = 0;
        for (int c = 0; c < kBlock; ++c) {
            const int other = column_block[c];  // -1 lies before every document
            if (other < block && other >= document && !test_bit(row, document + block - other)) {
                result |= uint64_t{1} << c;
            }
        }
        return result;
    }
};

}  // namespace mtraining::sm80
