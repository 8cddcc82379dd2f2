// The selection operators: a round with its histogram, the kept lines as bits, and both for lines that one process
// holds.
#include <type_traits>

#include "index/search.cuh"
#include "mtraining/check.h"

namespace mtraining {
namespace {

using namespace selection;

constexpr int kThreads = 256;
constexpr int kRowThreads = 1024;  // of kernels whose thread blocks have many lines of a row
constexpr int kLinesPerBlock = kRowThreads * kLinesPerThread;

// The state of a row and document (number `entry`) after the round before, in `state` (shared memory). All threads of
// the thread block call it.
template <int kBlockThreads>
__device__ __forceinline__ void narrow_state(const SelectParams& p, int64_t entry, int64_t* state,
                                             NarrowScratch<kBlockThreads>& scratch) {
    const int field = static_cast<int>(threadIdx.x);
    if (field < kStateFields) state[field] = p.old_state != nullptr ? p.old_state[entry * kStateFields + field] : 0;
    __syncthreads();
    if (p.previous != nullptr) {
        narrow_prefixes<kBlockThreads>(p, p.round - 1, state, p.previous + entry * entries(p), scratch);
    }
}

// One thread block a row and document.
__global__ void __launch_bounds__(kThreads) narrow_kernel(const __grid_constant__ SelectParams p) {
    __shared__ NarrowScratch<kThreads> scratch;
    __shared__ int64_t state[kStateFields];
    narrow_state<kThreads>(p, blockIdx.x, state, scratch);
    if (threadIdx.x < kStateFields) p.state[int64_t{blockIdx.x} * kStateFields + threadIdx.x] = state[threadIdx.x];
}

// Adds the lines of a thread block (one of `row_blocks` of the row) to the row's histogram.
template <bool kShared>
__device__ __forceinline__ void add_row(const SelectParams& p, int64_t row, int row_blocks, const int64_t* states,
                                        SharedHistogram* shared) {
    HistogramPart<kShared, kRowThreads> part(p, shared, row);
    part.begin();
    const int64_t* masses = p.mass + row * p.lines;
    for (int base = blockIdx.x % row_blocks * kLinesPerBlock; base < p.lines; base += row_blocks * kLinesPerBlock) {
        part.add_lines(p.round, states, masses, base, p.lines);
    }
    part.finish();
}

// A round of one document: every thread block of a row narrows its state for itself.
__global__ void __launch_bounds__(kRowThreads) round_kernel(const __grid_constant__ SelectParams p, int row_blocks) {
    __shared__ SharedHistogram local;
    __shared__ NarrowScratch<kRowThreads> scratch;
    __shared__ int64_t state[kStateFields];
    const int64_t row = blockIdx.x / row_blocks;
    narrow_state<kRowThreads>(p, row, state, scratch);
    if (blockIdx.x % row_blocks == 0 && threadIdx.x < kStateFields) {
        p.state[row * kStateFields + threadIdx.x] = state[threadIdx.x];
    }
    add_row<true>(p, row, row_blocks, state, &local);
}

// A round whose states are narrowed already. kShared: one document.
template <bool kShared>
__global__ void __launch_bounds__(kRowThreads)
    histogram_kernel(const __grid_constant__ SelectParams p, int row_blocks) {
    __shared__ typename std::conditional<kShared, SharedHistogram, char>::type local;
    const int64_t row = blockIdx.x / row_blocks;
    SharedHistogram* shared = nullptr;
    if constexpr (kShared) shared = &local;
    add_row<kShared>(p, row, row_blocks, p.state + row * p.documents * kStateFields, shared);
}

// The lines of a thread block (one of `row_blocks` of the row) as bits. kNarrow: of one document, whose state is still
// to be narrowed.
template <bool kNarrow>
__global__ void __launch_bounds__(kRowThreads) pack_kernel(const __grid_constant__ SelectParams p, int row_blocks) {
    const int64_t row = blockIdx.x / row_blocks;
    const int64_t* states = p.state + row * p.documents * kStateFields;
    if constexpr (kNarrow) {
        __shared__ NarrowScratch<kRowThreads> scratch;
        __shared__ int64_t state[kStateFields];
        narrow_state<kRowThreads>(p, row, state, scratch);
        states = state;
    }
    const int first = static_cast<int>(blockIdx.x % row_blocks) * kLinesPerBlock;
    const int end = p.lines - first < kLinesPerBlock ? p.lines : first + kLinesPerBlock;
    pack_words<kRowThreads>(p, states, p.mass + row * p.lines, first, end, p.words + row * ((p.lines + 63) / 64));
}

// All rounds of one row and its packing, by one thread block, in shared memory. One document.
__global__ void __launch_bounds__(kRowThreads) row_kernel(const __grid_constant__ SelectParams p) {
    __shared__ SharedHistogram local;
    __shared__ NarrowScratch<kRowThreads> scratch;
    __shared__ int64_t state[kStateFields];
    const int64_t row = blockIdx.x;
    const int64_t* masses = p.mass + row * p.lines;
    if (threadIdx.x < kStateFields) state[threadIdx.x] = 0;  // a barrier comes before it is used
    for (int round = 0; round < rounds(p); ++round) {
        HistogramPart<true, kRowThreads> part(p, &local, row);
        part.begin();
        for (int base = 0; base < p.lines; base += kLinesPerBlock) part.add_lines(round, state, masses, base, p.lines);
        part.add_runs();
        narrow_prefixes<kRowThreads>(
            p, round, state, [](int digit) { return static_cast<int64_t>(local.mass(digit)); },
            [](int digit) { return static_cast<int64_t>(local.count[digit]); }, scratch);
        // No ties at the cap: the order of ties does not matter.
        if (p.cap >= 0 && round == p.mass_rounds - 1 && scratch.held <= p.cap) break;
    }
    __syncthreads();
    pack_words<kRowThreads>(p, state, masses, 0, p.lines, p.words + row * ((p.lines + 63) / 64));
}

// The same of a few documents, with state and histogram in memory (zero at first).
__global__ void __launch_bounds__(kRowThreads) documents_kernel(const __grid_constant__ SelectParams p) {
    __shared__ NarrowScratch<kRowThreads> scratch;
    __shared__ unsigned ties;
    if (threadIdx.x == 0) ties = 0;  // a barrier comes before it is used
    const int64_t row = blockIdx.x;
    const int64_t* masses = p.mass + row * p.lines;
    Group group{nullptr, &ties, 1, 0};
    search<false, kRowThreads, false>(p, group, nullptr, scratch, row, 1, 0, p.lines, [&](int) { return masses; });
    pack_words<kRowThreads>(p, p.state + row * p.documents * kStateFields, masses, 0, p.lines,
                            p.words + row * ((p.lines + 63) / 64));
}

int64_t bins(const SelectParams& p) { return p.rows * (p.documents * entries(p)); }

void clear(int64_t* data, int64_t count, cudaStream_t stream) {
    if (count > 0) check_cuda(cudaMemsetAsync(data, 0, count * sizeof(int64_t), stream), "selection: clearing");
}

int row_blocks_of(const SelectParams& p) { return (p.lines + kLinesPerBlock - 1) / kLinesPerBlock; }

using RowKernel = void (*)(SelectParams, int);

void launch_rows(RowKernel kernel, const SelectParams& p, int row_blocks, const char* name, cudaStream_t stream) {
    kernel<<<static_cast<unsigned>(p.rows) * row_blocks, kRowThreads, 0, stream>>>(p, row_blocks);
    check_cuda(cudaGetLastError(), name);
}

void narrow(const SelectParams& p, cudaStream_t stream) {
    narrow_kernel<<<static_cast<unsigned>(p.rows) * p.documents, kThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "selection: narrowing");
}

// Few enough thread blocks that each adds many lines to its own histogram before it adds that to the result.
int histogram_blocks(const SelectParams& p) {
    constexpr int kMost = 8;
    return row_blocks_of(p) < kMost ? row_blocks_of(p) : kMost;
}

// Long rows and many documents want more thread blocks than rows.
void select_long_lines(SelectParams p, cudaStream_t stream) {
    const auto histogram = p.documents == 1 ? histogram_kernel<true> : histogram_kernel<false>;
    const int count = rounds(p);
    for (int number = 0; number < count; ++number) {
        clear(p.histogram, bins(p), stream);
        p.round = number;
        launch_rows(histogram, p, histogram_blocks(p), "select_lines", stream);
        p.round = number + 1;  // narrowing is by the round before it
        p.previous = p.histogram;
        p.old_state = p.state;
        narrow(p, stream);
    }
    launch_rows(pack_kernel<false>, p, row_blocks_of(p), "select_lines", stream);
}

}  // namespace

void select_round(const SelectParams& p, cudaStream_t stream) {
    if (p.rows * p.documents == 0) return;
    if (p.lines == 0) return narrow(p, stream);
    if (p.documents == 1) return launch_rows(round_kernel, p, histogram_blocks(p), "select_round", stream);
    narrow(p, stream);
    launch_rows(histogram_kernel<false>, p, histogram_blocks(p), "select_round", stream);
}

void select_pack(const SelectParams& p, cudaStream_t stream) {
    if (p.rows * p.documents == 0 || p.lines == 0) return;
    if (p.documents == 1) return launch_rows(pack_kernel<true>, p, row_blocks_of(p), "select_pack", stream);
    narrow(p, stream);
    launch_rows(pack_kernel<false>, p, row_blocks_of(p), "select_pack", stream);
}

void select_lines(const SelectParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.lines == 0) return;
    constexpr int kShortRow = 2 * kLinesPerBlock, kFewDocuments = 4;
    const bool is_short = p.lines <= kShortRow && p.documents <= kFewDocuments;
    const auto grid = static_cast<unsigned>(p.rows);
    if (is_short && p.documents == 1) {
        row_kernel<<<grid, kRowThreads, 0, stream>>>(p);
        return check_cuda(cudaGetLastError(), "select_lines");
    }
    clear(p.state, static_cast<int64_t>(p.rows) * p.documents * kStateFields, stream);
    if (!is_short) return select_long_lines(p, stream);
    clear(p.histogram, bins(p), stream);
    documents_kernel<<<grid, kRowThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "select_lines");
}

}  // namespace mtraining
