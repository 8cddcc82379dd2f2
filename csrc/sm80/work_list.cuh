// Which tiles meet a tile: lists built on the fly from the slash bitmap and the position tables, by all threads of a
// thread block together. Nothing is stored per row in global memory, so any table and any number of chunks will do.
#pragma once

#include "device/tile.cuh"

namespace mtraining::sm80 {

// What one list entry says. `index` is a local block of a chunk, a local query block or a tile of 64 columns; `group`
// is the chunk, or the query head within its group.
struct Item {
    static constexpr int kIndexBits = 18;  // 2^18 blocks of 64 tokens
    static constexpr int kGroupBits = 12;

    __device__ static __forceinline__ uint32_t encode(int index, int group, bool diagonal, bool columns) {
        return (static_cast<uint32_t>(group) << (kIndexBits + 2)) | (static_cast<uint32_t>(index) << 2) |
               (columns ? 2u : 0u) | (diagonal ? 1u : 0u);
    }
    __device__ static __forceinline__ bool diagonal(uint32_t code) { return code & 1; }
    __device__ static __forceinline__ bool columns(uint32_t code) { return code & 2; }
    __device__ static __forceinline__ int index(uint32_t code) { return (code >> 2) & ((1 << kIndexBits) - 1); }
    __device__ static __forceinline__ int group(uint32_t code) { return code >> (kIndexBits + 2); }
};

// Where the tiles of one operand lie: kept in shared memory, so that no register holds it while tiles are worked off.
template <typename T>
struct TileSource {
    const T* data;         // of the thread block's sample and head
    int64_t group_stride;  // of Item::group
    int64_t row_stride;

    __device__ __forceinline__ void set(const ChunkView<const void>& x, int batch, int head) {
        data = static_cast<const T*>(x.data) + batch * x.batch_stride + head * x.head_stride;
        group_stride = x.chunk_stride;
        row_stride = x.row_stride;
    }
    __device__ __forceinline__ void set(const RowView<const void>& x, int batch, int head) {
        data = static_cast<const T*>(x.data) + batch * x.batch_stride + head * x.head_stride;
        group_stride = x.head_stride;
        row_stride = x.row_stride;
    }
    // Starts copying the rows of an item that `rows` names.
    template <int D, int kThreads>
    __device__ __forceinline__ void copy(unsigned char* to, uint32_t code, uint64_t rows) const {
        const T* tile = data + Item::group(code) * group_stride + Item::index(code) * kBlock * row_stride;
        device::Tile<D>::template copy<kThreads>(device::shared_address(to), tile, row_stride, rows, threadIdx.x);
    }
};

// The query block of a thread block. One key/value head after another, so that its keys stay in the L2 cache; within it
// late query blocks first, as they have the most keys.
struct QueryPlace {
    int batch, head, q_block;

    __device__ __forceinline__ QueryPlace(const Shape& shape, uint32_t index) {
        const uint32_t group = shape.heads / shape.kv_heads;
        const uint32_t member = index % group;
        index /= group;
        q_block = shape.q_blocks - 1 - index % shape.q_blocks;
        index /= shape.q_blocks;
        head = index % shape.kv_heads * group + member;
        batch = index / shape.kv_heads;
    }
};

constexpr int kListCapacity = 448;
constexpr int kListStep = 256;  // candidates tested at once; the list always has room for one step

template <int kWarps>
struct WorkList {
    static constexpr int kUnroll = kListStep / (32 * kWarps);

    uint64_t mask[kListCapacity];  // bit c: column c of the tile takes part (slash tiles: all ones)
    uint32_t code[kListCapacity];
    int32_t warp_count[kWarps];

    __device__ static __forceinline__ bool has_room(int count) { return count <= kListCapacity - kListStep; }

    // Appends the active candidates in the order (warp, unroll, lane); returns the new count. All threads call it.
    __device__ __forceinline__ int append(int count, const bool (&active)[kUnroll], const uint32_t (&codes)[kUnroll],
                                          const uint64_t (&masks)[kUnroll]) {
        const int lane = threadIdx.x % 32;
        const int warp = threadIdx.x / 32;
        uint32_t votes[kUnroll];
        int own = 0;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            votes[u] = __ballot_sync(0xffffffffu, active[u]);
            own += __popc(votes[u]);
        }
        if (lane == 0) warp_count[warp] = own;
        __syncthreads();
        int position = count;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const int other = warp_count[w];
            if (w < warp) position += other;
            count += other;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (active[u]) {
                const int slot = position + __popc(votes[u] & ((1u << lane) - 1));
                code[slot] = codes[u];
                mask[slot] = masks[u];
            }
            position += __popc(votes[u]);
        }
        __syncthreads();
        return count;
    }
};

// Bit `position` of a row of the bitmap.
__device__ __forceinline__ bool test_bit(const int64_t* words, int position) {
    return (static_cast<uint64_t>(__ldg(words + (position >> 6))) >> (position & 63)) & 1;
}

// The rows of the bitmap that the query blocks of some heads look into.
struct SlashBits {
    const int64_t* words;
    int row_words;
    int head_rows;  // q_blocks with row lists, otherwise 1: one row for all query blocks of a head

    __device__ __forceinline__ SlashBits(const Shape& shape, const Mask& mask, int batch_head)
        : row_words((shape.blocks + 63) / 64), head_rows(mask.row_lists ? shape.q_blocks : 1) {
        words = mask.slash_words + static_cast<int64_t>(batch_head) * head_rows * row_words;
    }
    // The row of a query block of the head `member` heads further on.
    __device__ __forceinline__ const int64_t* row(const Mask& mask, int member, int q_block) const {
        return words + (static_cast<int64_t>(member) * head_rows + (mask.row_lists ? q_block : 0)) * row_words;
    }
    // The bit of a key block `distance` before a query block, whose document begins at block `document`.
    __device__ static __forceinline__ int bit(const Mask& mask, int block, int document, int distance) {
        return mask.row_lists ? block - distance : document + distance;
    }
};

// The key blocks and column tiles that one query block meets, in table order, columns last.
template <int kWarps>
struct QueryScan {
    using List = WorkList<kWarps>;

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

    __device__ __forceinline__ int column_tiles() const { return (column_count + kBlock - 1) / kBlock; }

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
        int count = 0;
        while (position < candidates && List::has_room(count)) count = scan_slash(list, count);
        const int end = candidates + column_tiles();
        if (position >= candidates) {
            while (position < end && List::has_room(count)) count = scan_columns(list, count);
        }
        return count;
    }

    __device__ __forceinline__ int scan_slash(List& list, int count) {
        constexpr int kUnroll = List::kUnroll;
        const int first = position + (threadIdx.x / 32) * 32 * kUnroll + threadIdx.x % 32;
        int distance[kUnroll];
        bool active[kUnroll];
        uint32_t codes[kUnroll];
        uint64_t masks[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int e = first + 32 * u;
            // Beyond the table: a distance that no test passes.
            distance[u] = e < candidates ? block - __ldg(kv_blocks + e) : -1;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            // At or before the query block and not before its document: the same document.
            active[u] = distance[u] >= 0 && distance[u] <= block - document;
            if (active[u]) active[u] = test_bit(words, SlashBits::bit(mask, block, document, distance[u]));
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int e = first + 32 * u;
            const int chunk = active[u] ? e / chunk_blocks : 0;
            codes[u] = Item::encode(e - chunk * chunk_blocks, chunk, distance[u] == 0, false);
            masks[u] = device::kAllRows;
        }
        position = min(position + kListStep, candidates);
        return list.append(count, active, codes, masks);
    }

    // A warp looks at one tile of 64 columns at a time.
    __device__ __forceinline__ int scan_columns(List& list, int count) {
        constexpr int kUnroll = List::kUnroll;
        const int lane = threadIdx.x % 32;
        const int first = position - candidates + (threadIdx.x / 32) * kUnroll;
        bool active[kUnroll];
        uint32_t codes[kUnroll];
        uint64_t masks[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int slot = (first + u) * kBlock + lane;
            const uint32_t low = __ballot_sync(0xffffffffu, allowed(slot));
            const uint32_t high = __ballot_sync(0xffffffffu, allowed(slot + 32));
            masks[u] = (static_cast<uint64_t>(high) << 32) | low;
            active[u] = lane == 0 && masks[u] != 0;
            codes[u] = Item::encode(first + u, 0, false, true);
        }
        position += kUnroll * kWarps;
        return list.append(count, active, codes, masks);
    }

    __device__ __forceinline__ bool allowed(int slot) const {
        if (slot >= column_count) return false;
        const int column = __ldg(columns + slot);
        const int distance = block - (column >> 6);  // column -1: beyond the count
        return column >= 0 && distance > 0 && distance <= block - document && !test_bit(words, document + distance);
    }
};

}  // namespace mtraining::sm80
