// Top-p selection with caps by radix search: histogram of the next digit, choice of the digit, and the kept lines as
// bits. All sums are of integers, so no order of summation shows.
#include <type_traits>

#include "mtraining/check.h"
#include "mtraining/index.h"

namespace mtraining {
namespace {

using Counter = unsigned long long;

// Entries of a state, see docs/design.md.
enum State { kShareMass, kShareAbove, kTotal, kCapMass, kCapTie, kCapAbove, kStateFields = 8 };

constexpr int kThreads = 256;
constexpr int kHistogramThreads = 1024;
constexpr int kLinesPerThread = 8;  // read at once
constexpr int kLinesPerBlock = kHistogramThreads * kLinesPerThread;
constexpr int kSharedDigits = 2048;  // most digits of a histogram in shared memory

struct Digit {
    int32_t share = -1;  // digit under the top-p prefix, -1 if the line is not under it
    int32_t cap = -1;    // digit under the cap's prefix
};

__device__ __forceinline__ Digit digit_of(const SelectParams& p, const int64_t* state, int64_t mass, int line) {
    const int64_t digits = int64_t{1} << p.digit_bits;
    Digit digit;
    if (p.round < p.mass_rounds) {
        const int shift = (p.mass_rounds - 1 - p.round) * p.digit_bits;
        const int64_t high = mass >> (shift + p.digit_bits);
        const int32_t own = static_cast<int32_t>((mass >> shift) & (digits - 1));
        if (high == state[kShareMass] >> (shift + p.digit_bits)) digit.share = own;
        if (high == state[kCapMass] >> (shift + p.digit_bits)) digit.cap = own;
    } else if (mass == state[kCapMass]) {
        const int shift = (p.mass_rounds + p.tie_rounds - 1 - p.round) * p.digit_bits;
        const int64_t order = __ldg(p.tie + line);
        if (order >> (shift + p.digit_bits) == state[kCapTie] >> (shift + p.digit_bits)) {
            digit.cap = static_cast<int32_t>((order >> shift) & (digits - 1));
        }
    }
    return digit;
}

// Sums of the lines that a thread meets one after another in one bin: neighbours often share it, so most additions stay
// in registers and few reach the bin.
struct Run {
    int64_t bin = -1;
    Counter sum = 0;

    template <typename Add>
    __device__ __forceinline__ void add(int64_t to, Counter value, const Add& flush) {
        if (to != bin) {
            if (sum != 0) flush(bin, sum);
            bin = to;
            sum = 0;
        }
        sum += value;
    }
    // The warp's last runs: added up first if all lanes end in one bin.
    template <typename Add>
    __device__ __forceinline__ void finish(const Add& flush) {
        const int64_t first = __shfl_sync(0xffffffffu, bin, 0);
        if (__all_sync(0xffffffffu, bin == first)) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (threadIdx.x % 32 == 0 && sum != 0) flush(bin, sum);
        } else if (sum != 0) {
            flush(bin, sum);
        }
    }
};

// The histogram of one document in shared memory. Only 32-bit additions are fast there, so a sum of masses is kept in
// two halves and carries.
struct SharedHistogram {
    uint32_t low[kSharedDigits], high[kSharedDigits], count[kSharedDigits];

    __device__ __forceinline__ void add_mass(int digit, Counter mass) {
        const uint32_t part = static_cast<uint32_t>(mass);
        const uint32_t before = atomicAdd(low + digit, part);
        const uint32_t carry = before + part < before;
        const uint32_t rest = static_cast<uint32_t>(mass >> 32) + carry;
        if (rest != 0) atomicAdd(high + digit, rest);
    }
    __device__ __forceinline__ Counter mass(int digit) const {
        return (static_cast<Counter>(high[digit]) << 32) | low[digit];
    }
};

// kShared: one document, whose histogram is first built in shared memory.
template <bool kShared>
__global__ void __launch_bounds__(kHistogramThreads)
    histogram_kernel(const __grid_constant__ SelectParams p, int row_blocks) {
    __shared__ typename std::conditional<kShared, SharedHistogram, char>::type local;
    const int row = blockIdx.x / row_blocks;
    const int digits = 1 << p.digit_bits;
    Counter* global = reinterpret_cast<Counter*>(p.histogram) + static_cast<int64_t>(row) * p.documents * 2 * digits;
    if constexpr (kShared) {
        for (int i = threadIdx.x; i < digits; i += kHistogramThreads) local.low[i] = local.high[i] = local.count[i] = 0;
        __syncthreads();
    }
    const auto add_mass = [&](int64_t bin, Counter value) {
        if constexpr (kShared) {
            local.add_mass(static_cast<int>(bin), value);
        } else {
            atomicAdd(global + bin, value);
        }
    };
    const auto add_count = [&](int64_t bin, Counter value) {
        if constexpr (kShared) {
            atomicAdd(local.count + (bin - digits), static_cast<uint32_t>(value));
        } else {
            atomicAdd(global + bin, value);
        }
    };
    const int64_t* states = p.state + static_cast<int64_t>(row) * p.documents * kStateFields;
    const int64_t* mass_row = p.mass + static_cast<int64_t>(row) * p.lines;
    Run share, cap;
    for (int base = blockIdx.x % row_blocks * kLinesPerBlock; base < p.lines; base += row_blocks * kLinesPerBlock) {
        int64_t masses[kLinesPerThread];
        int32_t documents[kLinesPerThread];
#pragma unroll
        for (int i = 0; i < kLinesPerThread; ++i) {
            const int line = base + i * kHistogramThreads + threadIdx.x;
            masses[i] = line < p.lines ? __ldg(mass_row + line) : 0;
            documents[i] = line < p.lines ? __ldg(p.segment + line) : -1;
        }
#pragma unroll
        for (int i = 0; i < kLinesPerThread; ++i) {
            const int64_t mass = masses[i];
            const int32_t document = documents[i];
            if (document < 0 || !(mass > 0 || p.all_lines)) continue;
            const int line = base + i * kHistogramThreads + threadIdx.x;
            const Digit digit = digit_of(p, states + document * kStateFields, mass, line);
            const int64_t bins = static_cast<int64_t>(document) * 2 * digits;
            if (digit.share >= 0 && mass != 0) share.add(bins + digit.share, static_cast<Counter>(mass), add_mass);
            if (digit.cap >= 0) cap.add(bins + digits + digit.cap, 1, add_count);
        }
    }
    share.finish(add_mass);
    cap.finish(add_count);
    if constexpr (kShared) {
        __syncthreads();
        for (int i = threadIdx.x; i < digits; i += kHistogramThreads) {
            if (const Counter mass = local.mass(i)) atomicAdd(global + i, mass);
            if (const uint32_t count = local.count[i]) atomicAdd(global + digits + i, Counter{count});
        }
    }
}

// Suffix sums of a histogram row, from the highest digit down: thread t holds kPerThread digits.
struct Suffix {
    static constexpr int kPerThread = 8;

    int64_t values[kPerThread];
    int64_t before;  // sum of the digits above this thread's
    int64_t total;

    __device__ __forceinline__ Suffix(const int64_t* row, int digits, int64_t* scratch) {
        int64_t sum = 0;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            const int digit = top_digit(digits) - i;
            values[i] = digit >= 0 ? row[digit] : 0;
            sum += values[i];
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int64_t inclusive = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        __syncthreads();
        if (lane == 31) scratch[warp] = inclusive;
        __syncthreads();
        before = inclusive - sum;
        total = 0;
        for (int w = 0; w < kThreads / 32; ++w) {
            if (w < warp) before += scratch[w];
            total += scratch[w];
        }
    }
    __device__ static __forceinline__ int top_digit(int digits) {
        return digits - 1 - static_cast<int>(threadIdx.x) * kPerThread;
    }

    // The highest digit at which `reached(sum of it and of those above)`, 0 if there is none, goes into the prefix, the
    // sum above it into `above`. `best` is shared memory.
    template <typename Reached>
    __device__ __forceinline__ void narrow(int digits, int* best, int64_t* prefix, int64_t* above, int shift,
                                           const Reached& reached) const {
        if (threadIdx.x == 0) *best = 0;
        const int64_t start = *above;
        __syncthreads();
        int64_t held = start + before;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            held += values[i];
            const int digit = top_digit(digits) - i;
            if (digit >= 0 && reached(held)) {
                atomicMax(best, digit);
                break;
            }
        }
        __syncthreads();
        const int digit = *best;
        held = start + before;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (top_digit(digits) - i == digit) {
                *above = held;
                *prefix |= static_cast<int64_t>(digit) << shift;
            }
            held += values[i];
        }
        __syncthreads();
    }
};

__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ SelectParams p) {
    __shared__ int64_t scratch[kThreads / 32];
    __shared__ int best;
    const int digits = 1 << p.digit_bits;
    int64_t* state = p.state + static_cast<int64_t>(blockIdx.x) * kStateFields;
    int64_t* histogram = p.histogram + static_cast<int64_t>(blockIdx.x) * 2 * digits;
    const bool in_mass = p.round < p.mass_rounds;
    const int rounds = in_mass ? p.mass_rounds : p.mass_rounds + p.tie_rounds;
    const int shift = (rounds - 1 - p.round) * p.digit_bits;
    if (in_mass) {
        const Suffix mass(histogram, digits, scratch);
        if (p.round == 0 && threadIdx.x == 0) state[kTotal] = mass.total;
        __syncthreads();
        const int64_t target = p.share_numerator * state[kTotal];
        mass.narrow(digits, &best, state + kShareMass, state + kShareAbove, shift,
                    [&](int64_t held) { return held * p.share_denominator >= target; });
    }
    if (p.cap >= 0) {
        const Suffix count(histogram + digits, digits, scratch);
        count.narrow(digits, &best, state + (in_mass ? kCapMass : kCapTie), state + kCapAbove, shift,
                     [&](int64_t held) { return held >= p.cap; });
    }
    if (p.clear_histogram) {
        __syncthreads();  // everyone has read it
        for (int i = threadIdx.x; i < 2 * digits; i += kThreads) histogram[i] = 0;
    }
}

// Two lines a lane: a warp makes one word.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ SelectParams p, int words) {
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (index >= static_cast<int64_t>(p.rows) * words) return;
    const int row = index / words;
    const int lane = threadIdx.x % 32;
    const auto kept = [&](int64_t line) {
        if (line >= p.lines) return false;
        const int64_t mass = p.mass[static_cast<int64_t>(row) * p.lines + line];
        const int32_t document = __ldg(p.segment + line);
        if (document < 0 || !(mass > 0 || p.all_lines)) return false;
        const int64_t* state = p.state + (static_cast<int64_t>(row) * p.documents + document) * kStateFields;
        if (!p.all_lines && mass < state[kShareMass]) return false;
        return mass > state[kCapMass] || (mass == state[kCapMass] && __ldg(p.tie + line) >= state[kCapTie]);
    };
    const int64_t line = index % words * 64 + lane;
    const uint32_t low = __ballot_sync(0xffffffffu, kept(line));
    const uint32_t high = __ballot_sync(0xffffffffu, kept(line + 32));
    if (lane == 0) p.words[index] = static_cast<int64_t>((static_cast<uint64_t>(high) << 32) | low);
}

}  // namespace

namespace {

int64_t bins(const SelectParams& p) { return static_cast<int64_t>(p.rows) * p.documents * 2 << p.digit_bits; }

// Adds to the histogram.
void add_histogram(const SelectParams& p, cudaStream_t stream) {
    if (bins(p) == 0 || p.lines == 0) return;
    // Few enough thread blocks that each adds many lines to its own histogram before it adds that to the result.
    constexpr int kMostRowBlocks = 8;
    const int needed = (p.lines + kLinesPerBlock - 1) / kLinesPerBlock;
    const int row_blocks = needed < kMostRowBlocks ? needed : kMostRowBlocks;
    const unsigned grid = static_cast<unsigned>(p.rows) * row_blocks;
    if (p.documents == 1 && 1 << p.digit_bits <= kSharedDigits) {
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
    // Where every line is kept and no cap cuts there is nothing to search for.
    const int rounds = p.all_lines && p.cap < 0 ? 0 : p.mass_rounds + p.tie_rounds;
    for (int number = 0; number < rounds; ++number) {
        p.round = number;
        add_histogram(p, stream);
        select_update(p, stream);
    }
    select_pack(p, stream);
}

void select_update(const SelectParams& p, cudaStream_t stream) {
    constexpr int kMostDigits = kThreads * Suffix::kPerThread;
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
