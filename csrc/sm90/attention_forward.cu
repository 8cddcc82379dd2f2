#include "mtraining/launch.h"
#include "sm90/dispatch.h"

namespace mtraining::sm90 {

// Instantiated in forward_<type>_d<head_dim>.cu.
template <typename T, int kHeadDim>
void launch_forward(const AttentionForwardParams& params, cudaStream_t stream);

void attention_forward(const AttentionForwardParams& params, cudaStream_t stream) {
    dispatch(params.shape, [&](auto element, auto head_dim) {
        launch_forward<decltype(element), decltype(head_dim)::value>(params, stream);
    });
}

}  // namespace mtraining::sm90
