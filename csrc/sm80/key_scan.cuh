// The query blocks that meet one key block, or one tile of 64 columns: the transpose of QueryScan.
#pragma once

#include "sm80/work_list.cuh"

namespace mtraining::sm80 {

// kColumns: the tile is 64 columns of one query head; otherwise a key block shared by the query heads of a group.
template <int kWarps, bool kColumns>
struct KeyScan {
    using List = WorkList<kWarps>;

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
        constexpr int kUnroll = List::kUnroll;
        const int first = position + (threadIdx.x / 32) * 32 * kUnroll + threadIdx.x % 32;
        bool active[kUnroll];
        uint32_t codes[kUnroll];
        uint64_t masks[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int e = first + 32 * u;
            active[u] = false;
            codes[u] = 0;
            masks[u] = 0;
            if (e < candidates) {
                const int member = e / q_blocks;
                const int q_block = e - member * q_blocks;
                const int block = __ldg(mask.q_blocks + q_block);
                const int document = __ldg(mask.doc_start + block);
                const int64_t* row = bits.row(mask, member, q_block);
                masks[u] = kColumns ? allowed_columns(row, block, document)
                                    : (allowed_block(row, block, document) ? device::kAllRows : 0);
                active[u] = masks[u] != 0;
                codes[u] = Item::encode(q_block, member, !kColumns && block == key_block, kColumns);
            }
        }
        position += kListStep;
        return list.append(count, active, codes, masks);
    }

    __device__ __forceinline__ bool allowed_block(const int64_t* row, int block, int document) const {
        return key_block <= block && key_block >= document &&
               test_bit(row, SlashBits::bit(mask, block, document, block - key_block));
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
