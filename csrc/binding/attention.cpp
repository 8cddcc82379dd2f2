// attention_forward_, attention_backward_, vertical_backward_, attention_delta.
#include "device.h"
#include "mtraining/index.h"
#include "mtraining/launch.h"
#include "operands.h"

namespace mtraining::binding {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Shape and mask without columns, from the operands that all operators share.
void set_queries(const Arguments& a, const Tensor& q, const Tensor& slash_words, const Tensor& doc_start,
                 const Tensor& q_blocks, Shape* shape, Mask* mask) {
    shape->dtype = a.half(q, "q");
    check(q.dim() == 4, a.op(), ": q must be [batch, rows, heads, head_dim]");
    check(q.size(1) % kBlock == 0, a.op(), ": q has ", q.size(1), " rows, must be a multiple of ", kBlock);
    shape->batch = a.int32(q.size(0), "batch");
    shape->heads = a.int32(q.size(2), "heads");
    shape->head_dim = a.int32(q.size(3), "head_dim");
    check(shape->head_dim == 64 || shape->head_dim == 128, a.op(), ": head_dim ", shape->head_dim,
          " is not built; the CUDA kernels serve 64 and 128");
    shape->q_blocks = a.int32(q.size(1) / kBlock, "query blocks");
    shape->blocks = a.int32(doc_start.numel(), "blocks");
    mask->doc_start = a.contiguous<int32_t>(doc_start, "doc_start", ScalarType::Int, {kAny});
    const int64_t words = (doc_start.numel() + 63) / 64;
    mask->row_lists = slash_words.dim() == 4;
    mask->slash_words = mask->row_lists ? a.contiguous<int64_t>(slash_words, "slash_words", ScalarType::Long,
                                                                {q.size(0), q.size(2), q.size(1) / kBlock, words})
                                        : a.contiguous<int64_t>(slash_words, "slash_words", ScalarType::Long,
                                                                {q.size(0), q.size(2), words});
    mask->q_blocks = a.contiguous<int32_t>(q_blocks, "q_blocks", ScalarType::Int, {q.size(1) / kBlock});
    shape->kv_heads = shape->heads;
}

void set_keys(const Arguments& a, const Tensor& k, const Tensor& kv_blocks, Shape* shape, Mask* mask) {
    check(k.dim() == 5, a.op(), ": k must be [chunks, batch, rows, kv_heads, head_dim]");
    check(k.size(2) % kBlock == 0, a.op(), ": k has ", k.size(2), " rows a chunk, must be a multiple of ", kBlock);
    check(k.size(3) > 0 && shape->heads % k.size(3) == 0, a.op(), ": ", shape->heads, " query heads and ", k.size(3),
          " key heads: must be a multiple");
    shape->chunks = a.int32(k.size(0), "chunks");
    shape->kv_blocks = a.int32(k.size(2) / kBlock, "key blocks");
    shape->kv_heads = a.int32(k.size(3), "kv_heads");
    a.int32(k.size(0) * (k.size(2) / kBlock), "chunks * key blocks");
    mask->kv_blocks = a.contiguous<int32_t>(kv_blocks, "kv_blocks", ScalarType::Int, {k.size(0), k.size(2) / kBlock});
}

void set_columns(const Arguments& a, const Tensor& column_list, Shape* shape, Mask* mask) {
    check(!mask->row_lists, a.op(), ": slash_words has 4 dimensions (row lists), which take no columns");
    mask->column_list =
        a.contiguous<int32_t>(column_list, "column_list", ScalarType::Int, {shape->batch, shape->heads, kAny});
    shape->columns = a.int32(column_list.size(2), "columns");
}

template <typename Params, typename Sm80, typename Sm90>
void launch(const Arguments& a, int64_t arch, const Params& params, const Sm80& sm80, const Sm90& sm90) {
    const DeviceGuard guard(a.device());
    const cudaStream_t stream = current_stream(a.device());
    // Row lists are served by the general kernels alone.
    check(!params.mask.row_lists || arch != 90, a.op(),
          ": slash_words has 4 dimensions (row lists), which arch=90 does not serve; use 0 or 80");
    const int64_t wanted = params.mask.row_lists && arch == 0 ? 80 : arch;
    if (architecture(a.op(), wanted, a.device()) == 90) {
        sm90(params, stream);
    } else {
        sm80(params, stream);
    }
}

// The launch functions of an architecture that was not built do not exist: architecture() never chooses it.
#ifdef MTRAINING_WITH_SM80
#define MTRAINING_SM80(function) [](const auto& p, cudaStream_t stream) { sm80::function(p, stream); }
#else
#define MTRAINING_SM80(function) [](const auto&, cudaStream_t) {}
#endif
#ifdef MTRAINING_WITH_SM90
#define MTRAINING_SM90(function) [](const auto& p, cudaStream_t stream) { sm90::function(p, stream); }
#else
#define MTRAINING_SM90(function) [](const auto&, cudaStream_t) {}
#endif

void forward(Tensor q, Tensor k, Tensor v, Tensor slash_words, Tensor doc_start, Tensor q_blocks, Tensor kv_blocks,
             std::optional<Tensor> compact_k, std::optional<Tensor> compact_v, std::optional<Tensor> column_list,
             double scale, bool accumulate, int64_t arch, std::optional<Tensor> partial, std::optional<Tensor> final,
             Tensor lse) {
    const Arguments a("attention_forward_", q);
    AttentionForwardParams p;
    set_queries(a, q, slash_words, doc_start, q_blocks, &p.shape, &p.mask);
    set_keys(a, k, kv_blocks, &p.shape, &p.mask);
    const ScalarType half = scalar_type(p.shape.dtype);
    const int64_t batch = q.size(0), length = q.size(1), heads = q.size(2), dim = q.size(3);
    p.q = rows<const void>(a, q, "q", half, {batch, length, heads, dim});
    p.k = chunks<const void>(a, k, "k", half, {kAny, batch, kAny, kAny, dim});
    p.v = chunks<const void>(a, v, "v", half, {k.size(0), batch, k.size(2), k.size(3), dim});
    check(compact_k.has_value() == column_list.has_value() && compact_v.has_value() == column_list.has_value(), a.op(),
          ": compact_k, compact_v and column_list go together");
    if (column_list) {
        set_columns(a, *column_list, &p.shape, &p.mask);
        p.compact_k = slots<const void>(a, *compact_k, "compact_k", half, {batch, heads, p.shape.columns, dim});
        p.compact_v = slots<const void>(a, *compact_v, "compact_v", half, {batch, heads, p.shape.columns, dim});
    }
    check(partial.has_value() || (final.has_value() && !accumulate), a.op(),
          ": partial is needed to accumulate, and where final is not given");
    if (partial) p.partial = rows<float>(a, *partial, "partial", ScalarType::Float, {batch, length, heads, dim});
    if (final) p.final = rows<void>(a, *final, "final", half, {batch, length, heads, dim});
    p.lse = a.contiguous<float>(lse, "lse", ScalarType::Float, {batch, heads, length});
    check(scale > 0, a.op(), ": scale=", scale, " must be positive");
    p.scale = static_cast<float>(scale);
    p.accumulate = accumulate;
    launch(a, arch, p, MTRAINING_SM80(attention_forward), MTRAINING_SM90(attention_forward));
}

void backward(Tensor q, Tensor k, Tensor v, Tensor dout, Tensor lse, Tensor delta, Tensor slash_words, Tensor doc_start,
              Tensor q_blocks, Tensor kv_blocks, double scale, bool accumulate_dq, bool deterministic, int64_t arch,
              Tensor dq, Tensor dk, Tensor dv) {
    const Arguments a("attention_backward_", q);
    AttentionBackwardParams p;
    set_queries(a, q, slash_words, doc_start, q_blocks, &p.shape, &p.mask);
    set_keys(a, k, kv_blocks, &p.shape, &p.mask);
    const ScalarType half = scalar_type(p.shape.dtype);
    const int64_t batch = q.size(0), length = q.size(1), heads = q.size(2), dim = q.size(3);
    p.q = rows<const void>(a, q, "q", half, {batch, length, heads, dim});
    p.dout = rows<const void>(a, dout, "dout", half, {batch, length, heads, dim});
    p.k = chunks<const void>(a, k, "k", half, {kAny, batch, kAny, kAny, dim});
    p.v = chunks<const void>(a, v, "v", half, {k.size(0), batch, k.size(2), k.size(3), dim});
    p.lse = a.contiguous<float>(lse, "lse", ScalarType::Float, {batch, heads, length});
    p.delta = a.contiguous<float>(delta, "delta", ScalarType::Float, {batch, heads, length});
    p.dq = rows<float>(a, dq, "dq", ScalarType::Float, {batch, length, heads, dim});
    p.dk = chunks<float>(a, dk, "dk", ScalarType::Float, {k.size(0), batch, k.size(2), k.size(3), dim});
    p.dv = chunks<float>(a, dv, "dv", ScalarType::Float, {k.size(0), batch, k.size(2), k.size(3), dim});
    check(scale > 0, a.op(), ": scale=", scale, " must be positive");
    p.scale = static_cast<float>(scale);
    p.accumulate_dq = accumulate_dq;
    p.deterministic = deterministic;
    launch(a, arch, p, MTRAINING_SM80(attention_backward), MTRAINING_SM90(attention_backward));
}

void vertical(Tensor q, Tensor dout, Tensor lse, Tensor delta, Tensor compact_k, Tensor compact_v, Tensor column_list,
              Tensor slash_words, Tensor doc_start, Tensor q_blocks, double scale, bool accumulate_dq,
              bool deterministic, int64_t arch, Tensor dq, Tensor d_compact_k, Tensor d_compact_v) {
    const Arguments a("vertical_backward_", q);
    VerticalBackwardParams p;
    set_queries(a, q, slash_words, doc_start, q_blocks, &p.shape, &p.mask);
    set_columns(a, column_list, &p.shape, &p.mask);
    const ScalarType half = scalar_type(p.shape.dtype);
    const int64_t batch = q.size(0), length = q.size(1), heads = q.size(2), dim = q.size(3);
    const int64_t columns = p.shape.columns;
    p.q = rows<const void>(a, q, "q", half, {batch, length, heads, dim});
    p.dout = rows<const void>(a, dout, "dout", half, {batch, length, heads, dim});
    p.compact_k = slots<const void>(a, compact_k, "compact_k", half, {batch, heads, columns, dim});
    p.compact_v = slots<const void>(a, compact_v, "compact_v", half, {batch, heads, columns, dim});
    p.lse = a.contiguous<float>(lse, "lse", ScalarType::Float, {batch, heads, length});
    p.delta = a.contiguous<float>(delta, "delta", ScalarType::Float, {batch, heads, length});
    p.dq = rows<float>(a, dq, "dq", ScalarType::Float, {batch, length, heads, dim});
    p.d_compact_k = slots<float>(a, d_compact_k, "d_compact_k", ScalarType::Float, {batch, heads, columns, dim});
    p.d_compact_v = slots<float>(a, d_compact_v, "d_compact_v", ScalarType::Float, {batch, heads, columns, dim});
    check(scale > 0, a.op(), ": scale=", scale, " must be positive");
    p.scale = static_cast<float>(scale);
    p.accumulate_dq = accumulate_dq;
    p.deterministic = deterministic;
    launch(a, arch, p, MTRAINING_SM80(vertical_backward), MTRAINING_SM90(vertical_backward));
}

Tensor delta(Tensor out, Tensor dout) {
    const Arguments a("attention_delta", out);
    DeltaParams p;
    p.dtype = a.half(out, "out");
    check(out.dim() == 4, a.op(), ": out must be [batch, rows, heads, head_dim]");
    const ScalarType half = scalar_type(p.dtype);
    p.out = rows<const void>(a, out, "out", half, {kAny, kAny, kAny, kAny});
    p.dout = rows<const void>(a, dout, "dout", half, {out.size(0), out.size(1), out.size(2), out.size(3)});
    p.batch = a.int32(out.size(0), "batch");
    p.rows = a.int32(out.size(1), "rows");
    p.heads = a.int32(out.size(2), "heads");
    p.head_dim = a.int32(out.size(3), "head_dim");
    Tensor result = torch::stable::new_empty(out, {out.size(0), out.size(2), out.size(1)}, ScalarType::Float);
    p.delta = static_cast<float*>(result.data_ptr());
    const DeviceGuard guard(a.device());
    check_device(a.op(), a.device());
    attention_delta(p, current_stream(a.device()));
    return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_mtraining, CUDA, m) {
    m.impl("attention_forward_", TORCH_BOX(&forward));
    m.impl("attention_backward_", TORCH_BOX(&backward));
    m.impl("vertical_backward_", TORCH_BOX(&vertical));
    m.impl("attention_delta", TORCH_BOX(&delta));
}

}  // namespace mtraining::binding
