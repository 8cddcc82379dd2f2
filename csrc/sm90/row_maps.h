// TMA descriptors of the keys and values that a row walk meets.
#pragma once

#include "sm90/row_walk.cuh"
#include "sm90/tensor_map.h"

namespace mtraining::sm90 {

inline void map_keys(RowMaps& maps, const Shape& shape, const ChunkView<const void>& k,
                     const ChunkView<const void>& v) {
    if (shape.chunks == 0) return;
    const int64_t rows = int64_t{shape.kv_blocks} * kBlock;
    maps.k = chunk_map(k, shape, rows, shape.kv_heads, shape.chunks, "k");
    maps.v = chunk_map(v, shape, rows, shape.kv_heads, shape.chunks, "v");
}

inline void map_columns(RowMaps& maps, const Shape& shape, const RowView<const void>& k, const RowView<const void>& v) {
    if (shape.columns == 0) return;
    maps.compact_k = row_map(k, shape, shape.columns, "compact_k");
    maps.compact_v = row_map(v, shape, shape.columns, "compact_v");
}

}  // namespace mtraining::sm90
