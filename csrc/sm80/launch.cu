// Entry points of the general path: pick the instantiation, bring the operands into the form of the kernels.
#include "mtraining/dispatch.h"
#include "mtraining/launch.h"
#include "sm80/backward_common.cuh"

namespace mtraining::sm80 {

template <typename T, int D>
void launch_attention_forward(const AttentionForwardParams&, cudaStream_t);
template <typename T, int D>
void launch_query_gradient(const QueryGradParams&, cudaStream_t);
template <typename T, int D, bool kColumns>
void launch_key_gradient(const KeyGradParams&, cudaStream_t);

namespace {

using Bf16 = __nv_bfloat16;
using Fp16 = __half;

constexpr Instantiations<void (*)(const AttentionForwardParams&, cudaStream_t)> kForward{
    launch_attention_forward<Bf16, 64>, launch_attention_forward<Bf16, 128>, launch_attention_forward<Fp16, 64>,
    launch_attention_forward<Fp16, 128>};
constexpr Instantiations<void (*)(const QueryGradParams&, cudaStream_t)> kQueryGradient{
    launch_query_gradient<Bf16, 64>, launch_query_gradient<Bf16, 128>, launch_query_gradient<Fp16, 64>,
    launch_query_gradient<Fp16, 128>};
constexpr Instantiations<void (*)(const KeyGradParams&, cudaStream_t)> kKeyGradient{
    launch_key_gradient<Bf16, 64, false>, launch_key_gradient<Bf16, 128, false>, launch_key_gradient<Fp16, 64, false>,
    launch_key_gradient<Fp16, 128, false>};
constexpr Instantiations<void (*)(const KeyGradParams&, cudaStream_t)> kColumnGradient{
    launch_key_gradient<Bf16, 64, true>, launch_key_gradient<Bf16, 128, true>, launch_key_gradient<Fp16, 64, true>,
    launch_key_gradient<Fp16, 128, true>};

constexpr int64_t kLargestGrid = 0x7fffffff;

// The work lists hold local block numbers, chunks and head groups in a few bits.
void check_limits(const Shape& shape, const char* what) {
    constexpr int64_t kBlocks = int64_t{1} << Item::kIndexBits, kGroups = int64_t{1} << Item::kGroupBits;
    check(shape.q_blocks <= kBlocks && shape.kv_blocks <= kBlocks && shape.columns <= kBlocks * kBlock, what,
          ": local length above ", kBlocks * kBlock, " tokens");
    check(shape.chunks <= kGroups && shape.heads / shape.kv_heads <= kGroups, what, ": more than ", kGroups,
          " chunks, or query heads in a group");
    const int64_t per_block = static_cast<int64_t>(shape.batch) * shape.heads;
    check(per_block * shape.q_blocks <= kLargestGrid, what, ": batch * heads * query blocks above ", kLargestGrid);
}

template <typename T>
ChunkView<T> as_chunk(const RowView<T>& x) {
    return {x.data, 0, x.batch_stride, x.row_stride, x.head_stride};
}

}  // namespace

void attention_forward(const AttentionForwardParams& p, cudaStream_t stream) {
    check_limits(p.shape, "attention_forward");
    if (p.shape.batch * p.shape.q_blocks == 0) return;
    kForward.select(p.shape, "attention_forward")(p, stream);
}

void attention_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
    check_limits(p.shape, "attention_backward");
    const auto query = kQueryGradient.select(p.shape, "attention_backward");
    if (p.shape.batch * p.shape.q_blocks > 0) {
        query({p.shape, p.mask, p.q, p.dout, p.k, p.v, {}, {}, p.lse, p.delta, p.dq, p.scale, p.accumulate_dq}, stream);
    }
    if (p.shape.batch * p.shape.chunks * p.shape.kv_blocks > 0) {
        kKeyGradient.select(p.shape, "attention_backward")(
            {p.shape, p.mask, p.q, p.dout, p.k, p.v, p.lse, p.delta, p.dk, p.dv, p.scale}, stream);
    }
}

void vertical_backward(const VerticalBackwardParams& p, cudaStream_t stream) {
    check_limits(p.shape, "vertical_backward");
    const auto query = kQueryGradient.select(p.shape, "vertical_backward");
    if (p.shape.batch * p.shape.q_blocks > 0) {
        query({p.shape,
               p.mask,
               p.q,
               p.dout,
               {},
               {},
               p.compact_k,
               p.compact_v,
               p.lse,
               p.delta,
               p.dq,
               p.scale,
               p.accumulate_dq},
              stream);
    }
    Shape columns = p.shape;  // one chunk of column tiles, with a key/value head for every query head
    columns.kv_heads = p.shape.heads;
    columns.chunks = 1;
    columns.kv_blocks = (p.shape.columns + kBlock - 1) / kBlock;
    if (columns.batch * columns.kv_blocks > 0) {
        kColumnGradient.select(columns, "vertical_backward")(
            {columns, p.mask, p.q, p.dout, as_chunk(p.compact_k), as_chunk(p.compact_v), p.lse, p.delta,
             as_chunk(p.d_compact_k), as_chunk(p.d_compact_v), p.scale},
            stream);
    }
}

}  // namespace mtraining::sm80
