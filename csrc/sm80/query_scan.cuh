// The key blocks and column tiles that one query block meets: which tiles the forward and the dQ kernel work off.
#pragma once

#include "sm80/work_list.cuh"

namespace mtraining::sm80 {

template <int kWarps, int kRoom>
using QueryList = WorkList<kWarps, 1024, 64, kRoom>;

// In table order, columns last.
template <int kWarps, int kRoom>
struct QueryScan {
    using List = QueryList<kWarps, kRoom>;
    static constexpr int kColumnTiles = 8;  // tiles of a warp in a step

    const Mask& mask;
    const int64_t* words;      // slash bits of this query block
    const int32_t* kv_blocks;  // [chunks * kv_blocks]
    const int32_t* columns;    // column list of (batch, head)
    int block;                 // global query block
    int document;              // its first block
    int candidates;            // chunks * kv_blocks
    int chunk_blocks;
    int column_count;
    int position;  // candidates tested, then candidates + column tiles tested

    __device__ QueryScan(const Shape& shape, const Mask& mask, int batch_head, int q_block, int start)
        : mask(mask),
          words(SlashBits(shape, mask, batch_head).row(mask, 0, q_block)),
          kv_blocks(mask.kv_blocks),
          columns(mask.column_list + static_cast<int64_t>(batch_head) * shape.columns),
          block(__ldg(mask.q_blocks + q_block)),
          document(__ldg(mask.doc_start + block)),
          candidates(shape.chunks * shape.kv_blocks),
          chunk_blocks(shape.kv_blocks),
          column_count(shape.columns),
          position(start) {}

    // Refills the list from its beginning and moves `position` on; 0 when nothing is left. All threads call it. Works
    // the place out anew, so that only the position stays in a register while the tiles are worked off.
    __device__ static __forceinline__ int fill(List& list, const Shape& shape, const Mask& mask, int& position) {
        const QueryPlace place(shape, device::block_index());
        QueryScan scan(shape, mask, place.batch * shape.heads + place.head, place.q_block, position);
        const int count = scan.fill(list);
        position = scan.position;
        return count;
    }

private:
    __device__ __forceinline__ int fill(List& list) {
        constexpr int kColumnStep = kColumnTiles * kWarps;
        int count = 0;
        while (position < candidates && List::has_room(count)) count = scan_slash(list, count);
        if (position < candidates) return count;
        const int end = candidates + (column_count + kBlock - 1) / kBlock;
        const int most = min(count + List::kMasks, List::kCapacity) - kColumnStep;
        while (position < end && count <= most) count = scan_columns(list, count);
        return count;
    }

    __device__ __forceinline__ int scan_slash(List& list, int count) {
        constexpr int kUnroll = List::kUnroll;
        const int first = position + (threadIdx.x / 32) * 32 * kUnroll + threadIdx.x % 32;
        int distance[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int e = min(first + 32 * u, candidates - 1);
            distance[u] = block - __ldg(kv_blocks + e);
        }
        uint32_t active = 0, diagonal = 0;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            // At or before the query block and not before its document: the same document.
            const bool reached = first + 32 * u < candidates && distance[u] >= 0 && distance[u] <= block - document;
            const bool kept = test_bit(words, SlashBits::bit(mask, block, document, distance[u]), reached);
            active |= kept ? 1u << u : 0;
            diagonal |= distance[u] == 0 ? 1u << u : 0;
        }
        position = min(position + List::kStep, candidates);
        const Divider chunks(chunk_blocks);
        return list.template append<kUnroll>(count, active, [&](int slot, int u) {
            int chunk, index;
            chunks.split(first + 32 * u, &chunk, &index);
            list.code[slot] = Item::encode(index, chunk, (diagonal >> u) & 1, false);
        });
    }

    // A warp looks at kColumnTiles tiles of 64 columns.
    __device__ __forceinline__ int scan_columns(List& list, int count) {
        const int lane = threadIdx.x % 32;
        const int first = position - candidates + (threadIdx.x / 32) * kColumnTiles;
        int column[2 * kColumnTiles];
#pragma unroll
        for (int h = 0; h < 2 * kColumnTiles; ++h) {
            const int slot = first * kBlock + 32 * h + lane;
            column[h] = slot < column_count ? __ldg(columns + slot) : -1;
        }
        uint64_t own = 0;  // mask of tile `lane`
        uint32_t active = 0;
#pragma unroll
        for (int u = 0; u < kColumnTiles; ++u) {
            const uint32_t low = __ballot_sync(0xffffffffu, allowed(column[2 * u]));
            const uint32_t high = __ballot_sync(0xffffffffu, allowed(column[2 * u + 1]));
            const uint64_t mask = (static_cast<uint64_t>(high) << 32) | low;
            if (lane == u) own = mask;
            active |= mask != 0 ? 1u << u : 0;
        }
        position += kColumnTiles * kWarps;
        const int slot = list.reserve(&count, __popc(active)) + __popc(active & ((1u << lane) - 1));
        if ((active >> lane) & 1) {
            list.code[slot] = Item::encode(first + lane, 0, false, true);
            list.masks[slot % List::kMasks] = own;
        }
        __syncthreads();
        return count;
    }

    // Whether a column takes part; -1: none.
    __device__ __forceinline__ bool allowed(int column) const {
        const int distance = block - (column >> 6);
        const bool reached = column >= 0 && distance > 0 && distance <= block - document;
        return reached & !test_bit(words, document + distance, reached);
    }
};

}  // namespace mtraining::sm80
