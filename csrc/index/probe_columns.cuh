// Third probe pass and selection of the columns in one kernel: a thread block keeps the column masses of two heads and
// a range of key blocks in shared memory, and the thread blocks of a pair of heads search together what is kept. So
// masses never reach memory, and a round of the search reads them from where they were summed up.
#pragma once

#include <map>

#include "index/probe.cuh"
#include "index/search.cuh"

namespace mtraining::probe {

template <int D>
struct SelectShared {
    using Walk = Shared<D, Pass::kSelect>;
    union {
        Walk walk;                             // first the masses are summed up,
        selection::SharedHistogram histogram;  // then searched
    };
    selection::NarrowScratch<kThreads> scratch;
    // After it: masses, int64 [kHeads, range * 64].
};

constexpr int kMassBytes = kHeads * kBlock * static_cast<int>(sizeof(int64_t));  // of a key block

// One launch works on the pairs of heads first_pair ... first_pair + pairs - 1, each by `members` thread blocks. All of
// p.select's state and histogram and `flags` [2, pairs] are zero at first.
template <typename T, int D, bool kOneDocument>
__global__ void __launch_bounds__(kThreads, 2)
    probe_columns_kernel(const __grid_constant__ ProbeColumnsParams p, const __grid_constant__ ProbeColumnsPlan plan,
                         int first_pair, unsigned* flags) {
    extern __shared__ __align__(256) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<SelectShared<D>*>(dynamic_shared);
    auto* masses = reinterpret_cast<int64_t*>(dynamic_shared + sizeof(SelectShared<D>));
    const int pair = blockIdx.x % plan.pairs;
    selection::Group group{flags + pair, flags + plan.pairs + pair, plan.members,
                           static_cast<int>(blockIdx.x) / plan.pairs};
    const Place place(p.probe, first_pair + pair, group.member, plan.range);
    const int stride = plan.range * kBlock;
    for (int i = threadIdx.x; i < kHeads * stride; i += kThreads) masses[i] = 0;
    __syncthreads();
    {
        Probe<T, D, Pass::kSelect> probe(p.probe, shared.walk, place);
        probe.column_mass = masses;
        probe.column_stride = stride;
        probe.walk();
    }
    __syncthreads();
    const int first = place.first_block * kBlock, end = place.end_block * kBlock;
    const int heads = place.second ? kHeads : 1;
    const auto masses_of = [&](int head) { return masses + head * stride - first; };
    if (kOneDocument) {
        for (int line = first + threadIdx.x; line < end; line += kThreads) {
            if (__ldg(p.select.segment + line) >= 0) continue;
            for (int head = 0; head < heads; ++head) masses_of(head)[line] = -1;
        }
        __syncthreads();
    }
    selection::search<kOneDocument, kThreads, kOneDocument>(p.select, group, &shared.histogram, shared.scratch,
                                                            static_cast<int64_t>(pair) * kHeads, heads, first, end,
                                                            masses_of);
    for (int head = 0; head < heads; ++head) {
        const int64_t row = static_cast<int64_t>(place.batch) * p.probe.heads + place.first_head + head;
        const int64_t state = (static_cast<int64_t>(pair) * kHeads + head) * p.select.documents;
        selection::pack_words<kThreads>(p.select, p.select.state + state * selection::kStateFields, masses_of(head),
                                        first, end, p.select.words + row * p.probe.kv_blocks);
    }
}

template <typename T, int D>
const void* select_kernel(bool one_document) {
    return one_document ? reinterpret_cast<const void*>(&probe_columns_kernel<T, D, true>)
                        : reinterpret_cast<const void*>(&probe_columns_kernel<T, D, false>);
}

// Thread blocks that a device holds at once, and the key blocks that each has room for.
template <typename T, int D>
SelectRoom ask_room(int device, bool one_document) {
    constexpr int kResident = 2;  // a multiprocessor: as many as the registers allow
    int processors = 0, shared = 0, reserved = 0, most = 0;
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
        check_cuda(cudaDeviceGetAttribute(value, attribute, device), "probe_columns: device attributes");
    };
    ask(&processors, cudaDevAttrMultiProcessorCount);
    ask(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    ask(&reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    ask(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const int room = shared / kResident - reserved;
    SelectRoom result;
    result.range = ((room < most ? room : most) - static_cast<int>(sizeof(SelectShared<D>))) / kMassBytes;
    if (result.range < 1) return result;
    const int bytes = static_cast<int>(sizeof(SelectShared<D>)) + result.range * kMassBytes;
    const void* kernel = select_kernel<T, D>(one_document);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "probe_columns set-up");
    int resident = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, bytes),
               "probe_columns: occupancy");
    result.thread_blocks = resident * processors;
    return result;
}

// The same of the current device, asked once a thread.
template <typename T, int D>
SelectRoom select_room(bool one_document) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "probe_columns: device");
    thread_local std::map<int, SelectRoom> rooms;
    const int key = 2 * device + one_document;
    const auto found = rooms.find(key);
    if (found != rooms.end()) return found->second;
    return rooms[key] = ask_room<T, D>(device, one_document);
}

template <typename T, int D>
void select_launch(const ProbeColumnsParams& p, const ProbeColumnsPlan& plan, int first_pair, unsigned* flags,
                   cudaStream_t stream) {
    const unsigned bytes = sizeof(SelectShared<D>) + plan.range * kMassBytes;
    void* arguments[] = {const_cast<ProbeColumnsParams*>(&p), const_cast<ProbeColumnsPlan*>(&plan), &first_pair,
                         &flags};
    check_cuda(cudaLaunchCooperativeKernel(select_kernel<T, D>(p.select.documents == 1), plan.pairs * plan.members,
                                           kThreads, arguments, bytes, stream),
               "probe_columns");
}

}  // namespace mtraining::probe
