#include "sm80/attention_forward.cuh"

template void mtraining::sm80::launch_attention_forward<__nv_bfloat16, 64>(const AttentionForwardParams&, cudaStream_t);
