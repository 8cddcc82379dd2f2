// Top-p selection with caps by radix search, as functions of a thread block: the digits of lines, histograms of them,
// the choice of a digit, and the lines that are kept. All sums are of integers, so no order of summation shows.
#pragma once

#include "mtraining/index.h"

namespace mtraining::selection {

using Counter = unsigned long long;

// Entries of a state, see docs/design.md.
enum State { kShareMass, kShareAbove, kTotal, kCapMass, kCapTie, kCapAbove, kStateFields = 8 };

constexpr int kMostDigits = 2048;   // of a histogram
constexpr int kLinesPerThread = 8;  // read at once

// Kinds of sums by digit: masses, and with a cap counts behind them.
__host__ __device__ __forceinline__ int kinds(const SelectParams& p) { return p.cap >= 0 ? 2 : 1; }

// Entries of the histogram of one row and document.
__host__ __device__ __forceinline__ int64_t entries(const SelectParams& p) {
    return static_cast<int64_t>(kinds(p)) << p.digit_bits;
}

struct Digit {
    int32_t share = -1;  // digit under the top-p prefix, -1 if the line is not under it
    int32_t cap = -1;    // digit under the cap's prefix
};

__device__ __forceinline__ Digit digit_of(const SelectParams& p, int round, const int64_t* state, int64_t mass,
                                          int line) {
    const int64_t digits = int64_t{1} << p.digit_bits;
    Digit digit;
    if (round < p.mass_rounds) {
        const int shift = (p.mass_rounds - 1 - round) * p.digit_bits;
        const int64_t high = mass >> (shift + p.digit_bits);
        const int32_t own = static_cast<int32_t>((mass >> shift) & (digits - 1));
        if (high == state[kShareMass] >> (shift + p.digit_bits)) digit.share = own;
        if (p.cap >= 0 && high == state[kCapMass] >> (shift + p.digit_bits)) digit.cap = own;
    } else if (mass == state[kCapMass]) {
        const int shift = (p.mass_rounds + p.tie_rounds - 1 - round) * p.digit_bits;
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
    uint32_t low[kMostDigits], high[kMostDigits], count[kMostDigits];

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

// What a thread block adds to the histogram of one row: to shared memory first where there is one document. kMarked:
// lines that are no candidates have a mass of -1 (one document).
template <bool kShared, int kThreads, bool kMarked = false>
struct HistogramPart {
    const SelectParams& p;
    const int digits;
    SharedHistogram* local;  // kShared: cleared by begin()
    Counter* global;         // [documents, kinds, digits]
    Run share, cap;

    __device__ __forceinline__ HistogramPart(const SelectParams& params, SharedHistogram* shared, int64_t row)
        : p(params),
          digits(1 << params.digit_bits),
          local(shared),
          global(reinterpret_cast<Counter*>(params.histogram) + row * params.documents * entries(params)) {}

    // All threads call it, once everyone is done with the shared memory.
    __device__ __forceinline__ void begin() {
        if constexpr (kShared) {
            for (int i = threadIdx.x; i < digits; i += kThreads) local->low[i] = local->high[i] = local->count[i] = 0;
            __syncthreads();
        }
    }
    __device__ __forceinline__ void add_mass(int64_t bin, Counter value) const {
        if constexpr (kShared) {
            local->add_mass(static_cast<int>(bin), value);
        } else {
            atomicAdd(global + bin, value);
        }
    }
    __device__ __forceinline__ void add_count(int64_t bin, Counter value) const {
        if constexpr (kShared) {
            atomicAdd(local->count + (bin - digits), static_cast<uint32_t>(value));
        } else {
            atomicAdd(global + bin, value);
        }
    }
    // Adds the lines base ... base + kThreads * kLinesPerThread - 1 below `end`. `masses` is that of line 0, `states`
    // those of the row.
    __device__ __forceinline__ void add_lines(int round, const int64_t* states, const int64_t* masses, int base,
                                              int end) {
        int64_t mass[kLinesPerThread];
        int32_t document[kLinesPerThread];
#pragma unroll
        for (int i = 0; i < kLinesPerThread; ++i) {
            const int line = base + i * kThreads + static_cast<int>(threadIdx.x);
            mass[i] = line < end ? masses[line] : -1;
            if constexpr (kMarked) {
                document[i] = mass[i] < 0 ? -1 : 0;
            } else {
                document[i] = line < end ? __ldg(p.segment + line) : -1;
            }
        }
#pragma unroll
        for (int i = 0; i < kLinesPerThread; ++i) {
            if (document[i] < 0 || !(mass[i] > 0 || p.all_lines)) continue;
            const int line = base + i * kThreads + static_cast<int>(threadIdx.x);
            const Digit digit = digit_of(p, round, states + document[i] * kStateFields, mass[i], line);
            const int64_t bins = document[i] * entries(p);
            if (digit.share >= 0 && mass[i] != 0) {
                share.add(bins + digit.share, static_cast<Counter>(mass[i]),
                          [this](int64_t bin, Counter value) { add_mass(bin, value); });
            }
            if (digit.cap >= 0) {
                cap.add(bins + digits + digit.cap, 1, [this](int64_t bin, Counter value) { add_count(bin, value); });
            }
        }
    }
    // All threads call it: the bins then hold the lines (kShared: those in shared memory).
    __device__ __forceinline__ void add_runs() {
        share.finish([this](int64_t bin, Counter value) { add_mass(bin, value); });
        if (p.cap >= 0) cap.finish([this](int64_t bin, Counter value) { add_count(bin, value); });
        share = cap = Run();
        if constexpr (kShared) __syncthreads();
    }
    // All threads call it; the row's histogram then holds the lines.
    __device__ __forceinline__ void finish() {
        add_runs();
        if constexpr (kShared) {
            for (int i = threadIdx.x; i < digits; i += kThreads) {
                if (const Counter sum = local->mass(i)) atomicAdd(global + i, sum);
                if (p.cap < 0) continue;
                if (const uint32_t count = local->count[i]) atomicAdd(global + digits + i, Counter{count});
            }
        }
    }
};

// Sums by digit, from the highest digit down: each thread of the thread block holds `each` digits.
template <int kThreads>
struct Suffix {
    static constexpr int kPerThread = kMostDigits / kThreads;

    const int each, top;  // digits of a thread; its highest
    int64_t values[kPerThread];
    int64_t before = 0;  // sum of the digits above this thread's
    int64_t total = 0;

    template <typename Value>
    __device__ __forceinline__ Suffix(const Value& value_of, int digits)
        : each((digits + kThreads - 1) / kThreads), top(digits - 1 - static_cast<int>(threadIdx.x) * each) {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) values[i] = holds(i) ? value_of(top - i) : 0;
    }
    __device__ __forceinline__ bool holds(int i) const { return i < each && top >= i; }

    // All threads call it, once; `scratch` is shared memory, an entry a warp.
    __device__ __forceinline__ void scan(int64_t* scratch) {
        int64_t sum = 0;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) sum += values[i];
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
        for (int w = 0; w < kThreads / 32; ++w) {
            if (w < warp) before += scratch[w];
            total += scratch[w];
        }
    }

    // The highest digit at which `reached(sum of it and of those above)`, 0 if there is none, goes into the prefix, the
    // sum above it into `above`, that with its own into `held_there`. `best` and `held_there` are shared memory.
    template <typename Reached>
    __device__ __forceinline__ void narrow(int* best, int64_t* prefix, int64_t* above, int64_t* held_there, int shift,
                                           const Reached& reached) const {
        if (threadIdx.x == 0) *best = 0;
        const int64_t start = *above;
        __syncthreads();
        int64_t held = start + before;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            held += values[i];
            if (holds(i) && reached(held)) {
                atomicMax(best, top - i);
                break;
            }
        }
        __syncthreads();
        const int digit = *best;
        held = start + before;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (holds(i) && top - i == digit) {
                *above = held;
                *held_there = held + values[i];
                *prefix |= static_cast<int64_t>(digit) << shift;
            }
            held += values[i];
        }
        __syncthreads();
    }
};

// Shared memory of narrow_prefixes.
template <int kThreads>
struct NarrowScratch {
    int64_t warps[kThreads / 32];
    int64_t held;  // at the cap's digit
    int best;
};

// Narrows the prefixes of one (row, document) by a digit; mass_of(digit) and count_of(digit) are the sums of the round.
// All threads of the thread block call it, and see the state after it.
template <int kThreads, typename MassOf, typename CountOf>
__device__ __forceinline__ void narrow_prefixes(const SelectParams& p, int round, int64_t* state, const MassOf& mass_of,
                                                const CountOf& count_of, NarrowScratch<kThreads>& scratch) {
    using Sums = Suffix<kThreads>;
    const int digits = 1 << p.digit_bits;
    const bool in_mass = round < p.mass_rounds;
    const int last = in_mass ? p.mass_rounds : p.mass_rounds + p.tie_rounds;
    const int shift = (last - 1 - round) * p.digit_bits;
    Sums mass(mass_of, in_mass ? digits : 0), count(count_of, p.cap >= 0 ? digits : 0);
    if (in_mass) {
        mass.scan(scratch.warps);
        if (round == 0 && threadIdx.x == 0) state[kTotal] = mass.total;
        __syncthreads();
        const int64_t target = p.share_numerator * state[kTotal];
        mass.narrow(&scratch.best, state + kShareMass, state + kShareAbove, &scratch.held, shift,
                    [&](int64_t held) { return held * p.share_denominator >= target; });
    }
    if (p.cap >= 0) {
        count.scan(scratch.warps);
        count.narrow(&scratch.best, state + (in_mass ? kCapMass : kCapTie), state + kCapAbove, &scratch.held, shift,
                     [&](int64_t held) { return held >= p.cap; });
    }
}

// The same by a histogram in memory.
template <int kThreads>
__device__ __forceinline__ void narrow_prefixes(const SelectParams& p, int round, int64_t* state,
                                                const int64_t* histogram, NarrowScratch<kThreads>& scratch) {
    const int64_t* counts = histogram + (1 << p.digit_bits);
    narrow_prefixes<kThreads>(
        p, round, state, [=](int digit) { return histogram[digit]; }, [=](int digit) { return counts[digit]; },
        scratch);
}

// Whether a line is kept; `states` are those of its row.
__device__ __forceinline__ bool is_kept(const SelectParams& p, const int64_t* states, int64_t mass, int line) {
    const int32_t document = __ldg(p.segment + line);
    if (document < 0 || !(mass > 0 || p.all_lines)) return false;
    const int64_t* state = states + document * kStateFields;
    if (!p.all_lines && mass < state[kShareMass]) return false;
    return mass > state[kCapMass] || (mass == state[kCapMass] && __ldg(p.tie + line) >= state[kCapTie]);
}

// The kept lines first ... first + 63, below `end`, as bits. A warp calls it.
__device__ __forceinline__ int64_t pack_word(const SelectParams& p, const int64_t* states, const int64_t* masses,
                                             int first, int end) {
    const auto kept = [&](int line) { return line < end && is_kept(p, states, masses[line], line); };
    const int lane = threadIdx.x % 32;
    const uint32_t low = __ballot_sync(0xffffffffu, kept(first + lane));
    const uint32_t high = __ballot_sync(0xffffffffu, kept(first + 32 + lane));
    return static_cast<int64_t>((static_cast<uint64_t>(high) << 32) | low);
}

// Rounds of a selection; where every line is kept and no cap cuts there is nothing to search for.
__host__ __device__ inline int rounds(const SelectParams& p) {
    return p.all_lines && p.cap < 0 ? 0 : p.mass_rounds + p.tie_rounds;
}

}  // namespace mtraining::selection
