#include "sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include "mtraining/check.h"

namespace mtraining::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encode() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    check_cuda(error, "looking up cuTensorMapEncodeTiled");
    check(found == cudaDriverEntryPointSuccess && function != nullptr,
          "the CUDA driver has no cuTensorMapEncodeTiled: a driver for CUDA >= 12.0 is needed");
    return reinterpret_cast<EncodeTiled>(function);
}

}  // namespace

CUtensorMap chunk_map(const ChunkView<const void>& view, const Shape& shape, int64_t rows, int heads, int chunks,
                      const char* name) {
    static const EncodeTiled encode = find_encode();
    constexpr int kElementBytes = 2;
    const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(shape.head_dim), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(shape.batch),
                                 static_cast<cuuint64_t>(chunks)};
    const int64_t elements[4] = {view.row_stride, view.head_stride, view.batch_stride, view.chunk_stride};
    const cuuint32_t box[5] = {64, 64, 1, 1, 1};
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    cuuint64_t strides[4];
    check(reinterpret_cast<uintptr_t>(view.data) % 16 == 0, name, " must start at a multiple of 16 bytes");
    for (int i = 0; i < 4; ++i) {
        strides[i] = static_cast<cuuint64_t>(elements[i]) * kElementBytes;
        if (sizes[i + 1] == 1) strides[i] = 16;  // never stepped over: any valid value
        check(strides[i] % 16 == 0 && strides[i] < (cuuint64_t{1} << 40), name, " has a stride of ", elements[i],
              " elements; strides must be non-negative multiples of 8 below 2^39");
    }
    CUtensorMap map;
    const CUresult result = encode(
        &map, shape.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
        const_cast<void*>(view.data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused ", name, " (CUDA error ", static_cast<int>(result),
          ")");
    return map;
}

}  // namespace mtraining::sm90
