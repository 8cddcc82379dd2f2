#include "index/probe.cuh"

template void mtraining::probe::launch<__half, 128, mtraining::probe::Pass::kMax>(const ProbeParams&, cudaStream_t);
template void mtraining::probe::launch<__half, 128, mtraining::probe::Pass::kSum>(const ProbeParams&, cudaStream_t);
template void mtraining::probe::launch<__half, 128, mtraining::probe::Pass::kMass>(const ProbeParams&, cudaStream_t);
