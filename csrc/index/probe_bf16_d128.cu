#include "index/probe_columns.cuh"

namespace mtraining::probe {

template void launch<__nv_bfloat16, 128, Pass::kMax>(const ProbeParams&, cudaStream_t);
template void launch<__nv_bfloat16, 128, Pass::kSum>(const ProbeParams&, cudaStream_t);
template void launch<__nv_bfloat16, 128, Pass::kMass>(const ProbeParams&, cudaStream_t);
template SelectRoom select_room<__nv_bfloat16, 128>(bool);
template void select_launch<__nv_bfloat16, 128>(const ProbeColumnsParams&, const ProbeColumnsPlan&, int, unsigned*,
                                                cudaStream_t);

}  // namespace mtraining::probe
