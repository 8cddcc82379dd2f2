// delta = rowsum(dout * out), fp32: one warp a row.
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
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaParams p) {
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (index >= static_cast<int64_t>(p.batch) * p.heads * p.rows) return;
    // Heads of a row lie next to each other in memory, so they are next to each other here.
    const int head = index % p.heads;
    const int64_t row = index / p.heads % p.rows;
    const int batch = index / p.heads / p.rows;
    const auto at = [&](const RowView<const void>& x) {
        const int64_t offset = batch * x.batch_stride + row * x.row_stride + head * x.head_stride;
        return reinterpret_cast<const Pair*>(static_cast<const uint16_t*>(x.data) + offset);
    };
    const Pair* out = at(p.out);
    const Pair* dout = at(p.dout);
    float sum = 0;
    for (int i = threadIdx.x % 32; i < p.head_dim / 2; i += 32) {
        const float2 a = to_float2(out[i]), b = to_float2(dout[i]);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) p.delta[(static_cast<int64_t>(batch) * p.heads + head) * p.rows + row] = sum;
}

}  // namespace

void attention_delta(const DeltaParams& p, cudaStream_t stream) {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.heads * p.rows;
    if (rows == 0) return;
    const int64_t grid = (rows * 32 + kThreads - 1) / kThreads;
    check(grid <= 0x7fffffff, "attention_delta: batch * heads * rows = ", rows, " is too large");
    if (p.dtype == DType::kBFloat16) {
        delta_kernel<__nv_bfloat162><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p);
    } else {
        delta_kernel<__half2><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p);
    }
    check_cuda(cudaGetLastError(), "attention_delta");
}

}  // namespace mtraining
