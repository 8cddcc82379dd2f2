#include "sm80/query_gradient.cuh"

template void mtraining::sm80::launch_query_gradient<__nv_bfloat16, 128>(const QueryGradParams&, cudaStream_t);
