#include "index/probe_columns.cuh"

namespace mtraining::probe {

template void launch<__half, 128, Pass::kMax>(const ProbeParams&, cudaStream_t);
template void launch<__half, 128, Pass::kSum>(const ProbeParams&, cudaStream_t);
template void launch<__half, 128, Pass::kMass>(const ProbeParams&, cudaStream_t);
template SelectRoom select_room<__half, 128>(bool);
template void select_launch<__half, 128>(const ProbeColumnsParams&, const ProbeColumnsPlan&, int, unsigned*,
                                         cudaStream_t);

}  // namespace mtraining::probe
