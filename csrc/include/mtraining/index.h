// Arguments and launch functions of the kernels around the attention: probes, selection, columns, delta. They are built
// for every architecture of the library. docs/design.md says what each operator computes; here are the operands.
#pragma once

#include <cuda_runtime_api.h>

#include "mtraining/params.h"

namespace mtraining {

struct ProbeParams {
    int32_t batch = 0, heads = 0, kv_heads = 0, head_dim = 0;
    int32_t tiles = 0;      // probe tiles of 64 rows
    int32_t kv_blocks = 0;  // local key blocks
    int32_t blocks = 0;     // n
    DType dtype = DType::kBFloat16;
    RowView<const void> probe_q;            // [batch, tiles * 64, heads, head_dim], see tile_stride
    int64_t tile_stride = 0;                // of probe_q
    RowView<const void> k;                  // [batch, kv_blocks * 64, kv_heads, head_dim]
    const int32_t* probe_blocks = nullptr;  // [tiles]
    const int32_t* probe_rows = nullptr;    // [tiles, 2]
    const int32_t* block_probes = nullptr;  // [blocks, 2]
    const int32_t* doc_start = nullptr;     // [blocks]
    const int32_t* kv_table = nullptr;      // [kv_blocks], global block of each local one
    float scale = 0;
    float* row_max = nullptr;        // [batch, heads, tiles, 64]: output of the first pass, input of the others
    int64_t* row_sum = nullptr;      // the same shape: output of the second pass, input of the third
    int64_t* column_mass = nullptr;  // [batch, heads, kv_blocks * 64]
    int64_t* slash_mass = nullptr;   // [batch, heads, blocks]
};

void probe_row_max(const ProbeParams& params, cudaStream_t stream);
void probe_row_sum(const ProbeParams& params, cudaStream_t stream);
void probe_mass(const ProbeParams& params, cudaStream_t stream);

struct SelectParams {
    int32_t rows = 0;  // batch * heads
    int32_t lines = 0;
    int32_t documents = 0;
    int32_t round = 0, digit_bits = 0, mass_rounds = 0, tie_rounds = 0;
    int64_t share_numerator = 0, share_denominator = 1;
    int64_t cap = -1;  // < 0: none
    bool all_lines = false;
    const int64_t* mass = nullptr;       // [rows, lines]
    const int32_t* segment = nullptr;    // [lines]
    const int32_t* tie = nullptr;        // [lines]
    const int64_t* previous = nullptr;   // histogram of the round before, summed over all ranks; null in the first
    const int64_t* old_state = nullptr;  // state of the round before; null in the first
    int64_t* state = nullptr;            // [rows, documents, 8]
    int64_t* histogram = nullptr;        // [rows, documents, 1 or (with a cap) 2, 2^digit_bits]
    int64_t* words = nullptr;            // [rows, ceil(lines / 64)]
};

// A round: narrows old_state by `previous` into `state`, and adds the lines to `histogram`, which holds zeros.
void select_round(const SelectParams& params, cudaStream_t stream);
// After the last round (`round` is their number): narrows old_state by `previous` into `state`, and packs the kept
// lines.
void select_pack(const SelectParams& params, cudaStream_t stream);
// All rounds and the packing, for lines that one process holds. `state` and `histogram` are scratch.
void select_lines(const SelectParams& params, cudaStream_t stream);

// The third probe pass and the selection of the columns, on one rank: `probe` without column_mass, `select` with words
// [batch * heads, kv_blocks] and without mass, state and histogram.
struct ProbeColumnsParams {
    ProbeParams probe;
    SelectParams select;
};

// How the device works it off: pairs of heads a launch, thread blocks a pair and key blocks a thread block (0: masses
// do not fit into shared memory and go through memory).
struct ProbeColumnsPlan {
    int32_t pairs = 0, members = 0, range = 0;
    int64_t workspace = 0;  // int64 entries
};

ProbeColumnsPlan plan_probe_columns(const ProbeColumnsParams& params);  // for the current device
void probe_columns(const ProbeColumnsParams& params, const ProbeColumnsPlan& plan, int64_t* workspace,
                   cudaStream_t stream);

struct ListParams {
    int32_t rows = 0;           // batch * heads
    int32_t blocks = 0;         // n: words of a row
    int32_t listed_blocks = 0;  // M
    int32_t capacity = 0, first = 0;
    const int64_t* column_words = nullptr;  // [rows, blocks]
    const int32_t* block_table = nullptr;   // [listed_blocks]
    int32_t* column_list = nullptr;         // [rows, capacity]
    int32_t* column_count = nullptr;        // [rows]
};

void list_columns(const ListParams& params, cudaStream_t stream);

struct ColumnCopyParams {
    Shape shape;                                    // columns, chunks, kv_blocks, heads, kv_heads, batch, head_dim
    const int32_t* kv_table = nullptr;              // [chunks, kv_blocks]
    const int32_t* column_list = nullptr;           // [batch, heads, columns]
    ChunkView<const void> k, v;                     // gather: from here ...
    RowView<void> compact_k, compact_v;             // ... to here
    RowView<const float> d_compact_k, d_compact_v;  // scatter: from here ...
    ChunkView<float> dk, dv;                        // ... added to here
};

void gather_columns(const ColumnCopyParams& params, cudaStream_t stream);
void scatter_columns(const ColumnCopyParams& params, cudaStream_t stream);

struct DeltaParams {
    int32_t batch = 0, heads = 0, rows = 0, head_dim = 0;
    DType dtype = DType::kBFloat16;
    RowView<const void> out, dout;  // [batch, rows, heads, head_dim]
    float* delta = nullptr;         // [batch, heads, rows]
};

void attention_delta(const DeltaParams& params, cudaStream_t stream);

}  // namespace mtraining
