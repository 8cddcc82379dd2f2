// Launches of one instantiation of the backward kernels.
#pragma once

#include "sm90/backward/dkdv_kernel.cuh"
#include "sm90/backward/dq_kernel.cuh"
#include "sm90/row_maps.h"

namespace mtraining::sm90 {

template <typename T, int kHeadDim>
void launch_dq(const DqParams& params, const RowMaps& maps, cudaStream_t stream) {
    using Plan = RowPlan<kHeadDim, 2, 1>;
    launch_persistent(dq_kernel<T, Plan>, RowTile::count<Plan::kRowBlocks>(params.shape), Plan::kThreads,
                      sizeof(RowShared<Plan>), stream, "sm90 dq kernel", params, maps);
}

template <typename T, int kHeadDim>
void launch_dkdv(const KeyParams& params, const KeyMaps& maps, cudaStream_t stream) {
    using Plan = KeyPlan<kHeadDim, 1>;
    launch_persistent(dkdv_kernel<T, Plan>, KeyTile<Plan>::count(params.shape), Plan::kThreads, sizeof(KeyShared<Plan>),
                      stream, "sm90 dk dv kernel", params, maps);
}

template <typename T, int kHeadDim, int kCluster>
void launch_clustered_dkdv(const KeyParams& params, const KeyMaps& maps, cudaStream_t stream) {
    using Plan = KeyPlan<kHeadDim, kCluster>;
    launch_clusters<kCluster>(dkdv_kernel<T, Plan>, KeyTile<Plan>::count(params.shape), Plan::kThreads,
                              sizeof(KeyShared<Plan>), stream, "sm90 vertical dk dv kernel", params, maps);
}

// Items of columns, the heaviest with all rows, over the multiprocessors: three a pair of these even out; of fewer the
// rows are cut finer, although clusters of four leave some multiprocessors without work.
template <typename T, int kHeadDim>
void launch_vertical_dkdv(const KeyParams& params, const KeyMaps& maps, cudaStream_t stream) {
    if (2 * KeyTile<KeyPlan<kHeadDim, 2>>::count(params.shape) >= 3 * multiprocessors()) {
        launch_clustered_dkdv<T, kHeadDim, 2>(params, maps, stream);
    } else {
        launch_clustered_dkdv<T, kHeadDim, 4>(params, maps, stream);
    }
}

template <typename T, int kHeadDim>
void launch_backward(const AttentionBackwardParams& params, cudaStream_t stream) {
    const Shape& shape = params.shape;
    RowMaps rows{};
    rows.rows[0] = row_map(params.q, shape, int64_t{shape.q_blocks} * kBlock, "q");
    rows.rows[1] = row_map(params.dout, shape, int64_t{shape.q_blocks} * kBlock, "dout");
    map_keys(rows, shape, params.k, params.v);
    launch_dq<T, kHeadDim>(
        {shape, params.mask, params.lse, params.delta, params.dq, params.scale, params.accumulate_dq}, rows, stream);
    const int key_rows = shape.kv_blocks * kBlock;
    launch_dkdv<T, kHeadDim>(
        {shape, params.mask, params.lse, params.delta, params.dk, params.dv, key_rows, params.scale},
        {rows.k, rows.v, rows.rows[0], rows.rows[1]}, stream);
}

template <typename T, int kHeadDim>
void launch_vertical_backward(const VerticalBackwardParams& params, cudaStream_t stream) {
    const Shape& shape = params.shape;
    RowMaps rows{};
    rows.rows[0] = row_map(params.q, shape, int64_t{shape.q_blocks} * kBlock, "q");
    rows.rows[1] = row_map(params.dout, shape, int64_t{shape.q_blocks} * kBlock, "dout");
    map_columns(rows, shape, params.compact_k, params.compact_v);
    launch_dq<T, kHeadDim>(
        {shape, params.mask, params.lse, params.delta, params.dq, params.scale, params.accumulate_dq}, rows, stream);
    Shape keys = shape;  // the compact columns as one chunk of one key head a query head
    keys.kv_heads = shape.heads;
    keys.chunks = 1;
    keys.kv_blocks = (shape.columns + kBlock - 1) / kBlock;
    const auto as_chunk = [](const RowView<float>& view) {
        return ChunkView<float>{view.data, 0, view.batch_stride, view.row_stride, view.head_stride};
    };
    launch_vertical_dkdv<T, kHeadDim>({keys, params.mask, params.lse, params.delta, as_chunk(params.d_compact_k),
                                       as_chunk(params.d_compact_v), shape.columns, params.scale},
                                      {rows.compact_k, rows.compact_v, rows.rows[0], rows.rows[1]}, stream);
}

}  // namespace mtraining::sm90
