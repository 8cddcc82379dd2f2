// The operators around the attention: probes, selection, columns.
#include "mtraining/index.h"

#include <tuple>

#include "device.h"
#include "operands.h"

namespace mtraining::binding {
namespace {

using torch::stable::new_empty;
using torch::stable::accelerator::DeviceGuard;

template <typename Params>
void enqueue(const Arguments& a, void (*function)(const Params&, cudaStream_t), const Params& params) {
    const DeviceGuard guard(a.device());
    check_device(a.op(), a.device());
    function(params, current_stream(a.device()));
}

template <typename T>
T* data(const Tensor& x) {
    return static_cast<T*>(x.data_ptr());
}

ProbeParams probe_params(const Arguments& a, const Tensor& probe_q, const Tensor& k, const Tensor& probe_blocks,
                         const Tensor& probe_rows, const Tensor& block_probes, const Tensor& doc_start,
                         const Tensor& kv_blocks, double scale) {
    ProbeParams p;
    p.dtype = a.half(probe_q, "probe_q");
    const ScalarType half = scalar_type(p.dtype);
    a.tensor(probe_q, "probe_q", half, {kAny, kAny, kBlock, kAny, kAny});
    a.vectors(probe_q, "probe_q");
    a.row_stride(probe_q, "probe_q", probe_q.stride(2));
    p.batch = a.int32(probe_q.size(0), "batch");
    p.tiles = a.int32(probe_q.size(1), "tiles");
    p.heads = a.int32(probe_q.size(3), "heads");
    p.head_dim = a.int32(probe_q.size(4), "head_dim");
    check(p.head_dim == 64 || p.head_dim == 128, a.op(), ": head_dim ", p.head_dim,
          " is not built; the CUDA kernels serve 64 and 128");
    p.probe_q = {probe_q.data_ptr(), probe_q.stride(0), probe_q.stride(2), probe_q.stride(3)};
    p.tile_stride = probe_q.stride(1);
    p.k = rows<const void>(a, k, "k", half, {p.batch, kAny, kAny, p.head_dim});
    check(k.size(1) % kBlock == 0, a.op(), ": k has ", k.size(1), " rows, must be a multiple of ", kBlock);
    check(k.size(2) > 0 && p.heads % k.size(2) == 0, a.op(), ": ", p.heads, " query heads and ", k.size(2),
          " key heads: must be a multiple");
    p.kv_heads = a.int32(k.size(2), "kv_heads");
    p.kv_blocks = a.int32(k.size(1) / kBlock, "key blocks");
    p.blocks = a.int32(doc_start.numel(), "blocks");
    p.probe_blocks = a.contiguous<int32_t>(probe_blocks, "probe_blocks", ScalarType::Int, {p.tiles});
    p.probe_rows = a.contiguous<int32_t>(probe_rows, "probe_rows", ScalarType::Int, {p.tiles, 2});
    p.block_probes = a.contiguous<int32_t>(block_probes, "block_probes", ScalarType::Int, {p.blocks, 2});
    p.doc_start = a.contiguous<int32_t>(doc_start, "doc_start", ScalarType::Int, {p.blocks});
    p.kv_table = a.contiguous<int32_t>(kv_blocks, "kv_blocks", ScalarType::Int, {p.kv_blocks});
    p.scale = static_cast<float>(scale);
    return p;
}

Tensor row_max(Tensor probe_q, Tensor k, Tensor probe_blocks, Tensor probe_rows, Tensor block_probes, Tensor doc_start,
               Tensor kv_blocks, double scale) {
    const Arguments a("probe_row_max", probe_q);
    ProbeParams p = probe_params(a, probe_q, k, probe_blocks, probe_rows, block_probes, doc_start, kv_blocks, scale);
    Tensor result = new_empty(probe_q, {p.batch, p.heads, p.tiles, kBlock}, ScalarType::Float);
    p.row_max = data<float>(result);
    enqueue(a, probe_row_max, p);
    return result;
}

Tensor row_sum(Tensor probe_q, Tensor k, Tensor probe_blocks, Tensor probe_rows, Tensor block_probes, Tensor doc_start,
               Tensor kv_blocks, double scale, Tensor row_max) {
    const Arguments a("probe_row_sum", probe_q);
    ProbeParams p = probe_params(a, probe_q, k, probe_blocks, probe_rows, block_probes, doc_start, kv_blocks, scale);
    p.row_max = a.contiguous<float>(row_max, "row_max", ScalarType::Float, {p.batch, p.heads, p.tiles, kBlock});
    Tensor result = new_empty(probe_q, {p.batch, p.heads, p.tiles, kBlock}, ScalarType::Long);
    p.row_sum = data<int64_t>(result);
    enqueue(a, probe_row_sum, p);
    return result;
}

std::tuple<Tensor, Tensor> mass(Tensor probe_q, Tensor k, Tensor probe_blocks, Tensor probe_rows, Tensor block_probes,
                                Tensor doc_start, Tensor kv_blocks, double scale, Tensor row_max, Tensor row_sum) {
    const Arguments a("probe_mass", probe_q);
    ProbeParams p = probe_params(a, probe_q, k, probe_blocks, probe_rows, block_probes, doc_start, kv_blocks, scale);
    p.row_max = a.contiguous<float>(row_max, "row_max", ScalarType::Float, {p.batch, p.heads, p.tiles, kBlock});
    p.row_sum = a.contiguous<int64_t>(row_sum, "row_sum", ScalarType::Long, {p.batch, p.heads, p.tiles, kBlock});
    Tensor columns = new_empty(probe_q, {p.batch, p.heads, k.size(1)}, ScalarType::Long);
    Tensor lines = new_empty(probe_q, {p.batch, p.heads, p.blocks}, ScalarType::Long);
    p.column_mass = data<int64_t>(columns);
    p.slash_mass = data<int64_t>(lines);
    enqueue(a, probe_mass, p);
    return {columns, lines};
}

// The operands of the lines.
SelectParams select_params(const Arguments& a, const Tensor& mass, const Tensor& segment, const Tensor& tie) {
    SelectParams p;
    p.mass = a.contiguous<int64_t>(mass, "mass", ScalarType::Long, {kAny, kAny, kAny});
    p.rows = a.int32(mass.size(0) * mass.size(1), "batch * heads");
    p.lines = a.int32(mass.size(2), "lines");
    p.segment = a.contiguous<int32_t>(segment, "segment", ScalarType::Int, {mass.size(2)});
    p.tie = a.contiguous<int32_t>(tie, "tie", ScalarType::Int, {mass.size(2)});
    return p;
}

// The budget, see megatron_mtraining/budget.py.
void set_budget(const Arguments& a, SelectParams* p, int64_t digit_bits, int64_t mass_rounds, int64_t tie_rounds,
                int64_t p_num, int64_t p_den, int64_t cap, bool all_lines) {
    check(digit_bits >= 1 && digit_bits <= 11, a.op(), ": digit_bits=", digit_bits, " must be in 1 ... 11");
    const int64_t most = 63 / digit_bits;  // a round looks at the bits above its digit, too: by a shift of all digits
    check(mass_rounds > 0 && mass_rounds <= most, a.op(), ": mass_rounds=", mass_rounds, " must be in 1 ... ", most,
          " with digits of ", digit_bits, " bits");
    check(tie_rounds >= 0 && tie_rounds <= most, a.op(), ": tie_rounds=", tie_rounds, " must be in 0 ... ", most,
          " with digits of ", digit_bits, " bits");
    // Rounds over ties count lines, and a histogram without a cap has no room for counts.
    check(cap >= 0 || tie_rounds == 0, a.op(), ": tie_rounds=", tie_rounds, " without a cap, must be 0");
    check(p_num >= 0 && p_den > 0, a.op(), ": a share of ", p_num, " / ", p_den, " is none");
    p->digit_bits = static_cast<int32_t>(digit_bits);
    p->mass_rounds = static_cast<int32_t>(mass_rounds);
    p->tie_rounds = static_cast<int32_t>(tie_rounds);
    p->share_numerator = p_num;
    p->share_denominator = p_den;
    p->cap = cap;
    p->all_lines = all_lines;
}

// Sizes of a histogram: [batch, heads, documents, kinds, 2^digit_bits].
struct HistogramSizes {
    int64_t batch, heads, documents, kinds, digits;
};

HistogramSizes histogram_sizes(const Tensor& mass, int64_t documents, int64_t digit_bits, int64_t cap) {
    return {mass.size(0), mass.size(1), documents, cap >= 0 ? 2 : 1, int64_t{1} << digit_bits};
}

// The summed histogram of the round before `round`, and the state before that.
void set_previous(const Arguments& a, SelectParams* p, const HistogramSizes& h, const Tensor& previous,
                  const Tensor& state) {
    p->previous = a.contiguous<int64_t>(previous, "previous", ScalarType::Long,
                                        {h.batch, h.heads, h.documents, h.kinds, h.digits});
    p->old_state = a.contiguous<int64_t>(state, "state", ScalarType::Long, {h.batch, h.heads, h.documents, 8});
}

Tensor round(Tensor mass, Tensor segment, Tensor tie, std::optional<Tensor> previous, std::optional<Tensor> state,
             Tensor histogram, int64_t number, int64_t digit_bits, int64_t mass_rounds, int64_t tie_rounds,
             int64_t p_num, int64_t p_den, int64_t cap, bool all_lines) {
    const Arguments a("select_round_", mass);
    SelectParams p = select_params(a, mass, segment, tie);
    set_budget(a, &p, digit_bits, mass_rounds, tie_rounds, p_num, p_den, cap, all_lines);
    check(number >= 0 && number < mass_rounds + tie_rounds, a.op(), ": round=", number, " must be below ",
          mass_rounds + tie_rounds);
    check(previous.has_value() == (number > 0) && state.has_value() == (number > 0), a.op(),
          ": previous and state belong to every round but the first");
    check(histogram.dim() == 5, a.op(), ": histogram must have 5 dimensions");
    const HistogramSizes h = histogram_sizes(mass, histogram.size(2), digit_bits, cap);
    p.histogram = a.contiguous<int64_t>(histogram, "histogram", ScalarType::Long,
                                        {h.batch, h.heads, h.documents, h.kinds, h.digits});
    p.documents = a.int32(h.documents, "documents");
    p.round = static_cast<int32_t>(number);
    if (number > 0) set_previous(a, &p, h, *previous, *state);
    Tensor narrowed = new_empty(mass, {h.batch, h.heads, h.documents, 8});
    p.state = data<int64_t>(narrowed);
    enqueue(a, select_round, p);
    return narrowed;
}

Tensor lines(Tensor mass, Tensor segment, Tensor tie, int64_t documents, int64_t digit_bits, int64_t mass_rounds,
             int64_t tie_rounds, int64_t p_num, int64_t p_den, int64_t cap, bool all_lines) {
    const Arguments a("select_lines", mass);
    check(documents > 0, a.op(), ": documents=", documents, " must be positive");
    SelectParams p = select_params(a, mass, segment, tie);
    set_budget(a, &p, digit_bits, mass_rounds, tie_rounds, p_num, p_den, cap, all_lines);
    const HistogramSizes h = histogram_sizes(mass, documents, digit_bits, cap);
    const Tensor state = new_empty(mass, {h.batch, h.heads, h.documents, 8});
    const Tensor histogram = new_empty(mass, {h.batch, h.heads, h.documents, h.kinds, h.digits});
    const Tensor words = new_empty(mass, {h.batch, h.heads, (mass.size(2) + 63) / 64});
    p.documents = a.int32(documents, "documents");
    p.state = data<int64_t>(state);
    p.histogram = data<int64_t>(histogram);
    p.words = data<int64_t>(words);
    enqueue(a, select_lines, p);
    return words;
}

std::tuple<Tensor, Tensor> columns(Tensor probe_q, Tensor k, Tensor probe_blocks, Tensor probe_rows,
                                   Tensor block_probes, Tensor doc_start, Tensor kv_blocks, double scale,
                                   Tensor row_max, Tensor row_sum, Tensor segment, Tensor tie, int64_t documents,
                                   int64_t digit_bits, int64_t mass_rounds, int64_t tie_rounds, int64_t p_num,
                                   int64_t p_den, int64_t cap, bool all_lines) {
    const Arguments a("probe_columns", probe_q);
    check(documents > 0, a.op(), ": documents=", documents, " must be positive");
    ProbeColumnsParams all;
    ProbeParams& p = all.probe;
    SelectParams& s = all.select;
    p = probe_params(a, probe_q, k, probe_blocks, probe_rows, block_probes, doc_start, kv_blocks, scale);
    p.row_max = a.contiguous<float>(row_max, "row_max", ScalarType::Float, {p.batch, p.heads, p.tiles, kBlock});
    p.row_sum = a.contiguous<int64_t>(row_sum, "row_sum", ScalarType::Long, {p.batch, p.heads, p.tiles, kBlock});
    s.segment = a.contiguous<int32_t>(segment, "segment", ScalarType::Int, {k.size(1)});
    s.tie = a.contiguous<int32_t>(tie, "tie", ScalarType::Int, {k.size(1)});
    s.rows = a.int32(static_cast<int64_t>(p.batch) * p.heads, "batch * heads");
    s.lines = a.int32(k.size(1), "lines");
    s.documents = a.int32(documents, "documents");
    set_budget(a, &s, digit_bits, mass_rounds, tie_rounds, p_num, p_den, cap, all_lines);
    const DeviceGuard guard(a.device());
    check_device(a.op(), a.device());
    const ProbeColumnsPlan plan = plan_probe_columns(all);
    Tensor words = new_empty(probe_q, {p.batch, p.heads, p.kv_blocks}, ScalarType::Long);
    Tensor lines = new_empty(probe_q, {p.batch, p.heads, p.blocks}, ScalarType::Long);
    const Tensor workspace = new_empty(probe_q, {plan.workspace}, ScalarType::Long);
    s.words = data<int64_t>(words);
    p.slash_mass = data<int64_t>(lines);
    probe_columns(all, plan, data<int64_t>(workspace), current_stream(a.device()));
    return {words, lines};
}

Tensor pack(Tensor mass, Tensor segment, Tensor tie, Tensor previous, Tensor state, int64_t digit_bits,
            int64_t mass_rounds, int64_t tie_rounds, int64_t p_num, int64_t p_den, int64_t cap, bool all_lines) {
    const Arguments a("select_pack", mass);
    SelectParams p = select_params(a, mass, segment, tie);
    set_budget(a, &p, digit_bits, mass_rounds, tie_rounds, p_num, p_den, cap, all_lines);
    check(previous.dim() == 5, a.op(), ": previous must have 5 dimensions");
    const HistogramSizes h = histogram_sizes(mass, previous.size(2), digit_bits, cap);
    set_previous(a, &p, h, previous, state);
    p.documents = a.int32(h.documents, "documents");
    p.round = p.mass_rounds + p.tie_rounds;
    Tensor narrowed = new_empty(mass, {h.batch, h.heads, h.documents, 8});
    Tensor result = new_empty(mass, {h.batch, h.heads, (mass.size(2) + 63) / 64});
    p.state = data<int64_t>(narrowed);
    p.words = data<int64_t>(result);
    enqueue(a, select_pack, p);
    return result;
}

std::tuple<Tensor, Tensor> list(Tensor column_words, Tensor blocks, int64_t capacity, int64_t first) {
    const Arguments a("list_columns", column_words);
    ListParams p;
    p.column_words = a.contiguous<int64_t>(column_words, "column_words", ScalarType::Long, {kAny, kAny, kAny});
    p.block_table = a.contiguous<int32_t>(blocks, "blocks", ScalarType::Int, {kAny});
    p.rows = a.int32(column_words.size(0) * column_words.size(1), "batch * heads");
    p.blocks = a.int32(column_words.size(2), "blocks");
    p.listed_blocks = a.int32(blocks.numel(), "listed blocks");
    p.capacity = a.int32(capacity, "capacity");
    p.first = a.int32(first, "first");
    Tensor columns = new_empty(column_words, {column_words.size(0), column_words.size(1), capacity}, ScalarType::Int);
    Tensor count = new_empty(column_words, {column_words.size(0), column_words.size(1)}, ScalarType::Int);
    p.column_list = data<int32_t>(columns);
    p.column_count = data<int32_t>(count);
    enqueue(a, list_columns, p);
    return {columns, count};
}

// Shape and tables of a copy between chunks `k` and compact rows.
ColumnCopyParams copy_params(const Arguments& a, const Tensor& k, const Tensor& kv_blocks, const Tensor& column_list) {
    ColumnCopyParams p;
    check(k.dim() == 5 && k.size(2) % kBlock == 0, a.op(),
          ": k must be [chunks, batch, a multiple of 64, kv_heads, head_dim]");
    p.column_list = a.contiguous<int32_t>(column_list, "column_list", ScalarType::Int, {k.size(1), kAny, kAny});
    p.kv_table = a.contiguous<int32_t>(kv_blocks, "kv_blocks", ScalarType::Int, {k.size(0), k.size(2) / kBlock});
    p.shape.chunks = a.int32(k.size(0), "chunks");
    p.shape.batch = a.int32(k.size(1), "batch");
    p.shape.kv_blocks = a.int32(k.size(2) / kBlock, "key blocks");
    p.shape.kv_heads = a.int32(k.size(3), "kv_heads");
    p.shape.head_dim = a.int32(k.size(4), "head_dim");
    p.shape.heads = a.int32(column_list.size(1), "heads");
    p.shape.columns = a.int32(column_list.size(2), "columns");
    a.int32(k.size(0) * (k.size(2) / kBlock), "chunks * key blocks");
    check(p.shape.kv_heads > 0 && p.shape.heads % p.shape.kv_heads == 0, a.op(), ": ", p.shape.heads,
          " query heads and ", p.shape.kv_heads, " key heads: must be a multiple");
    check(p.shape.head_dim == 64 || p.shape.head_dim == 128, a.op(), ": head_dim ", p.shape.head_dim,
          " is not built; the CUDA kernels serve 64 and 128");
    return p;
}

void gather(Tensor k, Tensor v, Tensor kv_blocks, Tensor column_list, Tensor compact_k, Tensor compact_v) {
    const Arguments a("gather_columns_", k);
    const ScalarType half = scalar_type(a.half(k, "k"));
    ColumnCopyParams p = copy_params(a, k, kv_blocks, column_list);
    const int64_t batch = p.shape.batch, heads = p.shape.heads, columns = p.shape.columns, dim = p.shape.head_dim;
    p.k = chunks<const void>(a, k, "k", half, {kAny, kAny, kAny, kAny, kAny});
    p.v = chunks<const void>(a, v, "v", half, {k.size(0), batch, k.size(2), k.size(3), dim});
    p.compact_k = slots<void>(a, compact_k, "compact_k", half, {batch, heads, columns, dim});
    p.compact_v = slots<void>(a, compact_v, "compact_v", half, {batch, heads, columns, dim});
    enqueue(a, gather_columns, p);
}

void scatter(Tensor d_compact_k, Tensor d_compact_v, Tensor column_list, Tensor kv_blocks, Tensor dk, Tensor dv) {
    const Arguments a("scatter_columns_", d_compact_k);
    ColumnCopyParams p = copy_params(a, dk, kv_blocks, column_list);
    const int64_t batch = p.shape.batch, heads = p.shape.heads, columns = p.shape.columns, dim = p.shape.head_dim;
    const ScalarType fp32 = ScalarType::Float;
    p.d_compact_k = slots<const float>(a, d_compact_k, "d_compact_k", fp32, {batch, heads, columns, dim});
    p.d_compact_v = slots<const float>(a, d_compact_v, "d_compact_v", fp32, {batch, heads, columns, dim});
    p.dk = chunks<float>(a, dk, "dk", fp32, {kAny, kAny, kAny, kAny, kAny});
    p.dv = chunks<float>(a, dv, "dv", fp32, {dk.size(0), batch, dk.size(2), dk.size(3), dim});
    enqueue(a, scatter_columns, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_mtraining, CUDA, m) {
    m.impl("probe_row_max", TORCH_BOX(&row_max));
    m.impl("probe_row_sum", TORCH_BOX(&row_sum));
    m.impl("probe_mass", TORCH_BOX(&mass));
    m.impl("probe_columns", TORCH_BOX(&columns));
    m.impl("select_round_", TORCH_BOX(&round));
    m.impl("select_pack", TORCH_BOX(&pack));
    m.impl("select_lines", TORCH_BOX(&lines));
    m.impl("list_columns", TORCH_BOX(&list));
    m.impl("gather_columns_", TORCH_BOX(&gather));
    m.impl("scatter_columns_", TORCH_BOX(&scatter));
}

}  // namespace mtraining::binding
