// From torch tensors (stable ABI) to the operands of the kernels, with one-line errors that name operator and argument.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

#include "mtraining/check.h"
#include "mtraining/params.h"

namespace mtraining::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAny = -1;

// Checks the arguments of one call. The first tensor sets the device.
class Arguments {
public:
    Arguments(const char* op, const Tensor& first);

    const char* op() const { return op_; }
    int device() const { return device_; }

    // Dtype, device and sizes (kAny fits every size).
    void tensor(const Tensor& x, const char* name, ScalarType dtype, std::initializer_list<int64_t> sizes) const;
    // The same, contiguous, as a pointer.
    template <typename T>
    T* contiguous(const Tensor& x, const char* name, ScalarType dtype, std::initializer_list<int64_t> sizes) const {
        tensor(x, name, dtype, sizes);
        check(x.is_contiguous(), op_, ": ", name, " is not contiguous");
        return static_cast<T*>(x.data_ptr());
    }
    // bf16 or fp16, which the first tensor decides.
    DType half(const Tensor& x, const char* name) const;
    // Last dimension contiguous, all other strides and the address multiples of 16 bytes.
    void vectors(const Tensor& x, const char* name) const;
    void row_stride(const Tensor& x, const char* name, int64_t stride) const;
    int32_t int32(int64_t value, const char* name) const;

private:
    const char* op_;
    int device_;
};

ScalarType scalar_type(DType dtype);

// [batch, rows, heads, head_dim]
template <typename T>
RowView<T> rows(const Arguments& arguments, const Tensor& x, const char* name, ScalarType dtype,
                std::initializer_list<int64_t> sizes) {
    arguments.tensor(x, name, dtype, sizes);
    arguments.vectors(x, name);
    arguments.row_stride(x, name, x.stride(1));
    return {static_cast<T*>(x.data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

// [batch, heads, slots, head_dim]
template <typename T>
RowView<T> slots(const Arguments& arguments, const Tensor& x, const char* name, ScalarType dtype,
                 std::initializer_list<int64_t> sizes) {
    arguments.tensor(x, name, dtype, sizes);
    arguments.vectors(x, name);
    arguments.row_stride(x, name, x.stride(2));
    return {static_cast<T*>(x.data_ptr()), x.stride(0), x.stride(2), x.stride(1)};
}

// [chunks, batch, rows, heads, head_dim]
template <typename T>
ChunkView<T> chunks(const Arguments& arguments, const Tensor& x, const char* name, ScalarType dtype,
                    std::initializer_list<int64_t> sizes) {
    arguments.tensor(x, name, dtype, sizes);
    arguments.vectors(x, name);
    arguments.row_stride(x, name, x.stride(2));
    return {static_cast<T*>(x.data_ptr()), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

}  // namespace mtraining::binding
