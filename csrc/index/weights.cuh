// Weights of scores and their exact sums: every weight is rounded to a multiple of 2^-32, so sums have no order.
#pragma once

#include <cstdint>

#include "device/mma.cuh"

namespace mtraining::probe {

constexpr float kUnit = 4294967296.0f;  // 2^32

// exp(s - maximum) * 2^32, not yet rounded; 0 for NaN and for rows without a maximum.
__device__ __forceinline__ float raw_weight(float s, float maximum) {
    return fmaxf(device::exp2_fast(__fmul_rn(__fsub_rn(s, maximum), device::kLog2e)) * kUnit, 0.0f);
}

// Sums rint(raw weight) exactly in two floats: multiples of 4096, and what is left of each, rounded. The remainder
// alone has a fraction, so rounding it rounds the weight. The conversion to a double would cost the special-function
// pipe, which the exponentials fill, one more operation each.
struct WeightSum {
    float high = 0, low = 0;  // of at most 16 weights: below 2^24 and 2^16 in their units

    __device__ __forceinline__ void add(float weight) {
        constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
        const float multiple = __fsub_rn(__fmaf_rn(weight, 1.0f / 4096, kInteger), kInteger);
        const float rest = __fmaf_rn(multiple, -4096.0f, weight);
        high += multiple;
        low += __fsub_rn(__fadd_rn(rest, kInteger), kInteger);
    }
    __device__ __forceinline__ double total() const {
        return fma(static_cast<double>(high), 4096.0, static_cast<double>(low));
    }
};

// rint(raw weight) as a double. Integers of floats are spread to the format of doubles by shifts, for the same reason;
// zero becomes 2^-127, which every product below rounds to zero again.
__device__ __forceinline__ double weight_as_double(float weight) {
    constexpr float kInteger = 8388608.0f;  // 2^23: floats from here on are integers
    const float rounded = __fsub_rn(__fadd_rn(weight, kInteger), kInteger);
    const uint32_t bits = __float_as_uint(weight >= kInteger ? weight : rounded);
    return __hiloint2double(static_cast<int>((bits >> 3) + 0x38000000u), static_cast<int>(bits << 29));
}

__device__ __forceinline__ void atomic_max(float* address, float value) {
    // Orders of IEEE numbers as integers; the bits of -0 would order wrongly.
    if (value == 0.0f) value = 0.0f;
    if (value >= 0) {
        atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
    } else if (value < 0) {
        atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
    }
}

}  // namespace mtraining::probe
