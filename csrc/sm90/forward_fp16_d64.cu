#include "sm90/forward/launch.cuh"

namespace mtraining::sm90 {
template void launch_forward<__half, 64>(const AttentionForwardParams&, cudaStream_t);
}
