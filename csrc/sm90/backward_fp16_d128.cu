#include "sm90/backward/launch.cuh"

namespace mtraining::sm90 {
template void launch_backward<__half, 128>(const AttentionBackwardParams&, cudaStream_t);
template void launch_vertical_backward<__half, 128>(const VerticalBackwardParams&, cudaStream_t);
}  // namespace mtraining::sm90
