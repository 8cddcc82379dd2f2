// probe_columns: how the pairs of heads are shared out over launches, and the way through memory for sequences that are
// longer than the shared memory of the device holds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "index/probe.h"
#include "index/select.cuh"
#include "mtraining/dispatch.h"

namespace mtraining {
namespace {

constexpr int kPair = 2;  // heads of a thread block
constexpr int kStateFields = 8;
// Masses in memory at a time, in entries (4 MiB), at least those of a pair of heads.
constexpr int64_t kMostMasses = int64_t{1} << 19;

template <typename Function>
Function select(const ProbeParams& p, Function bf16_d64, Function bf16_d128, Function fp16_d64, Function fp16_d128) {
    Shape shape;
    shape.head_dim = p.head_dim;
    shape.dtype = p.dtype;
    return Instantiations<Function>{bf16_d64, bf16_d128, fp16_d64, fp16_d128}.select(shape, "probe_columns");
}

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t pairs_of(const ProbeParams& p) {
    return static_cast<int64_t>(p.batch) * p.kv_heads * ceil_divide(p.heads / p.kv_heads, kPair);
}

// State and histogram of one head.
int64_t search_entries(const SelectParams& p) { return p.documents * (kStateFields + selection::entries(p)); }

void clear(void* data, int64_t bytes, cudaStream_t stream) {
    if (bytes > 0) check_cuda(cudaMemsetAsync(data, 0, bytes, stream), "probe_columns: clearing");
}

// Masses of a few heads of a group at a time in memory.
void through_memory(const ProbeColumnsParams& all, const ProbeColumnsPlan& plan, int64_t* workspace,
                    cudaStream_t stream) {
    const int group = all.probe.heads / all.probe.kv_heads;
    const int64_t columns = static_cast<int64_t>(all.probe.kv_blocks) * kBlock;
    for (int first = 0; first < all.probe.batch * all.probe.heads;) {
        const int batch = first / all.probe.heads, head = first % all.probe.heads;
        const int left = group - head % group, count = left < plan.pairs * kPair ? left : plan.pairs * kPair;
        ProbeParams p = all.probe;
        SelectParams s = all.select;
        p.batch = p.kv_heads = 1;
        p.heads = s.rows = count;
        const auto shifted = [](const auto& view, int64_t elements) {  // of 16 bits
            auto result = view;
            result.data = static_cast<const uint16_t*>(view.data) + elements;
            return result;
        };
        p.probe_q = shifted(p.probe_q, batch * p.probe_q.batch_stride + head * p.probe_q.head_stride);
        p.k = shifted(p.k, batch * p.k.batch_stride + head / group * p.k.head_stride);
        p.row_max += static_cast<int64_t>(first) * p.tiles * kBlock;
        p.row_sum += static_cast<int64_t>(first) * p.tiles * kBlock;
        p.slash_mass += static_cast<int64_t>(first) * p.blocks;
        p.column_mass = workspace;
        s.mass = workspace;
        s.state = workspace + count * columns;
        s.histogram = s.state + static_cast<int64_t>(count) * s.documents * kStateFields;
        s.words += static_cast<int64_t>(first) * p.kv_blocks;
        probe_mass(p, stream);
        select_lines(s, stream);
        first += count;
    }
}

}  // namespace

ProbeColumnsPlan plan_probe_columns(const ProbeColumnsParams& p) {
    using namespace probe;
    const auto ask =
        select<SelectRoom (*)(bool)>(p.probe, select_room<__nv_bfloat16, 64>, select_room<__nv_bfloat16, 128>,
                                     select_room<__half, 64>, select_room<__half, 128>);
    const int64_t pairs = pairs_of(p.probe), blocks = p.probe.kv_blocks;
    ProbeColumnsPlan plan;
    if (pairs == 0 || blocks == 0) return plan;
    const SelectRoom room = ask(p.select.documents == 1);
    const int64_t least = room.range > 0 ? ceil_divide(blocks, room.range) : 0;  // thread blocks of a pair
    if (least > 0 && least <= room.thread_blocks) {
        // As few launches as hold everything, and these alike.
        const int64_t launches = ceil_divide(pairs, room.thread_blocks / least);
        const int64_t together = ceil_divide(pairs, launches);
        const int64_t most = room.thread_blocks / together;
        plan.range = static_cast<int32_t>(ceil_divide(blocks, most < blocks ? most : blocks));
        plan.members = static_cast<int32_t>(ceil_divide(blocks, plan.range));
        plan.pairs = static_cast<int32_t>(together);
        plan.workspace = together * (kPair * search_entries(p.select) + 1);
    } else {
        const int64_t together = kMostMasses / (kPair * blocks * kBlock);
        plan.pairs = static_cast<int32_t>(together > 0 ? together : 1);
        plan.workspace = plan.pairs * kPair * (blocks * kBlock + search_entries(p.select));
    }
    return plan;
}

void probe_columns(const ProbeColumnsParams& all, const ProbeColumnsPlan& whole, int64_t* workspace,
                   cudaStream_t stream) {
    using namespace probe;
    ProbeColumnsParams p = all;
    ProbeColumnsPlan plan = whole;
    if (plan.range == 0) {
        if (p.probe.kv_blocks > 0) return through_memory(p, plan, workspace, stream);
        return clear(p.probe.slash_mass, static_cast<int64_t>(p.probe.batch) * p.probe.heads * p.probe.blocks * 8,
                     stream);
    }
    using Launch = void (*)(const ProbeColumnsParams&, const ProbeColumnsPlan&, int, unsigned*, cudaStream_t);
    const auto launch = select<Launch>(p.probe, select_launch<__nv_bfloat16, 64>, select_launch<__nv_bfloat16, 128>,
                                       select_launch<__half, 64>, select_launch<__half, 128>);
    const int64_t pairs = pairs_of(p.probe);
    const int64_t states = plan.pairs * kPair * static_cast<int64_t>(p.select.documents) * kStateFields;
    p.select.state = workspace;
    p.select.histogram = workspace + states;
    unsigned* flags = reinterpret_cast<unsigned*>(workspace + plan.pairs * kPair * search_entries(p.select));
    clear(p.probe.slash_mass, static_cast<int64_t>(p.probe.batch) * p.probe.heads * p.probe.blocks * 8, stream);
    for (int64_t first = 0; first < pairs; first += plan.pairs) {
        if (pairs - first < plan.pairs) plan.pairs = static_cast<int32_t>(pairs - first);
        clear(workspace, whole.workspace * 8, stream);
        launch(p, plan, static_cast<int>(first), flags, stream);
    }
}

}  // namespace mtraining
