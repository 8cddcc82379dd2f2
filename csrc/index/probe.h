// The probe passes as launch functions; index/probe.cuh defines them.
#pragma once

#include "mtraining/index.h"

namespace mtraining::probe {

enum class Pass { kMax, kSum, kMass, kSelect };  // kSelect: masses into shared memory, and what is kept of them

template <typename T, int D, Pass kPass>
void launch(const ProbeParams& params, cudaStream_t stream);

// What the device offers to a kernel of Pass::kSelect: thread blocks resident at once, key blocks that one has room
// for.
struct SelectRoom {
    int thread_blocks = 0, range = 0;
};

template <typename T, int D>
SelectRoom select_room(bool one_document);

template <typename T, int D>
void select_launch(const ProbeColumnsParams& params, const ProbeColumnsPlan& plan, int first_pair, unsigned* flags,
                   cudaStream_t stream);

}  // namespace mtraining::probe
