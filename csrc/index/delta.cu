// delta = rowsum(dout * out), fp32. A lane takes 16 bytes of a row, so 8 or 16 lanes share one.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mtraining/check.h"
#include "mtraining/index.h"

namespace mtraining {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }

template <typename Pair>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    const Pair* x = reinterpret_cast<const Pair*>(&a);
    const Pair* y = reinterpret_cast<const Pair*>(&b);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 u = to_float2(x[i]), v = to_float2(y[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

template <typename Pair, int kLanes>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaParams p) {
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int lane = threadIdx.x % kLanes;
    const bool inside = index < static_cast<int64_t>(p.batch) * p.heads * p.rows;
    // Heads of a row lie next to each other in memory, so they are next to each other here.
    const int head = index % p.heads;
    const int64_t row = index / p.heads % p.rows;
    const int batch = index / p.heads / p.rows;
    const auto load = [&](const RowView<const void>& x) {
        const int64_t offset = batch * x.batch_stride + row * x.row_stride + head * x.head_stride;
        return __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.data) + offset) + lane);
    };
    float sum = inside ? dot<Pair>(load(p.out), load(p.dout)) : 0.0f;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (inside && lane == 0) p.delta[(static_cast<int64_t>(batch) * p.heads + head) * p.rows + row] = sum;
}

template <typename Pair>
void launch(const DeltaParams& p, cudaStream_t stream) {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.heads * p.rows;
    const int lanes = p.head_dim / 8;
    const int64_t grid = (rows * lanes + kThreads - 1) / kThreads;
    check(grid <= 0x7fffffff, "attention_delta: batch * heads * rows = ", rows, " is too large");
    const auto kernel = lanes == 8 ? delta_kernel<Pair, 8> : delta_kernel<Pair, 16>;
    kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "attention_delta");
}

}  // namespace

void attention_delta(const DeltaParams& p, cudaStream_t stream) {
    check(p.head_dim == 64 || p.head_dim == 128, "attention_delta: head_dim ", p.head_dim,
          " is not built; the CUDA kernels serve 64 and 128");
    if (static_cast<int64_t>(p.batch) * p.heads * p.rows == 0) return;
    if (p.dtype == DType::kBFloat16) {
        launch<__nv_bfloat162>(p, stream);
    } else {
        launch<__half2>(p, stream);
    }
}

}  // namespace mtraining
