#include "device.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "mtraining/check.h"

// Weak, because a CPU-only torch does not have it and the library is bound at load time.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) __attribute__((weak));

// Read by megatron_mtraining.ops.native before the library is loaded into torch.
extern "C" __attribute__((visibility("default"))) const char* mtraining_build_info() {
    return "{\"version\": \"" MTRAINING_VERSION "\", \"torch\": \"" MTRAINING_TORCH_VERSION
           "\", \"cuda\": \"" MTRAINING_CUDA_VERSION "\", \"architectures\": \"" MTRAINING_ARCHITECTURES "\"}";
}

namespace mtraining::binding {
namespace {

#ifdef MTRAINING_WITH_SM80
constexpr bool kWithSm80 = true;
#else
constexpr bool kWithSm80 = false;
#endif
#ifdef MTRAINING_WITH_SM90
constexpr bool kWithSm90 = true;
#else
constexpr bool kWithSm90 = false;
#endif

struct Capability {
    int major = 0, minor = 0;
};

Capability capability(int device) {
    Capability found;
    check_cuda(cudaDeviceGetAttribute(&found.major, cudaDevAttrComputeCapabilityMajor, device), "device query");
    check_cuda(cudaDeviceGetAttribute(&found.minor, cudaDevAttrComputeCapabilityMinor, device), "device query");
    return found;
}

[[noreturn]] void refuse(const char* op, const char* reason, Capability found) {
    fail(op, ": ", reason,
         "; built for architectures " MTRAINING_ARCHITECTURES ", found a device of compute capability ", found.major,
         ".", found.minor, " (rebuild with -DMTRAINING_CUDA_ARCHITECTURES=\"80;90\", or use kernel=\"reference\")");
}

}  // namespace

cudaStream_t current_stream(int device) {
    check(aoti_torch_get_current_cuda_stream != nullptr, "this torch was built without CUDA");
    void* stream = nullptr;
    check(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "torch has no current stream for cuda:", device);
    return static_cast<cudaStream_t>(stream);
}

int architecture(const char* op, int64_t requested, int device) {
    const Capability found = capability(device);
    const bool runs_sm80 = kWithSm80 && found.major >= 8;
    const bool runs_sm90 = kWithSm90 && found.major == 9;
    switch (requested) {
        case 0:
            if (runs_sm90) return 90;
            if (runs_sm80) return 80;
            refuse(op, "no kernel for this device", found);
        case 80:
            if (runs_sm80) return 80;
            refuse(op, "the sm80 kernels (arch=80) do not run here", found);
        case 90:
            if (runs_sm90) return 90;
            refuse(op, "the sm90 kernels (arch=90) do not run here", found);
        default: fail(op, ": arch=", requested, " must be 0, 80 or 90");
    }
}

void check_device(const char* op, int device) { architecture(op, 0, device); }

}  // namespace mtraining::binding
