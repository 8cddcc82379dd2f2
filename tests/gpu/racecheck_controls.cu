// What compute-sanitizer's racecheck makes of the ways in which the Hopper kernels hand shared memory over. Every
// pattern but the last is free of races; `tools/gpu.sh sanitize` runs them under racecheck and compares with what is
// known of it:
//
//   0 barrier       a word from one thread to 128; every reader arrives at the barrier that lets the writer go on:
//   clean 1 bulk copy     the same with a copy of the copy engine as the writer: clean 2 warp release  as 0, but one
//   lane arrives for its warp, after __syncwarp: reported (write after read) 3 bulk release  as 1 with a warp's
//   release: reported 4 polled word   as 0, and the readers poll a word (st.relaxed, ld.relaxed) before they wait: the
//   word is reported 5 race          as 0, but the readers do not wait for the word: reported, rightly
//
// Usage: racecheck_controls PATTERN. The sum that is printed shows that the hand-over worked.
#include <cstdio>
#include <cstdlib>

#include "sm90/pipeline.cuh"

namespace {

using namespace mtraining::sm90;

constexpr int kStages = 4, kRounds = 24, kBytes = 1024, kReaders = 128;
enum Pattern { kBarrier, kBulk, kWarpRelease, kBulkRelease, kPolled, kRace, kPatterns };

struct Shared {
    alignas(128) uint8_t tile[kStages][kBytes];
    uint32_t word[kStages];
    uint32_t tickets[32];
    RingBarriers<kStages> ring;
};

template <Pattern kPattern>
struct HandOver {
    static constexpr bool kCopies = kPattern == kBulk || kPattern == kBulkRelease;
    static constexpr bool kLaneForWarp = kPattern == kWarpRelease || kPattern == kBulkRelease;

    __device__ static void write(Shared& shared, const uint8_t* from) {
        RingPosition<kStages> at;
        for (uint32_t n = 0; n < kRounds; ++n) {
            mbarrier_wait(&shared.ring.empty[at.stage], at.parity ^ 1);
            if (kCopies) {
                mbarrier_arrive_expect(&shared.ring.full[at.stage], kBytes);
                bulk_load(shared.tile[at.stage], from + n * kBytes, kBytes, &shared.ring.full[at.stage]);
            } else {
                shared.word[at.stage] = n;
                mbarrier_arrive(&shared.ring.full[at.stage]);
            }
            if (kPattern == kPolled) store_word(&shared.tickets[n], n);
            at.advance();
        }
    }

    __device__ static uint32_t read(Shared& shared) {
        RingPosition<kStages> at;
        uint32_t sum = 0;
        for (uint32_t n = 0; n < kRounds; ++n) {
            if (kPattern == kPolled) {
                while (load_word(&shared.tickets[n]) != n) {
                }
            }
            mbarrier_wait(&shared.ring.full[at.stage], at.parity);
            sum += kCopies ? shared.tile[at.stage][threadIdx.x] : shared.word[at.stage];
            if (kCopies) asm volatile("fence.proxy.async;" ::: "memory");
            if (kLaneForWarp) {
                release(&shared.ring.empty[at.stage]);
            } else {
                mbarrier_arrive(&shared.ring.empty[at.stage]);
            }
            if (kPattern == kRace) sum += *static_cast<volatile uint32_t*>(&shared.word[at.stage]);
            at.advance();
        }
        return sum;
    }
};

template <Pattern kPattern>
__global__ void __launch_bounds__(256, 1) hand_over(const uint8_t* from, uint32_t* sums) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        shared.ring.init(HandOver<kPattern>::kLaneForWarp ? kReaders / 32 : kReaders);
        for (uint32_t& ticket : shared.tickets) ticket = 0xFFFFFFFF;
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < kReaders) {
        sums[threadIdx.x] = HandOver<kPattern>::read(shared);
    } else if (threadIdx.x == kReaders) {
        HandOver<kPattern>::write(shared, from);
    }
}

template <int kPattern = 0>
void launch(int pattern, const uint8_t* from, uint32_t* sums) {
    if constexpr (kPattern < kPatterns) {
        if (pattern == kPattern) {
            hand_over<static_cast<Pattern>(kPattern)><<<1, 256>>>(from, sums);
        } else {
            launch<kPattern + 1>(pattern, from, sums);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int pattern = argc > 1 ? std::atoi(argv[1]) : 0;
    uint8_t* from;
    uint32_t* sums;
    uint32_t sum = 0;
    cudaMalloc(&from, kRounds * kBytes);
    cudaMemset(from, 1, kRounds * kBytes);
    cudaMalloc(&sums, kReaders * sizeof(uint32_t));
    launch(pattern, from, sums);
    const cudaError_t error = cudaMemcpy(&sum, sums, sizeof(sum), cudaMemcpyDeviceToHost);
    std::printf("pattern %d: %s, sum %u\n", pattern, cudaGetErrorString(error), sum);
    return error != cudaSuccess;
}
