// Errors of the native library: std::runtime_error with one line, which torch turns into a RuntimeError.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace mtraining {

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
    std::ostringstream text;
    text << "megatron_mtraining: ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

template <typename... Parts>
inline void check(bool condition, const Parts&... parts) {
    if (!condition) fail(parts...);
}

// `what` names the kernel or call; a failed launch must never look like a result.
inline void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) fail(what, " failed: ", cudaGetErrorString(error));
}

}  // namespace mtraining
