// Entry points of the three probe passes: clear the results, pick the instantiation.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "index/probe.h"
#include "mtraining/dispatch.h"

namespace mtraining {
namespace probe {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) fill_kernel(float* data, int64_t count, float value) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count) data[i] = value;
}

template <Pass kPass>
void run(const ProbeParams& p, const char* what, cudaStream_t stream) {
    constexpr Instantiations<void (*)(const ProbeParams&, cudaStream_t)> kTable{
        launch<__nv_bfloat16, 64, kPass>, launch<__nv_bfloat16, 128, kPass>, launch<__half, 64, kPass>,
        launch<__half, 128, kPass>};
    Shape shape;
    shape.head_dim = p.head_dim;
    shape.dtype = p.dtype;
    const auto pass = kTable.select(shape, what);
    if (p.batch > 0 && p.tiles > 0 && p.kv_blocks > 0) pass(p, stream);
}

int64_t probe_rows(const ProbeParams& p) { return static_cast<int64_t>(p.batch) * p.heads * p.tiles * kBlock; }

}  // namespace
}  // namespace probe

void probe_row_max(const ProbeParams& p, cudaStream_t stream) {
    const int64_t count = probe::probe_rows(p);
    if (count == 0) return;
    const int64_t grid = (count + probe::kThreads - 1) / probe::kThreads;
    probe::fill_kernel<<<static_cast<unsigned>(grid), probe::kThreads, 0, stream>>>(p.row_max, count, -INFINITY);
    check_cuda(cudaGetLastError(), "probe_row_max: clearing");
    probe::run<probe::Pass::kMax>(p, "probe_row_max", stream);
}

void probe_row_sum(const ProbeParams& p, cudaStream_t stream) {
    const int64_t count = probe::probe_rows(p);
    if (count == 0) return;
    check_cuda(cudaMemsetAsync(p.row_sum, 0, count * sizeof(int64_t), stream), "probe_row_sum: clearing");
    probe::run<probe::Pass::kSum>(p, "probe_row_sum", stream);
}

void probe_mass(const ProbeParams& p, cudaStream_t stream) {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.heads;
    const int64_t columns = rows * p.kv_blocks * kBlock, lines = rows * p.blocks;
    if (columns > 0 && p.tiles != 1) {  // else each is written once
        check_cuda(cudaMemsetAsync(p.column_mass, 0, columns * sizeof(int64_t), stream), "probe_mass: clearing");
    }
    if (lines > 0) {
        check_cuda(cudaMemsetAsync(p.slash_mass, 0, lines * sizeof(int64_t), stream), "probe_mass: clearing");
    }
    probe::run<probe::Pass::kMass>(p, "probe_mass", stream);
}

}  // namespace mtraining
