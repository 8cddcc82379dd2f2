// The probe passes as launch functions; index/probe.cuh defines them.
#pragma once

#include "mtraining/index.h"

namespace mtraining::probe {

enum class Pass { kMax, kSum, kMass };

template <typename T, int D, Pass kPass>
void launch(const ProbeParams& params, cudaStream_t stream);

}  // namespace mtraining::probe
