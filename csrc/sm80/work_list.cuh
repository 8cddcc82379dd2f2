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
    // Rows of the tile that exist, of `columns` slots: copies do not pick the rows that take part, as a whole tile is
    // copied by fewer instructions. The other slots hold finite values (docs/kernels.md).
    __device__ static __forceinline__ uint64_t rows(uint32_t code, int slots) {
        const int left = slots - index(code) * kBlock;
        return columns(code) && left < kBlock ? (uint64_t{1} << left) - 1 : device::kAllRows;
    }
};

// Quotient and remainder by a divisor that is the same for many numbers.
struct Divider {
    uint32_t divisor, factor;

    __device__ __forceinline__ explicit Divider(int by) : divisor(by), factor(0xffffffffu / divisor) {}
    __device__ __forceinline__ void split(int number, int* quotient, int* remainder) const {
        uint32_t q = __umulhi(number, factor);  // the quotient or one less
        uint32_t r = number - q * divisor;
        if (r >= divisor) {
            ++q;
            r -= divisor;
        }
        *quotient = static_cast<int>(q);
        *remainder = static_cast<int>(r);
    }
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

// The tiles that are worked off next. kStep candidates are tested at once: their loads are in flight together, which is
// what a scan waits for. There is always room for one step, and for kRoom entries that an earlier one left.
template <int kWarps_, int kStep_, int kMasks_, int kRoom>
struct WorkList {
    static constexpr int kWarps = kWarps_;
    static constexpr int kStep = kStep_;
    static constexpr int kUnroll = kStep / (32 * kWarps);  // candidates of a thread in a step
    static constexpr int kCapacity = kStep + kRoom;
    static constexpr int kMasks = kMasks_;  // column entries in the list at a time
    static_assert(kUnroll <= 32);

    uint64_t masks[kMasks > 0 ? kMasks : 1];  // of the entry in slot % kMasks, if it has columns: those that take part
    uint32_t code[kCapacity];
    int32_t warp_count[kWarps];

    __device__ static __forceinline__ bool has_room(int count) { return count <= kCapacity - kStep; }

    // Bit c: column c of the tile takes part.
    __device__ __forceinline__ uint64_t mask(int slot) const {
        if constexpr (kMasks > 0) {
            if (Item::columns(code[slot])) return masks[slot % kMasks];
        }
        return device::kAllRows;
    }

    // The same where columns are known to be in the slot.
    __device__ __forceinline__ uint64_t column_mask(int slot) const { return masks[slot % kMasks]; }

    // Appends candidates in the order (warp, bit, lane), bit u of `active` saying whether this thread's candidate u is
    // one; store(slot, u) writes it. Returns the new count. All threads call it.
    template <int kBits, typename Store>
    __device__ __forceinline__ int append(int count, uint32_t active, const Store& store) {
        const int lane = threadIdx.x % 32;
        uint32_t votes[kBits];
        int own = 0;
#pragma unroll
        for (int u = 0; u < kBits; ++u) {
            votes[u] = __ballot_sync(0xffffffffu, (active >> u) & 1);
            own += __popc(votes[u]);
        }
        int position = reserve(&count, own);
#pragma unroll
        for (int u = 0; u < kBits; ++u) {
            if ((active >> u) & 1) store(position + __popc(votes[u] & ((1u << lane) - 1)), u);
            position += __popc(votes[u]);
        }
        __syncthreads();
        return count;
    }

    // Where a warp's `own` entries begin behind `count` others; adds those of all warps to it. All threads call it.
    __device__ __forceinline__ int reserve(int* count, int own) {
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) warp_count[warp] = own;
        __syncthreads();
        int position = *count;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const int other = warp_count[w];
            if (w < warp) position += other;
            *count += other;
        }
        return position;
    }
};

// Bit `position` of a row of the bitmap; false where `valid` is not. No branch, so that many are loaded together.
__device__ __forceinline__ bool test_bit(const int64_t* words, int position, bool valid = true) {
    const uint32_t* parts = reinterpret_cast<const uint32_t*>(words);
    const uint32_t part = __ldg(parts + (valid ? position >> 5 : 0));
    return valid && ((part >> (position & 31)) & 1);
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

}  // namespace mtraining::sm80
