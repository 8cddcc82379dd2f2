#include "sm80/key_gradient.cuh"

template void mtraining::sm80::launch_key_gradient<__half, 64, false>(const KeyGradParams&, cudaStream_t);
template void mtraining::sm80::launch_key_gradient<__half, 64, true>(const KeyGradParams&, cudaStream_t);
