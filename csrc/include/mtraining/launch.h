// The attention kernels of each architecture. Every function enqueues on the stream, allocates nothing, never
// synchronises, and throws std::runtime_error with one line for a shape it does not serve or a failed launch.
#pragma once

#include <cuda_runtime_api.h>

#include "mtraining/params.h"

namespace mtraining {

// mma.sync and cp.async: compute capability 8.0 and newer.
namespace sm80 {
void attention_forward(const AttentionForwardParams& params, cudaStream_t stream);
void attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);
void vertical_backward(const VerticalBackwardParams& params, cudaStream_t stream);
}  // namespace sm80

// TMA and wgmma: compute capability 9.x.
namespace sm90 {
void attention_forward(const AttentionForwardParams& params, cudaStream_t stream);
void attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);
void vertical_backward(const VerticalBackwardParams& params, cudaStream_t stream);
}  // namespace sm90

}  // namespace mtraining
