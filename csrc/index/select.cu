// The selection operators: a histogram of the next digit, the choice of the digit, the kept lines as bits.
#include "index/search.cuh"

#include <type_traits>

#include "mtraining/check.h"

namespace mtraining {
namespace {

using namespace selection;

constexpr int kThreads = 256;
constexpr int kHistogramThreads = 1024;
constexpr int kLinesPerBlock = kHistogramThreads * kLinesPerThread;

// kShared: one document, whose histogram is first built in shared memory.
template <bool kShared>
__global__ void __launch_bounds__(kHistogramThreads)
    histogram_kernel(const __grid_constant__ SelectParams p, int row_blocks) {
    __shared__ typename std::conditional<kShared, SharedHistogram, char>::type local;
    const int64_t row = blockIdx.x / row_blocks;
    SharedHistogram* shared = nullptr;
    if constexpr (kShared) shared = &local;
    HistogramPart<kShared, kHistogramThreads> part(p, shared, row);
    part.begin();
    const int64_t* states = p.state + row * p.documents * kStateFields;
    const int64_t* masses = p.mass + row * p.lines;
    for (int base = blockIdx.x % row_blocks * kLinesPerBlock; base < p.lines; base += row_blocks * kLinesPerBlock) {
        part.add_lines(p.round, states, masses, base, p.lines);
    }
    part.finish();
}

__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ SelectParams p) {
    __shared__ NarrowScratch<kThreads> scratch;
    const int64_t entry = blockIdx.x;
    narrow_prefixes<kThreads>(p, p.round, p.state + entry * kStateFields, p.histogram + (entry * 2 << p.digit_bits),
                              scratch);
}

// One warp a word.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ SelectParams p, int words) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    if (index >= static_cast<int64_t>(p.rows) * words) return;
    const int64_t row = index / words;
    const int first = static_cast<int>(index % words) * 64, lane = threadIdx.x % 32;
    const int64_t word =
        pack_word(p, p.state + row * p.documents * kStateFields, p.mass + row * p.lines, first, p.lines);
    if (lane == 0) p.words[index] = word;
}

// One thread block a row, all rounds.
template <bool kShared>
__global__ void __launch_bounds__(kHistogramThreads) rows_kernel(const __grid_constant__ SelectParams p) {
    __shared__ typename std::conditional<kShared, SharedHistogram, char>::type local;
    __shared__ NarrowScratch<kHistogramThreads> scratch;
    __shared__ unsigned ties;
    if (threadIdx.x == 0) ties = 0;  // a barrier comes before it is used
    const int64_t row = blockIdx.x;
    SharedHistogram* shared = nullptr;
    if constexpr (kShared) shared = &local;
    const int64_t* masses = p.mass + row * p.lines;
    Group group{nullptr, &ties, 1, 0};
    search<kShared, kHistogramThreads, false>(p, group, shared, scratch, row, 1, 0, p.lines,
                                              [&](int) { return masses; });
    pack_words<kHistogramThreads>(p, p.state + row * p.documents * kStateFields, masses, 0, p.lines,
                                  p.words + row * ((p.lines + 63) / 64));
}

int64_t bins(const SelectParams& p) { return static_cast<int64_t>(p.rows) * p.documents * 2 << p.digit_bits; }

// Adds to the histogram.
void add_histogram(const SelectParams& p, cudaStream_t stream) {
    if (bins(p) == 0 || p.lines == 0) return;
    // Few enough thread blocks that each adds many lines to its own histogram before it adds that to the result.
    constexpr int kMostRowBlocks = 8;
    const int needed = (p.lines + kLinesPerBlock - 1) / kLinesPerBlock;
    const int row_blocks = needed < kMostRowBlocks ? needed : kMostRowBlocks;
    const unsigned grid = static_cast<unsigned>(p.rows) * row_blocks;
    if (p.documents == 1) {
        histogram_kernel<true><<<grid, kHistogramThreads, 0, stream>>>(p, row_blocks);
    } else {
        histogram_kernel<false><<<grid, kHistogramThreads, 0, stream>>>(p, row_blocks);
    }
    check_cuda(cudaGetLastError(), "select_histogram");
}

void clear(int64_t* data, int64_t count, cudaStream_t stream) {
    if (count > 0) check_cuda(cudaMemsetAsync(data, 0, count * sizeof(int64_t), stream), "selection: clearing");
}

}  // namespace

void select_histogram(const SelectParams& p, cudaStream_t stream) {
    clear(p.histogram, bins(p), stream);
    add_histogram(p, stream);
}

void select_lines(const SelectParams& params, cudaStream_t stream) {
    SelectParams p = params;
    p.clear_histogram = true;
    clear(p.state, static_cast<int64_t>(p.rows) * p.documents * kStateFields, stream);
    clear(p.histogram, bins(p), stream);
    // Short rows: one launch. Longer ones and many documents want more thread blocks than rows.
    constexpr int kShortRow = 2 * kLinesPerBlock, kFewDocuments = 4;
    if (p.lines <= kShortRow && p.documents <= kFewDocuments) {
        if (p.rows == 0 || p.lines == 0) return;
        const auto kernel = p.documents == 1 ? rows_kernel<true> : rows_kernel<false>;
        kernel<<<static_cast<unsigned>(p.rows), kHistogramThreads, 0, stream>>>(p);
        check_cuda(cudaGetLastError(), "select_lines");
        return;
    }
    for (int number = 0; number < rounds(p); ++number) {
        p.round = number;
        add_histogram(p, stream);
        select_update(p, stream);
    }
    select_pack(p, stream);
}

void select_update(const SelectParams& p, cudaStream_t stream) {
    check(1 << p.digit_bits <= kMostDigits, "select_update: digit_bits=", p.digit_bits, ": at most 11");
    if (p.rows * p.documents == 0) return;
    update_kernel<<<static_cast<unsigned>(p.rows) * p.documents, kThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "select_update");
}

void select_pack(const SelectParams& p, cudaStream_t stream) {
    const int words = (p.lines + 63) / 64;
    const int64_t threads = static_cast<int64_t>(p.rows) * words * 32;
    if (threads == 0) return;
    const int64_t grid = (threads + kThreads - 1) / kThreads;
    pack_kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, words);
    check_cuda(cudaGetLastError(), "select_pack");
}

}  // namespace mtraining
