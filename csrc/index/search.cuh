// The rounds of a selection inside one kernel, by thread blocks that hold parts of the same rows.
#pragma once

#include "index/select.cuh"

namespace mtraining::selection {

// Thread blocks that work on the same rows. All of them must be resident at once (a cooperative launch).
struct Group {
    unsigned* arrived;  // zero at first, of the group
    unsigned* ties;     // the same; set where more lines than the cap allows have the last mass that it lets in
    int members, member;
    unsigned passed = 0;

    // What anyone wrote before it, everyone sees after it. All threads call it.
    __device__ __forceinline__ void barrier() {
        __syncthreads();
        ++passed;
        if (threadIdx.x == 0) {
            __threadfence();
            if (members > 1) {
                atomicAdd(arrived, 1u);
                unsigned count;
                do {
                    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(count) : "l"(arrived) : "memory");
                } while (count < passed * static_cast<unsigned>(members));
            }
            __threadfence();
        }
        __syncthreads();
    }
};

// All rounds for `rows` rows from `first_row` of p.state and p.histogram on (both zero at first, the latter between
// rounds too). The thread block has their lines first ... end - 1; masses_of(r) points at the mass of line 0 of the
// r-th row.
template <bool kShared, int kThreads, bool kMarked, typename MassesOf>
__device__ __forceinline__ void search(const SelectParams& p, Group& group, SharedHistogram* shared,
                                       NarrowScratch<kThreads>& scratch, int64_t first_row, int rows, int first,
                                       int end, const MassesOf& masses_of) {
    for (int round = 0; round < rounds(p); ++round) {
        // No ties at any cap: the order of ties does not matter.
        if (round == p.mass_rounds && *static_cast<volatile unsigned*>(group.ties) == 0) return;
        for (int r = 0; r < rows; ++r) {
            HistogramPart<kShared, kThreads, kMarked> part(p, shared, first_row + r);
            part.begin();
            const int64_t* states = p.state + (first_row + r) * p.documents * kStateFields;
            for (int base = first; base < end; base += kThreads * kLinesPerThread) {
                part.add_lines(round, states, masses_of(r), base, end);
            }
            part.finish();
            __syncthreads();
        }
        group.barrier();
        for (int item = group.member; item < rows * p.documents; item += group.members) {
            const int64_t entry = first_row * p.documents + item;
            int64_t* histogram = p.histogram + entry * entries(p);
            narrow_prefixes<kThreads>(p, round, p.state + entry * kStateFields, histogram, scratch);
            __syncthreads();  // everyone has read it
            for (int i = threadIdx.x; i < entries(p); i += kThreads) histogram[i] = 0;
            if (round == p.mass_rounds - 1 && p.cap >= 0 && threadIdx.x == 0 && scratch.held > p.cap) {
                atomicOr(group.ties, 1u);
            }
        }
        group.barrier();
    }
}

// Words of a row's lines first ... end - 1 (`first` is a multiple of 64) into words[line / 64].
template <int kThreads>
__device__ __forceinline__ void pack_words(const SelectParams& p, const int64_t* states, const int64_t* masses,
                                           int first, int end, int64_t* words) {
    for (int base = first + static_cast<int>(threadIdx.x) / 32 * 64; base < end; base += kThreads / 32 * 64) {
        const int64_t word = pack_word(p, states, masses, base, end);
        if (threadIdx.x % 32 == 0) words[base / 64] = word;
    }
}

}  // namespace mtraining::selection
