#include "sm80/attention_forward.cuh"

template void mtraining::sm80::launch_attention_forward<__half, 128>(const AttentionForwardParams&, cudaStream_t);
