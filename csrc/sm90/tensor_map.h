// TMA descriptors of the operands, made on the host without linking the CUDA driver library.
#pragma once

#include <cuda.h>

#include "mtraining/params.h"

namespace mtraining::sm90 {

// A tensor (chunk, batch, row, head, head_dim) read in boxes of 64 rows x 64 elements of head_dim, with 128-byte
// swizzle; rows beyond `rows` read as zero. Throws if TMA cannot address it; `name` is the operand in the message.
CUtensorMap chunk_map(const ChunkView<const void>& view, const Shape& shape, int64_t rows, int heads, int chunks,
                      const char* name);

inline CUtensorMap row_map(const RowView<const void>& view, const Shape& shape, int64_t rows, const char* name) {
    return chunk_map({view.data, 0, view.batch_stride, view.row_stride, view.head_stride}, shape, rows, shape.heads, 1,
                     name);
}

}  // namespace mtraining::sm90
