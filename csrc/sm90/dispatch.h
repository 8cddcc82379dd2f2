// From the run-time shape to an instantiation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "mtraining/check.h"
#include "mtraining/params.h"

namespace mtraining::sm90 {

// Calls launch(T{}, std::integral_constant<int, head_dim>{}) for the shape's types, or throws.
template <typename Launch>
void dispatch(const Shape& shape, Launch launch) {
    using D64 = std::integral_constant<int, 64>;
    using D128 = std::integral_constant<int, 128>;
    const bool bfloat16 = shape.dtype == DType::kBFloat16;
    check(shape.head_dim == 64 || shape.head_dim == 128, "head_dim ", shape.head_dim,
          " is not served by the sm_90 kernels; valid: 64, 128");
    check(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "heads ", shape.heads,
          " is not a multiple of kv_heads ", shape.kv_heads);
    if (shape.head_dim == 64) {
        bfloat16 ? launch(__nv_bfloat16{}, D64{}) : launch(__half{}, D64{});
    } else {
        bfloat16 ? launch(__nv_bfloat16{}, D128{}) : launch(__half{}, D128{});
    }
}

}  // namespace mtraining::sm90
