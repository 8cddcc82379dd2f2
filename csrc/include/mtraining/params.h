// Arguments of the attention kernels. Free of torch: the binding files fill these structs, the kernels read them.
//
// Words: B = 64 rows of a block; N-block numbers are global, "local" ones count the blocks of a tensor. All strides are
// in elements and 64 bit. The last dimension (head_dim) is contiguous. docs/design.md has the meaning of every operand.
#pragma once

#include <cstdint>

namespace mtraining {

constexpr int kBlock = 64;

enum class DType : int32_t { kBFloat16, kFloat16 };

// A tensor with the dimensions (batch, row, head, head_dim), in whatever order they lie in memory.
template <typename T>
struct RowView {
    T* data = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// [chunks, batch, kv_blocks * 64, kv_heads, head_dim]
template <typename T>
struct ChunkView {
    T* data = nullptr;
    int64_t chunk_stride = 0;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

struct Shape {
    int32_t batch = 0;
    int32_t heads = 0;      // query heads
    int32_t kv_heads = 0;   // divides heads
    int32_t head_dim = 0;   // 64 or 128
    int32_t q_blocks = 0;   // local query blocks
    int32_t kv_blocks = 0;  // local key blocks of each chunk
    int32_t chunks = 0;     // may be 0
    int32_t columns = 0;    // slots of column_list, 0 without one
    int32_t blocks = 0;     // n, global blocks: length of doc_start
    DType dtype = DType::kBFloat16;
};

// What is attended. Query block i attends key block j iff doc_start[i] == doc_start[j], j <= i and bit
// doc_start[i] + i - j of slash_words is set (at j == i the lower triangle only); it attends column c iff
// doc_start[i] == doc_start[c / 64], c / 64 < i and bit doc_start[i] + i - c / 64 is clear. With row lists every local
// query block has a row of its own, whose bit j stands for key block j; there are no columns then.
struct Mask {
    const int64_t* slash_words = nullptr;  // [batch, heads, ceil(blocks / 64)], contiguous
    bool row_lists = false;                // slash_words is [batch, heads, q_blocks, ceil(blocks / 64)]
    const int32_t* doc_start = nullptr;    // [blocks]
    const int32_t* q_blocks = nullptr;     // [q_blocks], global block of each local query block
    const int32_t* kv_blocks = nullptr;    // [chunks, kv_blocks], contiguous; null without chunks
    const int32_t* column_list = nullptr;  // [batch, heads, columns], contiguous, -1 beyond the count; null without
};

// out, lse of the q rows; see "attention_forward_" in docs/design.md for the three cases of the epilogue.
struct AttentionForwardParams {
    Shape shape;
    Mask mask;
    RowView<const void> q;  // [batch, q_blocks * 64, heads, head_dim]
    ChunkView<const void> k, v;
    RowView<const void> compact_k;  // [batch, heads, columns, head_dim]: row = column slot
    RowView<const void> compact_v;
    RowView<float> partial;  // as q, fp32; null if not given
    RowView<void> final;     // as q, input dtype; null if not given
    float* lse = nullptr;    // [batch, heads, q_blocks * 64], natural log, contiguous
    float scale = 0;
    bool accumulate = false;  // merge with partial and lse
};

struct AttentionBackwardParams {
    Shape shape;
    Mask mask;                    // no columns
    RowView<const void> q, dout;  // dout may have zero strides (an expanded gradient)
    ChunkView<const void> k, v;
    const float* lse = nullptr;    // [batch, heads, q_blocks * 64], contiguous
    const float* delta = nullptr;  // the same shape
    RowView<float> dq;             // as q, fp32: overwritten, or added to with accumulate_dq
    ChunkView<float> dk, dv;       // as k, fp32: overwritten
    float scale = 0;
    bool accumulate_dq = false;
    bool deterministic = true;  // false allows orders of summation that differ from run to run
};

struct VerticalBackwardParams {
    Shape shape;  // chunks == 0
    Mask mask;
    RowView<const void> q, dout;
    RowView<const void> compact_k, compact_v;
    const float* lse = nullptr;
    const float* delta = nullptr;
    RowView<float> dq;
    RowView<float> d_compact_k,
        d_compact_v;  // [batch, heads, columns, head_dim], fp32: overwritten (also unused slots)
    float scale = 0;
    bool accumulate_dq = false;
    bool deterministic = true;
};

}  // namespace mtraining
