#include "operands.h"

#include <string>

namespace mtraining::binding {
namespace {

std::string dtype_name(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::BFloat16: return "bfloat16";
        case ScalarType::Half: return "float16";
        case ScalarType::Float: return "float32";
        case ScalarType::Double: return "float64";
        case ScalarType::Int: return "int32";
        case ScalarType::Long: return "int64";
        default: return "dtype " + std::to_string(static_cast<int>(dtype));
    }
}

template <typename Sizes>
std::string shape_text(const Sizes& sizes) {
    std::string text = "[";
    for (const int64_t size : sizes) {
        if (text.size() > 1) text += ", ";
        text += size == kAny ? "*" : std::to_string(size);
    }
    return text + "]";
}

bool fits(const Tensor& x, std::initializer_list<int64_t> sizes) {
    if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
    int64_t d = 0;
    for (const int64_t size : sizes) {
        if (size != kAny && size != x.size(d)) return false;
        ++d;
    }
    return true;
}

}  // namespace

Arguments::Arguments(const char* op, const Tensor& first) : op_(op), device_(first.get_device_index()) {
    check(first.is_cuda(), op, ": the first tensor is not on a CUDA device");
}

void Arguments::tensor(const Tensor& x, const char* name, ScalarType dtype,
                       std::initializer_list<int64_t> sizes) const {
    check(x.is_cuda() && x.get_device_index() == device_, op_, ": ", name, " is not on cuda:", device_,
          " like the first tensor");
    check(x.scalar_type() == dtype, op_, ": ", name, " is ", dtype_name(x.scalar_type()), ", must be ",
          dtype_name(dtype));
    if (!fits(x, sizes)) {
        fail(op_, ": ", name, " has shape ", shape_text(x.sizes()), ", must be ", shape_text(sizes));
    }
}

DType Arguments::half(const Tensor& x, const char* name) const {
    const ScalarType dtype = x.scalar_type();
    if (dtype == ScalarType::BFloat16) return DType::kBFloat16;
    if (dtype == ScalarType::Half) return DType::kFloat16;
    fail(op_, ": ", name, " is ", dtype_name(dtype),
         "; the CUDA kernels take bfloat16 and float16 (kernel=\"reference\" takes float32 and float64 too)");
}

void Arguments::vectors(const Tensor& x, const char* name) const {
    if (x.numel() == 0) return;
    const int64_t unit = 16 / static_cast<int64_t>(x.element_size());
    bool good = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.stride(x.dim() - 1) == 1;
    for (int64_t d = 0; d + 1 < x.dim(); ++d) good = good && (x.size(d) == 1 || x.stride(d) % unit == 0);
    check(good, op_, ": ", name, " with strides ", shape_text(x.strides()),
          " must have a contiguous last dimension and rows at multiples of 16 bytes");
}

void Arguments::row_stride(const Tensor& x, const char* name, int64_t stride) const {
    constexpr int64_t kLargest = (int64_t{1} << 24) - 1;  // copies address the 64 rows of a tile by 32-bit offsets
    check(x.numel() == 0 || (stride >= 0 && stride <= kLargest), op_, ": ", name, " has a row stride of ", stride,
          ", must be from 0 to ", kLargest);
}

int32_t Arguments::int32(int64_t value, const char* name) const {
    check(value >= 0 && value <= INT32_MAX, op_, ": ", name, "=", value, " is out of range");
    return static_cast<int32_t>(value);
}

ScalarType scalar_type(DType dtype) { return dtype == DType::kBFloat16 ? ScalarType::BFloat16 : ScalarType::Half; }

}  // namespace mtraining::binding
