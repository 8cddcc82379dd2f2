// Launch of one instantiation of the forward kernel.
#pragma once

#include "sm90/forward/kernel.cuh"
#include "sm90/row_maps.h"

namespace mtraining::sm90 {

template <typename T, int kHeadDim>
void launch_forward(const AttentionForwardParams& params, cudaStream_t stream) {
    using Plan = RowPlan<kHeadDim, 1, 2>;
    RowMaps maps{};
    maps.rows[0] = row_map(params.q, params.shape, int64_t{params.shape.q_blocks} * kBlock, "q");
    map_keys(maps, params.shape, params.k, params.v);
    map_columns(maps, params.shape, params.compact_k, params.compact_v);
    launch_persistent(forward_kernel<T, Plan>, RowTile::count<Plan::kRowBlocks>(params.shape), Plan::kThreads,
                      sizeof(RowShared<Plan>), stream, "sm90 forward kernel", params, maps);
}

}  // namespace mtraining::sm90
