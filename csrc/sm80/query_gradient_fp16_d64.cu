#include "sm80/query_gradient.cuh"

template void mtraining::sm80::launch_query_gradient<__half, 64>(const QueryGradParams&, cudaStream_t);
