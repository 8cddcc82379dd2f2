#include "sm90/forward/launch.cuh"

namespace mtraining::sm90 {
template void launch_forward<__nv_bfloat16, 128>(const AttentionForwardParams&, cudaStream_t);
}
