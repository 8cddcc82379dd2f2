#include "mtraining/launch.h"
#include "sm90/dispatch.h"

namespace mtraining::sm90 {

// Instantiated in backward_<type>_d<head_dim>.cu.
template <typename T, int kHeadDim>
void launch_backward(const AttentionBackwardParams& params, cudaStream_t stream);
template <typename T, int kHeadDim>
void launch_vertical_backward(const VerticalBackwardParams& params, cudaStream_t stream);

void attention_backward(const AttentionBackwardParams& params, cudaStream_t stream) {
    dispatch(params.shape, [&](auto element, auto head_dim) {
        launch_backward<decltype(element), decltype(head_dim)::value>(params, stream);
    });
}

void vertical_backward(const VerticalBackwardParams& params, cudaStream_t stream) {
    dispatch(params.shape, [&](auto element, auto head_dim) {
        launch_vertical_backward<decltype(element), decltype(head_dim)::value>(params, stream);
    });
}

}  // namespace mtraining::sm90
