// Launch of one instantiation of the forward kernel.
#pragma once

#include "sm90/forward/kernel.cuh"
#include "sm90/row_maps.h"

namespace mtraining::sm90 {

// The epilogue stores 16 bytes of `final` and 8 of `partial` at a time.
template <typename T>
void check_output(const RowView<T>& view, int64_t elements, const char* name) {
    const auto aligned = [&](int64_t stride) { return stride % elements == 0; };
    check(reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && aligned(view.batch_stride) && aligned(view.row_stride) &&
              aligned(view.head_stride),
          name, " must start at a multiple of 16 bytes and have strides that are multiples of ", elements, " elements");
}

template <typename T, int kHeadDim>
void launch_forward(const AttentionForwardParams& params, cudaStream_t stream) {
    using Plan = RowPlan<kHeadDim, 1, 1>;
    check(params.scale > 0, "scale ", params.scale, " is not positive");
    check_output(params.final, 8, "final");
    check_output(params.partial, 2, "partial");
    RowMaps maps{};
    maps.rows[0] = row_map(params.q, params.shape, int64_t{params.shape.q_blocks} * kBlock, "q");
    map_keys(maps, params.shape, params.k, params.v);
    map_columns(maps, params.shape, params.compact_k, params.compact_v);
    launch_persistent(forward_kernel<T, Plan>, RowTile::count<Plan::kRowBlocks>(params.shape), Plan::kThreads,
                      sizeof(RowShared<Plan>), stream, "sm90 forward kernel", params, maps);
}

}  // namespace mtraining::sm90
