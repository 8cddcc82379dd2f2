// One instantiation of a kernel for each (dtype, head_dim); each is compiled in a file of its own.
#pragma once

#include "mtraining/check.h"
#include "mtraining/params.h"

namespace mtraining {

// A table of the four instantiations of a launch function.
template <typename Launch>
struct Instantiations {
    Launch bf16_d64, bf16_d128, fp16_d64, fp16_d128;

    Launch select(const Shape& shape, const char* what) const {
        const bool bf16 = shape.dtype == DType::kBFloat16;
        if (shape.head_dim == 64) return bf16 ? bf16_d64 : fp16_d64;
        if (shape.head_dim == 128) return bf16 ? bf16_d128 : fp16_d128;
        fail(what, ": head_dim ", shape.head_dim, " is not built; the CUDA kernels serve 64 and 128");
    }
};

}  // namespace mtraining
