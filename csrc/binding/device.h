// The current stream, and which kernels serve a device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mtraining::binding {

// The stream that torch works on now on this device.
cudaStream_t current_stream(int device);

// 80 or 90: what `requested` (0: the best) means on this device. Throws, naming what was built and what was found.
int architecture(const char* op, int64_t requested, int device);

// Throws if no kernel of the library runs on this device.
void check_device(const char* op, int device);

}  // namespace mtraining::binding
