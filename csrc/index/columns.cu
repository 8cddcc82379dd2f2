// Vertical lines: from bitmap to list, and the copies between the chunks and the compact keys and values.
#include "mtraining/check.h"
#include "mtraining/index.h"

namespace mtraining {
namespace {

constexpr int kListThreads = 1024;
constexpr int kWarpsPerBlock = 8;

// Inclusive prefix sum over the thread block; `scratch` has one entry a warp. All threads call it.
__device__ __forceinline__ int block_prefix(int value, int* scratch, int* total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = value;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    *total = all;
    return value + before;
}

// One thread block a row of the bitmap, one thread a block of 64 positions.
__global__ void __launch_bounds__(kListThreads) list_columns_kernel(const __grid_constant__ ListParams p) {
    __shared__ int scratch[kListThreads / 32];
    const int row = blockIdx.x;
    int32_t* list = p.column_list + static_cast<int64_t>(row) * p.capacity;
    int64_t listed = 0;  // before this round of threads
    for (int base = 0; base < p.listed_blocks; base += kListThreads) {
        const int place = base + threadIdx.x;
        const int block = place < p.listed_blocks ? __ldg(p.block_table + place) : -1;
        uint64_t word =
            block >= 0 ? static_cast<uint64_t>(p.column_words[static_cast<int64_t>(row) * p.blocks + block]) : 0;
        const int bits = __popcll(word);
        int total;
        int64_t slot = listed + block_prefix(bits, scratch, &total) - bits - p.first;
        while (word != 0 && slot < p.capacity) {
            if (slot >= 0) list[slot] = block * kBlock + __ffsll(static_cast<long long>(word)) - 1;
            word &= word - 1;
            ++slot;
        }
        listed += total;
    }
    const int64_t count = min(max(listed - p.first, int64_t{0}), static_cast<int64_t>(p.capacity));
    for (int64_t slot = count + threadIdx.x; slot < p.capacity; slot += kListThreads) list[slot] = -1;
    if (threadIdx.x == 0) p.column_count[row] = static_cast<int32_t>(count);
}

// Where global block `block` lies among the chunks, -1 if it does not. A whole warp searches.
__device__ __forceinline__ int find_block(const int32_t* table, int entries, int block) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < entries; base += 128) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int e = base + 32 * u + lane;
            const uint32_t found = __ballot_sync(0xffffffffu, e < entries && __ldg(table + e) == block);
            if (found) return base + 32 * u + __ffs(found) - 1;
        }
    }
    return -1;
}

// One warp a slot; 16 bytes a lane.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    gather_columns_kernel(const __grid_constant__ ColumnCopyParams p) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
    const Shape& shape = p.shape;
    if (index >= static_cast<int64_t>(shape.batch) * shape.heads * shape.columns) return;
    const int column = __ldg(p.column_list + index);
    if (column < 0) return;
    const int entry = find_block(p.kv_table, shape.chunks * shape.kv_blocks, column / kBlock);
    if (entry < 0) return;
    const int slot = index % shape.columns;
    const int head = index / shape.columns % shape.heads;
    const int batch = index / shape.columns / shape.heads;
    const int chunk = entry / shape.kv_blocks;
    const int64_t row = static_cast<int64_t>(entry % shape.kv_blocks) * kBlock + column % kBlock;
    const int kv_head = head / (shape.heads / shape.kv_heads);
    const int lane = threadIdx.x % 32;
    const int vectors = shape.head_dim / 8;  // of K; the next as many lanes copy V
    if (lane >= 2 * vectors) return;
    const auto copy = [&](const ChunkView<const void>& from, const RowView<void>& to, int vector) {
        const int64_t source =
            chunk * from.chunk_stride + batch * from.batch_stride + row * from.row_stride + kv_head * from.head_stride;
        const int64_t target = batch * to.batch_stride + slot * to.row_stride + head * to.head_stride;
        const uint16_t* in = static_cast<const uint16_t*>(from.data) + source;
        uint16_t* out = static_cast<uint16_t*>(to.data) + target;
        reinterpret_cast<uint4*>(out)[vector] = __ldg(reinterpret_cast<const uint4*>(in) + vector);
    };
    if (lane < vectors) {
        copy(p.k, p.compact_k, lane);
    } else {
        copy(p.v, p.compact_v, lane - vectors);
    }
}

constexpr int kScatterThreads = 128;

// One thread block a key block of one key/value head: it finds the slots of its 64 columns head by head, in order, so
// that the sum over the query heads of the group has a fixed order and no two threads add to one row.
__global__ void __launch_bounds__(kScatterThreads) scatter_columns_kernel(const __grid_constant__ ColumnCopyParams p) {
    __shared__ int32_t slot_of[kBlock];
    __shared__ int32_t any;
    const Shape& shape = p.shape;
    int index = blockIdx.x;
    const int kv_head = index % shape.kv_heads;
    index /= shape.kv_heads;
    const int entry = index % (shape.chunks * shape.kv_blocks);
    const int batch = index / (shape.chunks * shape.kv_blocks);
    const int block = __ldg(p.kv_table + entry);
    const int64_t chunk = entry / shape.kv_blocks;
    const int64_t first_row = static_cast<int64_t>(entry % shape.kv_blocks) * kBlock;
    const int group = shape.heads / shape.kv_heads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        __syncthreads();
        if (threadIdx.x < kBlock) slot_of[threadIdx.x] = -1;
        if (threadIdx.x == 0) any = 0;
        __syncthreads();
        const int32_t* list = p.column_list + (static_cast<int64_t>(batch) * shape.heads + head) * shape.columns;
        for (int slot = threadIdx.x; slot < shape.columns; slot += kScatterThreads) {
            const int column = __ldg(list + slot);
            if (column >= 0 && column / kBlock == block) {
                slot_of[column % kBlock] = slot;
                any = 1;
            }
        }
        __syncthreads();
        if (!any) continue;
        for (int row = warp; row < kBlock; row += kScatterThreads / 32) {
            const int slot = slot_of[row];
            if (slot < 0) continue;
            const auto add = [&](const RowView<const float>& from, const ChunkView<float>& to) {
                const float2* in = reinterpret_cast<const float2*>(from.data + batch * from.batch_stride +
                                                                   slot * from.row_stride + head * from.head_stride);
                float2* out = reinterpret_cast<float2*>(to.data + chunk * to.chunk_stride + batch * to.batch_stride +
                                                        (first_row + row) * to.row_stride + kv_head * to.head_stride);
                for (int i = lane; i < shape.head_dim / 2; i += 32) {
                    const float2 a = in[i], b = out[i];
                    out[i] = make_float2(a.x + b.x, a.y + b.y);
                }
            };
            add(p.d_compact_k, p.dk);
            add(p.d_compact_v, p.dv);
        }
    }
}

}  // namespace

void list_columns(const ListParams& p, cudaStream_t stream) {
    if (p.rows == 0) return;
    list_columns_kernel<<<p.rows, kListThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "list_columns");
}

void gather_columns(const ColumnCopyParams& p, cudaStream_t stream) {
    const int64_t slots = static_cast<int64_t>(p.shape.batch) * p.shape.heads * p.shape.columns;
    if (slots == 0 || p.shape.chunks * p.shape.kv_blocks == 0) return;
    const int64_t grid = (slots + kWarpsPerBlock - 1) / kWarpsPerBlock;
    check(grid <= 0x7fffffff, "gather_columns: batch * heads * columns = ", slots, " is too large");
    gather_columns_kernel<<<static_cast<unsigned>(grid), 32 * kWarpsPerBlock, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "gather_columns");
}

void scatter_columns(const ColumnCopyParams& p, cudaStream_t stream) {
    const int64_t grid = static_cast<int64_t>(p.shape.batch) * p.shape.kv_heads * p.shape.chunks * p.shape.kv_blocks;
    if (grid == 0 || p.shape.columns == 0) return;
    check(grid <= 0x7fffffff, "scatter_columns: batch * heads * key blocks = ", grid, " is too large");
    scatter_columns_kernel<<<static_cast<unsigned>(grid), kScatterThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "scatter_columns");
}

}  // namespace mtraining
